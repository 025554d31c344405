"""Traced rows are each real token's own routing: batched, padded, stopped early, sampled or forced."""

import numpy as np
import pytest
import torch

from ecospec.data.prompts import Prompt
from ecospec.errors import DamageError
from ecospec.tracing.job.engine import Outcome, Sampling, TransformersEngine
from ecospec.tracing.job.validation import Rejected, Routed
from ecospec.tracing.target.loading import shape_of
from ecospec.tracing.target.requests import Request
from tests.tiny import FAMILIES, brute_force_experts, tiny_model

LENGTHS = (3, 11, 7)


def requests_of(lengths: tuple[int, ...] = LENGTHS, answers: int | None = None, seed: int = 0) -> list[Request]:
    generator = np.random.default_rng(seed)
    draw = lambda n: generator.integers(0, 256, n).tolist()  # noqa: E731
    return [
        Request(Prompt(f"d/{row}/0", "d", row, 0, ""), draw(n), None if answers is None else draw(answers + row))
        for row, n in enumerate(lengths)
    ]


def engine_of(model: torch.nn.Module, sampling: Sampling) -> TransformersEngine:
    return TransformersEngine(model, shape_of(model.config), sampling)


def outcomes_of(engine: TransformersEngine, requests: list[Request]) -> list[Outcome]:
    """Of one batch."""
    ((batch, outcomes),) = engine.trace([requests])
    assert batch is requests
    return outcomes


def greedy_reference(model: torch.nn.Module, ids: list[int], new: int, ends: tuple[int, ...] = ()) -> list[int]:
    """All tokens of a greedy continuation, the last new one and the end token included; no cache, no batch."""
    ids = list(ids)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids


def assert_true_routing(model: torch.nn.Module, routed: Routed) -> None:
    reference = brute_force_experts(model, routed.input_ids.tolist())
    assert np.array_equal(np.sort(routed.experts, -1), reference.numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_rows_are_each_tokens_own_routing_and_number_n_plus_m_minus_1(family: str) -> None:
    model, requests = tiny_model(family, seed=2), requests_of()
    engine = engine_of(model, Sampling(max_new_tokens=6))
    batched = outcomes_of(engine, requests)
    for request, routed in zip(requests, batched, strict=True):
        expected = greedy_reference(model, request.prompt_ids, 6)[:-1]
        assert routed.input_ids.tolist() == expected
        assert len(routed.experts) == len(request.prompt_ids) + 6 - 1
        assert routed.prompt_len == len(request.prompt_ids)
        assert_true_routing(model, routed)
        (alone,) = outcomes_of(engine, [request])
        assert np.array_equal(alone.experts, routed.experts)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_text_of_n_tokens_has_n_rows(family: str) -> None:
    model, requests = tiny_model(family, seed=3), requests_of(answers=2)
    for request, routed in zip(requests, outcomes_of(engine_of(model, Sampling(1)), requests), strict=True):
        assert routed.input_ids.tolist() == request.prompt_ids + request.answer_ids
        assert routed.prompt_len == len(request.prompt_ids)
        assert_true_routing(model, routed)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_drops_its_end_token_and_all_that_ran_after_it(seed: int) -> None:
    model, requests = tiny_model("qwen3_moe", seed=seed), requests_of(seed=seed)
    texts = [greedy_reference(model, request.prompt_ids, 8) for request in requests]
    end = texts[0][LENGTHS[0] + 2]  # emitted by the first row as its third token, at the latest
    model.generation_config.eos_token_id = end
    results = outcomes_of(engine_of(model, Sampling(max_new_tokens=8)), requests)
    assert len(results[0].input_ids) < LENGTHS[0] + 8 - 1
    for request, routed in zip(requests, results, strict=True):
        assert routed.input_ids.tolist() == greedy_reference(model, request.prompt_ids, 8, (end,))[:-1]
        assert_true_routing(model, routed)


def test_a_single_new_token_leaves_the_prompt_alone() -> None:
    model, requests = tiny_model("gpt_oss"), requests_of()
    for request, routed in zip(requests, outcomes_of(engine_of(model, Sampling(1)), requests), strict=True):
        assert routed.input_ids.tolist() == request.prompt_ids
        assert_true_routing(model, routed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_alone_of_n_tokens_has_n_rows(family: str) -> None:
    model, requests = tiny_model(family, seed=4), requests_of()
    for request, routed in zip(requests, outcomes_of(engine_of(model, Sampling(0)), requests), strict=True):
        assert routed.input_ids.tolist() == request.prompt_ids
        assert routed.prompt_len == len(routed.experts) == len(request.prompt_ids)
        assert_true_routing(model, routed)


def test_a_prompt_alone_may_fill_the_context_and_no_more() -> None:
    model, requests = tiny_model("qwen3_moe", max_position_embeddings=11), requests_of((3, 11, 12))
    outcomes = outcomes_of(engine_of(model, Sampling(0)), requests)
    assert [type(outcome) for outcome in outcomes] == [Routed, Routed, Rejected]


def test_draws_depend_on_seed_and_samples_alone() -> None:
    model, requests = tiny_model("olmoe"), requests_of()
    sample = lambda seed: [  # noqa: E731
        r.input_ids.tolist() for r in outcomes_of(engine_of(model, Sampling(6, 1.0, 0.9, seed)), requests)
    ]
    torch.manual_seed(0)
    first, state = sample(1), torch.get_rng_state()
    torch.manual_seed(1)
    assert sample(1) == first
    assert sample(2) != first
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)  # and leave the process's own generator alone


def test_sampled_rows_are_true_routing_too() -> None:
    model, requests = tiny_model("qwen2_moe"), requests_of()
    for routed in outcomes_of(engine_of(model, Sampling(6, 1.0, 1.0, 5)), requests):
        assert_true_routing(model, routed)


def test_the_checkpoints_own_sampling_settings_do_not_leak() -> None:
    model, requests = tiny_model("qwen3_moe"), requests_of()
    expected = [greedy_reference(model, request.prompt_ids, 8)[:-1] for request in requests]
    assert any(len(set(ids)) < len(ids) for ids in expected)  # a repetition penalty would show
    model.generation_config.update(do_sample=True, temperature=3.0, repetition_penalty=5.0, top_k=7)
    results = outcomes_of(engine_of(model, Sampling(max_new_tokens=8)), requests)
    assert [routed.input_ids.tolist() for routed in results] == expected


def test_rows_that_do_not_add_up_are_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral")
    engine = engine_of(model, Sampling(max_new_tokens=4))
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **options: generate(*args, **options)[:, :-1])
    with pytest.raises(DamageError, match="tokens where"):
        outcomes_of(engine, requests_of())


