"""The validator passes true routing whole and names each fault; it refuses nothing that a model may do."""

import itertools

import numpy as np
import pytest

from ecospec.tracing.job.validation import Rejected, Report, Routed, outgrown, validate
from ecospec.tracing.target.loading import MoeShape
from tests.vllm_stub import ROUTING_FAULTS, all_layers, hashed_experts

SHAPES = {
    "all layers MoE": MoeShape("stub", (0, 1, 2), 16, 4, 500, 32, 3),
    "dense first": MoeShape("stub", (2, 3), 16, 4, 500, 32, 4),
    "dense between": MoeShape("stub", (0, 2, 4), 8, 2, 500, 32, 5),
    "512 experts, K of 22": MoeShape("stub", (1, 2), 512, 22, 500, 32, 3),
    "K of 1": MoeShape("stub", tuple(range(1, 13)), 64, 1, 500, 32, 13),
}
GENERATED = [3, 5, 7]


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 500, tokens).tolist()


def report_of(shape: MoeShape, sent_ids: list[int], new_ids: list[int]) -> Report:
    experts = all_layers(hashed_experts(sent_ids + new_ids[:-1], shape), shape)
    return Report(list(sent_ids), list(new_ids), experts)


def slow_fault(sent_ids: list[int], report: Report, shape: MoeShape) -> bool:
    """Whether a report is refused, token by token; for K above 1."""
    if report.read_ids != sent_ids or len(report.experts) != len(sent_ids) + max(len(report.new_ids) - 1, 0):
        return True
    for row in report.experts.tolist():
        for layer, ids in enumerate(row):
            sound = len(set(ids)) == shape.top_k and all(0 <= one < shape.num_experts for one in ids)
            if not (sound if layer in shape.layers else not any(ids)):
                return True
    return False


@pytest.mark.parametrize(("name", "seed", "new"), list(itertools.product(SHAPES, range(3), (0, 1, 3))))
def test_true_routing_passes_whole_and_dense_layers_are_dropped(name: str, seed: int, new: int) -> None:
    """verl#5037 and slime#810: the layer index in the file must be the model's."""
    shape, sent = SHAPES[name], ids_of(9 + seed, seed)
    routed = validate(sent, 4, report_of(shape, sent, GENERATED[:new]), shape)
    text = sent + GENERATED[: max(new - 1, 0)]
    assert isinstance(routed, Routed)
    assert routed.input_ids.dtype == np.int32 and routed.input_ids.tolist() == text
    assert routed.prompt_len == 4
    assert np.array_equal(routed.experts, hashed_experts(text, shape))


@pytest.mark.parametrize("name", SHAPES)
def test_rows_of_moe_layers_alone_are_as_good(name: str) -> None:
    shape, sent = SHAPES[name], ids_of(8)
    experts_TLK = hashed_experts(sent, shape)
    assert np.array_equal(validate(sent, 8, Report(sent, [], experts_TLK), shape).experts, experts_TLK)


EXPECTED = {
    "zeros": "token 0 of 8 has rows of zeros",
    "zeros first": "token 0 of 8 has rows of zeros",
    "zeros last": "token 7 of 8 has rows of zeros",
    "last row lost": "routing of 7 tokens where 8 went",
    "a row too many": "routing of 9 tokens where 8 went",
    "layers shifted": "layer 1 is dense but has routing: the layers are shifted",
    "a layer too many": "routing of 5 layers where the model has 4",
    "another K": "routing to 5 experts a token where the model uses 4",
    "physical ids": "expert id 17 is outside 0..15",
    "minus one": "expert id -1 is outside 0..15",
    "one expert twice": "token 7 uses one expert twice in layer 3",
    "fractions": "the routing is float32 [8, 4, 4], not integers",
    "flat": "the routing is uint8 [128], not integers",
}


