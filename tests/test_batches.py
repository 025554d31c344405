"""Texts decoded together are the texts decoded alone, whatever their lengths and whenever they end."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from ecospec.errors import InputError
from ecospec.inference import Method, generate, selector
from ecospec.inference.decoding import picking
from ecospec.inference.decoding.generation import CustomGenerate
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.evaluation.evaluate import left_padded
from ecospec.inference.tree import DraftTree, tree_from_levels
from ecospec.predictor.kinds.counting import ExpertShares, TableFootprints
from ecospec.predictor.kinds.draft_mlp.source import DraftMLPFootprints
from ecospec.predictor.kinds.frequency.table import FrequencyTable
from ecospec.predictor.kinds.last_step.source import LastStepFootprints
from ecospec.predictor.kinds.linear.source import LinearFootprints
from tests.selecting import chosen_of
from tests.stand_ins import (
    GREEDY,
    SAMPLED,
    DraftMLPStandIn,
    EmptyDrafter,
    HashedFootprints,
    LinearStandIn,
    tiny_predictor,
)
from tests.tiny import VOCABULARY, brute_force_experts, tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")  # gpt_oss here has a sliding window of 8
LENGTHS = (3, 40, 2, 17, 9, 8, 25, 5)
NEW_TOKENS = 24


class HashedDrafter:
    """Drafts that are a function of the text's last token, right every now and then by way of `table`."""

    feature_layers = (2,)

    def __init__(self, table: dict[int, int]) -> None:
        self.table = table

    def reset(self) -> None:
        self.seen = 0

    def draft(self, ids_T: torch.Tensor, features_nF: torch.Tensor) -> DraftTree:
        self.seen += len(features_nF)
        assert self.seen == len(ids_T) - 1, "features of every token before the root, once each"
        levels, token, parent = [], int(ids_T[-1]), 0
        for depth in range(3):
            token = self.table.get(token, (token * 7 + 3) % VOCABULARY)
            pair = torch.tensor([(token + 1) % VOCABULARY, token])
            levels.append((pair, torch.tensor([parent, parent]), torch.tensor([0.3, 0.6])))
            parent = 2 + 2 * depth
        return tree_from_levels(ids_T[-1], levels)


def texts_of(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS[:count]]


def alone(model, ids_T, seed, **options):
    torch.manual_seed(seed)
    return model.generate(ids_T[None], max_new_tokens=NEW_TOKENS, **options)[0, len(ids_T) :].tolist()


def followers(texts: list[torch.Tensor], answers: list[list[int]]) -> dict[int, int]:
    """Token → a token that followed it somewhere, so that many drafts are right and many are not."""
    return {a: b for answer in answers for a, b in itertools.pairwise(answer)}


def together(model, texts, drafter, joint=False, **options):
    ids_BT, mask_BT = left_padded(texts)
    generators = [torch.Generator().manual_seed(100 + row) for row in range(len(texts))]
    method = {"drafter": drafter, "predictor": HashedFootprints(), "joint": joint, "generators": generators}
    settings = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **method, **options}
    out = generate(model, ids_BT, attention_mask=mask_BT, **settings)
    assert torch.equal(out[:, : ids_BT.shape[1]], ids_BT)
    return out[:, ids_BT.shape[1] :].tolist()