def test_forced_tokens_keep_their_own_positions_beside_padding() -> None:
    model, requests = tiny_model("qwen3_moe"), requests_of(answers=2)
    seen: list[dict] = []
    handle = model.base_model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True)
    outcomes_of(engine_of(model, Sampling(1)), requests)
    handle.remove()
    for request, positions, mask in zip(requests, seen[0]["position_ids"], seen[0]["attention_mask"], strict=True):
        assert positions[mask.bool()].tolist() == list(range(len(request.ids)))


def test_batches_come_back_in_order_and_each_outcome_belongs_to_its_request() -> None:
    model, requests = tiny_model("qwen3_moe"), requests_of((3, 5, 4, 6, 2))
    engine = engine_of(model, Sampling(max_new_tokens=3))
    batches = [requests[:2], requests[2:3], requests[3:]]
    for (batch, outcomes), expected in zip(engine.trace(iter(batches)), batches, strict=True):
        assert batch == expected
        for request, routed in zip(batch, outcomes, strict=True):
            assert routed.input_ids[: routed.prompt_len].tolist() == request.prompt_ids
            assert_true_routing(model, routed)


@pytest.mark.parametrize("answers", [None, 4])
def test_a_sample_longer_than_the_context_is_rejected_and_its_batch_is_not(answers: int | None) -> None:
    model, requests = tiny_model("qwen3_moe", max_position_embeddings=12), requests_of((3, 9, 5), answers)
    outcomes = outcomes_of(engine_of(model, Sampling(max_new_tokens=5)), requests)
    assert outcomes[1] == Rejected(
        "needs 13 tokens but the target's context is 12"
        if answers is None
        else "needs 14 tokens but the target's context is 12"
    )
    for routed in (outcomes[0], outcomes[2]):
        assert isinstance(routed, Routed)
        assert_true_routing(model, routed)


def test_a_batch_of_samples_that_are_all_too_long_runs_nothing() -> None:
    model, requests = tiny_model("qwen3_moe", max_position_embeddings=2), requests_of()
    outcomes = outcomes_of(engine_of(model, Sampling(max_new_tokens=1)), requests)
    assert [type(outcome) for outcome in outcomes] == [Rejected] * 3