@pytest.mark.parametrize("fault", ROUTING_FAULTS)
def test_each_fault_is_refused_by_name(fault: str) -> None:
    """vllm#44116, #54730, #33013, #39917; sglang#20964; verl#5037; slime#810; tpu-inference#2965, #3583."""
    shape, sent = SHAPES["dense first"], ids_of(8)
    report = report_of(shape, sent, [9])
    broken = Report(report.read_ids, report.new_ids, ROUTING_FAULTS[fault](report.experts, shape))
    assert EXPECTED[fault] in validate(sent, 8, broken, shape).reason


def test_dense_layers_after_a_shift_the_other_way_are_refused_too() -> None:
    """The last MoE layer's ids then lie in the first dense one."""
    shape, sent = SHAPES["dense first"], ids_of(8)
    report = report_of(shape, sent, [9])
    shifted = Report(sent, [9], np.roll(report.experts, 1, axis=1))
    assert "layer 0 is dense but has routing" in validate(sent, 8, shifted, shape).reason


@pytest.mark.parametrize(
    ("read", "named"),
    [([1, 2, 4], "id 4 at place 2 where 3"), ([1, 2], "2 prompt ids where 3"), ([2, 2, 3], "id 2 at place 0 where 1")],
)
def test_other_prompt_ids_than_were_sent_are_refused_whatever_the_rows(read: list[int], named: str) -> None:
    """speculators#279: the rows of another request, under its own ids."""
    shape = SHAPES["all layers MoE"]
    verdict = validate([1, 2, 3], 3, Report(read, [], hashed_experts(read, shape)), shape)
    assert named in verdict.reason


@pytest.mark.parametrize("seed", range(40))
def test_any_single_wrong_id_is_judged_as_the_slow_reference_does(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = list(SHAPES.values())[seed % 4]
    sent = ids_of(int(generator.integers(1, 7)), seed)
    report = report_of(shape, sent, [4])
    experts = report.experts.astype(np.int64)
    place = tuple(generator.integers(0, size) for size in experts.shape)
    experts[place] = generator.integers(-1, shape.num_experts + 2)
    changed = Report(sent, [4], experts)
    assert isinstance(validate(sent, 1, changed, shape), Rejected) == slow_fault(sent, changed, shape)


def test_under_k_of_1_expert_0_is_a_choice_but_rows_of_zeros_are_not() -> None:
    """vllm#44116 where duplicates cannot give it away."""
    shape, sent = SHAPES["K of 1"], ids_of(5)
    experts = hashed_experts(sent, shape)
    experts[2, :11] = 0  # eleven layers of twelve
    experts[2, 11] = 1
    experts[:, 3] = 0  # one layer for all tokens
    assert isinstance(validate(sent, 5, Report(sent, [], experts), shape), Routed)
    experts[2] = 0
    assert "token 2 of 5 has rows of zeros" in validate(sent, 5, Report(sent, [], experts), shape).reason


@pytest.mark.parametrize(("tokens", "refused"), [(1, False), (4, False), (5, True), (40, True)])
def test_few_zeros_of_a_small_model_with_k_of_1_are_believable_and_many_are_not(tokens: int, refused: bool) -> None:
    """8 experts and 2 layers: 64^-5 is the first power below one in a thousand million."""
    shape = MoeShape("stub", (0, 1), 8, 1, 500, 32, 2)
    verdict = validate(ids_of(tokens), 1, Report(ids_of(tokens), [], np.zeros((tokens, 2, 1), np.uint8)), shape)
    assert isinstance(verdict, Rejected) == refused


def test_a_single_expert_is_always_expert_0() -> None:
    shape = MoeShape("stub", (0, 1), 1, 1, 500, 32, 2)
    assert isinstance(validate([1, 2], 2, Report([1, 2], [], np.zeros((2, 2, 1), np.uint8)), shape), Routed)


@pytest.mark.parametrize(("tokens", "context", "fits"), [(5, 5, True), (6, 5, False), (10**9, None, True)])
def test_what_outgrows_the_context_is_refused_with_both_numbers(tokens: int, context: int | None, fits: bool) -> None:
    refused = outgrown(tokens, context)
    assert refused == (None if fits else Rejected("needs 6 tokens but the target's context is 5"))
