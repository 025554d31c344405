"""The recorder gives the ids that the experts ran with, for every family, alone and batched."""

import pytest
import torch

from ecospec.errors import DamageError, InputError
from ecospec.tracing.target.recorder import RoutingRecorder
from ecospec.tracing.target.routers import find_sites
from tests.tiny import FAMILIES, brute_force_experts, tiny_model


def random_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(site.module._forward_pre_hooks) for site in find_sites(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_ids_are_those_of_a_brute_force_recomputation(family: str) -> None:
    model, ids = tiny_model(family, seed=1), random_ids(2, 14)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(ids)
        experts_TLK = recorder.experts(expected_rows=28)
    assert experts_TLK.dtype == torch.int64
    reference = torch.cat([brute_force_experts(model, row) for row in ids.tolist()])
    assert len(reference.unique()) == 8  # the routing does vary
    assert torch.equal(experts_TLK.sort(-1).values, reference)


def test_ids_are_given_as_executed_by_the_router() -> None:
    model, ids = tiny_model("deepseek_v3"), random_ids(1, 9)
    executed = []
    router = model.model.layers[1].mlp.gate
    handle = router.register_forward_hook(lambda _module, _args, output: executed.append(output[2]))
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(ids)
    handle.remove()
    assert torch.equal(recorder.experts()[:, 0], executed[0])


def test_forwards_follow_each_other_and_take_forgets_them() -> None:
    model = tiny_model("qwen3_moe")
    first, second = random_ids(1, 3, seed=1), random_ids(2, 4, seed=2)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(first)
        alone = recorder.take(3)
        model(first)
        model(second)
        both = recorder.experts(3 + 8)
        assert torch.equal(both[:3], alone)
        assert torch.equal(recorder.take(), both)
        model(second)
        assert torch.equal(recorder.take(8), both[3:])


def test_hooks_are_gone_after_the_context_even_after_an_error() -> None:
    model = tiny_model("mixtral")
    with RoutingRecorder(model):
        assert hook_count(model) == 3
    assert hook_count(model) == 0
    with pytest.raises(KeyError), RoutingRecorder(model):
        raise KeyError
    assert hook_count(model) == 0


def test_a_site_that_never_fires_is_damage() -> None:
    model = tiny_model("qwen3_moe")
    sites = find_sites(model)
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model.model.layers[1].mlp.forward = lambda hidden: (
            hidden
        )  # as a fused kernel would: no experts module is called
        model(random_ids(1, 4))
        with pytest.raises(DamageError, match=sites[1].name):
            recorder.experts()
    with RoutingRecorder(model) as recorder, pytest.raises(DamageError, match="no routing"):
        recorder.experts()


def test_layers_that_disagree_on_the_tokens_are_damage() -> None:
    model = tiny_model("qwen3_moe")
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(random_ids(1, 4))
        experts = find_sites(model)[2].module
        experts(torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
        with pytest.raises(DamageError, match="routed 5 tokens"):
            recorder.experts()


def test_an_unexpected_number_of_tokens_is_damage() -> None:
    model = tiny_model("qwen3_moe")
    with RoutingRecorder(model) as recorder, torch.no_grad():
        model(random_ids(1, 4))
        with pytest.raises(DamageError, match="4 tokens where 5"):
            recorder.take(5)


def test_a_dense_model_is_refused() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, intermediate_size=8)
    with pytest.raises(InputError, match="no routed experts"):
        RoutingRecorder(AutoModelForCausalLM.from_config(config))