def eagle_head(model):
    """A random EAGLE-3 head for `model`, fed three of its layers."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, max_position_embeddings=256)
    head = Eagle3Head(config, feature_layers=(1, 2, 3)).eval().requires_grad_(False)
    return head.attach_embedding(model.get_input_embeddings())


def padded(answers: list[list[int]]) -> list[list[int]]:
    width = max(map(len, answers))
    return [answer + [0] * (width - len(answer)) for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_text_of_a_batch_is_the_text_alone(family, count, options):
    model = tiny_model(family, seed=count)
    texts = texts_of(count, count)
    stops = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    options = {**options, "eos_token_id": [stops[0][7], stops[-1][-3]]}  # rows end at different times
    answers = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    if count > 2:
        assert len({len(answer) for answer in answers}) > 1
    drafter = HashedDrafter(followers(texts, stops))
    for joint in (False, True):
        assert together(model, texts, drafter, joint, **options) == padded(answers)


def test_a_repetition_penalty_leaves_the_padding_of_a_hooked_batch_out():
    model = tiny_model("qwen3_moe", 2)
    model.generation_config.eos_token_id = None
    ids_BT, mask_BT = left_padded(texts_of(4, 2))
    options = {"attention_mask": mask_BT, "max_new_tokens": 12, "pad_token_id": 0, **GREEDY, "repetition_penalty": 1.5}
    hook = CustomGenerate(Method(HashedDrafter({}), selector("confidence")))
    assert torch.equal(model.generate(ids_BT, custom_generate=hook, **options), model.generate(ids_BT, **options))


@pytest.mark.parametrize("seed", range(3))
def test_processors_see_each_text_without_its_padding(seed):
    model = tiny_model("qwen3_moe", seed)
    model.generation_config.eos_token_id = None
    texts = texts_of(4, seed)
    options = {**SAMPLED, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "top_k": 20, "min_new_tokens": 5}
    answers = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    assert together(model, texts, HashedDrafter(followers(texts, answers)), **options) == padded(answers)


def test_a_left_padded_batch_through_the_hook_is_what_generate_gives():
    model = tiny_model("qwen3_moe", 2)
    ids_BT, mask_BT = left_padded(texts_of(4, 2))
    options = {"attention_mask": mask_BT, "max_new_tokens": 12, "pad_token_id": 0, **GREEDY}
    expected = model.generate(ids_BT, **options)
    hook = CustomGenerate(Method(HashedDrafter({}), selector("marginal"), footprints=HashedFootprints()))
    assert torch.equal(model.generate(ids_BT, custom_generate=hook, **options), expected)
    assert len(hook.last_run.new_by_row) == 4


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_neural_drafters_and_predictors_keep_the_texts_of_a_batch_apart(family, options):
    model, texts = tiny_model(family, 5), texts_of(4, 5)
    ends = [
        alone(model, ids_T, 100 + row, eos_token_id=None, **options)[4 + 5 * row] for row, ids_T in enumerate(texts)
    ]
    options = {**options, "eos_token_id": ends}
    answers = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    assert len({len(answer) for answer in answers}) > 1
    for joint in (False, True):
        drafter, predictor = TreeDrafter(eagle_head(model), 3, 2), tiny_predictor(model.get_input_embeddings())
        assert together(model, texts, drafter, joint, predictor=predictor, **options) == padded(answers)


class Watched(LastStepFootprints):
    """Notes what it is told; its own footprints must be the experts of the last token told of."""

    def reset(self, rows):
        self.alive, self.told = list(range(rows)), [[] for _ in range(rows)]

    def keep_rows(self, rows):
        self.alive = [self.alive[row] for row in rows]

    def footprints(self, texts, trees, routed):
        found = super().footprints(texts, trees, routed)
        for place, number in enumerate(self.alive):
            self.told[number].append(routed[place].sort(-1).values)
            assert len(torch.cat(self.told[number])) == len(texts[place]) - 1, "all tokens before the root, once each"
            last_NLK = found[place].nonzero()[:, -1].view(*found.shape[1:3], -1)
            assert (last_NLK == self.told[number][-1][-1]).all()
        return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_source_is_told_the_true_experts_of_every_token_before_the_root(family, options):
    model, texts = tiny_model(family, 4), texts_of(3, 4)
    stops = [alone(model, ids_T, 100 + row, eos_token_id=None, **options) for row, ids_T in enumerate(texts)]
    options = {**options, "eos_token_id": [stops[0][7], stops[1][11]]}
    answers = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    assert len({len(answer) for answer in answers}) > 1
    source = Watched(8)
    drafter = HashedDrafter(followers(texts, stops))
    assert together(model, texts, drafter, predictor=source, **options) == padded(answers)
    assert max(len(told) for told in source.told) > 3, "over several steps"
    for ids_T, answer, told in zip(texts, answers, source.told, strict=True):
        told_TLK = torch.cat(told)
        assert torch.equal(told_TLK, brute_force_experts(model, ids_T.tolist() + answer)[: len(told_TLK)])


SOURCES = {
    "last_step": lambda: LastStepFootprints(8),
    "frequency": lambda: TableFootprints(FrequencyTable(ExpertShares(np.tile(np.arange(1, 9) / 36, (3, 1)), 2))),
    "linear": lambda: LinearFootprints(LinearStandIn()),
    "draft_mlp": lambda: DraftMLPFootprints(DraftMLPStandIn()),
}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_texts_of_a_batch_are_plain_decodings_with_every_footprint_source(options):
    model, texts = tiny_model("qwen3_moe", 5), texts_of(3, 5)
    ends = [
        alone(model, ids_T, 100 + row, eos_token_id=None, **options)[4 + 5 * row] for row, ids_T in enumerate(texts)
    ]
    options = {**options, "eos_token_id": ends}
    answers = [alone(model, ids_T, 100 + row, **options) for row, ids_T in enumerate(texts)]
    assert len({len(answer) for answer in answers}) > 1
    drafter = TreeDrafter(eagle_head(model), 3, 2)
    for source, joint in [*((source, False) for source in SOURCES), ("draft_mlp", True)]:
        assert together(model, texts, drafter, joint, predictor=SOURCES[source](), **options) == padded(answers), source


def test_hidden_input_that_a_drafter_lacks_is_refused_before_decoding():
    with pytest.raises(InputError, match="draft with eagle3 or mtp"):
        Method(EmptyDrafter(), selector("marginal"), footprints=SOURCES["draft_mlp"]())


@pytest.mark.parametrize("joint", [False, True])
def test_texts_that_end_with_their_first_token_leave_the_others_alone(joint):
    model, texts = tiny_model("qwen3_moe", 1), texts_of(4, 1)
    firsts = [alone(model, ids_T, 0, **GREEDY)[0] for ids_T in texts]
    for ends in ([firsts[0]], [firsts[3], firsts[1]], firsts):
        options = {**GREEDY, "eos_token_id": ends}
        answers = [alone(model, ids_T, 0, **options) for ids_T in texts]
        assert min(map(len, answers)) == 1
        for drafter in (EmptyDrafter(), HashedDrafter(followers(texts, answers))):
            assert together(model, texts, drafter, joint, **options) == padded(answers)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_equal_texts_with_equal_seeds_stay_equal(options):
    model, ids_T = tiny_model("deepseek_v3", 3), texts_of(2, 3)[1]
    model.generation_config.eos_token_id = None
    answer = alone(model, ids_T, 7, **options)
    drafter = HashedDrafter(followers([ids_T], [answer]))
    for joint in (False, True):
        same = [torch.Generator().manual_seed(7) for _ in range(4)]
        assert together(model, [ids_T] * 4, drafter, joint, generators=same, **options) == [answer] * 4


@pytest.mark.parametrize("count", [2, 8])
def test_a_greedy_batch_is_padded_as_stock_generate_pads_it(count):
    model, texts = tiny_model("qwen3_moe", 6), texts_of(count, 6)
    ids_BT, mask_BT = left_padded(texts)
    ends = [alone(model, ids_T, 0, **GREEDY)[3 + row] for row, ids_T in enumerate(texts)]
    options = {"attention_mask": mask_BT, "max_new_tokens": NEW_TOKENS, "eos_token_id": ends, **GREEDY}
    for pad in (0, 77, None):  # None: the first end token
        model.generation_config.pad_token_id = None
        expected = model.generate(ids_BT, pad_token_id=pad, **options)
        assert torch.equal(
            generate(model, ids_BT, drafter=EmptyDrafter(), policy="confidence", **options, pad_token_id=pad), expected
        )
    assert (expected[:, -1] == ends[0]).any()


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 4])
def test_reading_a_step_once_as_a_gpu_wants_it_gives_the_same_texts(options, count, monkeypatch):
    model, texts = tiny_model("qwen3_moe", 4), texts_of(4, 4)[-count:]
    texts_to_cut = [alone(model, ids_T, 100 + row, eos_token_id=None, **options) for row, ids_T in enumerate(texts)]
    options = {**options, "eos_token_id": [texts_to_cut[0][13], texts_to_cut[-1][9]], "repetition_penalty": 1.1}
    drafter, states = HashedDrafter(followers(texts, texts_to_cut)), []
    for free in (True, False):
        monkeypatch.setattr(picking, "is_cpu", lambda device, free=free: free)
        generators = [torch.Generator().manual_seed(100 + row) for row in range(count)]
        out = together(model, texts, drafter, generators=generators, **options)
        states.append((out, [generator.get_state().tolist() for generator in generators]))
    assert states[0] == states[1]


def forest_by_hand(parents, prob, real, footprints, gamma, score):
    """Joint selection with Python sets: all roots, then the best node of any tree against one shared buffer."""
    B, N = parents.shape
    nodes = [(b, n) for b in range(B) for n in range(N) if real[b, n]]
    pairs = {node: {tuple(pair) for pair in footprints[node].nonzero().tolist()} for node in nodes}
    parent_of = {(b, n): (b, int(parents[b, n])) for b, n in nodes if n}

    def path(node):
        return [node] if node[1] == 0 else [*path(parent_of[node]), node]

    chosen = {(b, 0) for b in range(B)}
    while len(chosen) < min(gamma, N) * B:
        buffer = set().union(*(pairs[node] for node in chosen))
        on_path = {node: set().union(*(pairs[step] for step in path(node))) for node in nodes}
        candidates = [node for node in nodes if node not in chosen and parent_of[node] in chosen]
        if not candidates:
            break
        cost = {node: {"marginal": pairs[node] - buffer, "global": on_path[node]}.get(score) for node in candidates}

        def rank(node, cost=cost):
            weight = torch.tensor(1.0 if cost[node] is None else len(cost[node]) + 1e-6)
            return (prob[node] / weight, -len(path(node)), -node[0] * N - node[1])

        chosen.add(max(candidates, key=rank))
    return chosen


def random_forest(seed, B=3, N=7):
    generator = torch.Generator().manual_seed(seed)
    parents, prob = torch.full((B, N), -1), torch.ones(B, N)
    for b in range(B):
        for n in range(1, N):
            parents[b, n] = torch.randint(n, (), generator=generator)
            step = torch.tensor([1.0, 0.5, 0.9, 0.3])[torch.randint(4, (), generator=generator)]  # ties too
            prob[b, n] = prob[b, parents[b, n]] * step
    real = torch.arange(N) < torch.randint(1, N + 1, (B, 1), generator=generator)
    return parents, prob, real, torch.rand(B, N, 2, 5, generator=generator) < 0.4


@pytest.mark.parametrize("policy", ["confidence", "marginal", "global"])
@pytest.mark.parametrize("seed", range(12))
def test_joint_selection_takes_all_roots_then_the_best_node_of_any_text(seed, policy):
    parents, prob, real, footprints = random_forest(seed)
    for gamma in range(1, 9):
        chosen = chosen_of(parents, prob, real, footprints, policy, gamma, joint=True)
        expected = forest_by_hand(parents, prob, real, footprints, gamma, policy)
        assert {tuple(node) for node in chosen.nonzero().tolist()} == expected
        assert chosen[:, 0].all() and not (chosen & ~real).any()
        assert int(chosen.sum()) == min(min(gamma, 7) * 3, int(real.sum()))
        assert all(chosen[b, parents[b, n]] for b, n in chosen.nonzero().tolist() if n)


def test_a_shared_budget_goes_to_the_text_with_the_better_drafts_and_a_shared_expert_is_paid_once():
    parents, prob = torch.tensor([[-1, 0, 1, 2]] * 2), torch.tensor([[1.0, 0.9, 0.8, 0.7], [1.0, 0.1, 0.05, 0.02]])
    real, footprints = torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 4, 1, 6, dtype=torch.bool)
    assert chosen_of(parents, prob, real, footprints, "confidence", 2, joint=True).sum(1).tolist() == [3, 1]
    footprints[0, 1, 0, :3] = footprints[1, 0, 0, :3] = True  # text 1's root covers what text 0's draft needs
    assert chosen_of(parents, prob, real, footprints, "marginal", 2, joint=True)[0].tolist() == [
        True,
        True,
        True,
        False,
    ]
