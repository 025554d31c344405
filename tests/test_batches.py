"""Texts decoded together are the texts decoded alone, whatever their lengths and whenever they end."""

import itertools

import pytest
import torch

from ecospec.inference import Method, generate
from ecospec.inference.evaluate import left_padded
from ecospec.inference.generation import CustomGenerate
from ecospec.inference.selection import choose
from ecospec.inference.tree import DraftTree, tree_from_levels
from tests.test_decoder import GREEDY, SAMPLED, HashedFootprints
from tests.tiny import VOCABULARY, tiny_model

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
    method = {"drafter": drafter, "predictor": HashedFootprints(), "joint": joint}
    settings = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **options}
    out = generate(model, ids_BT, attention_mask=mask_BT, generators=generators, **method, **settings)
    assert torch.equal(out[:, : ids_BT.shape[1]], ids_BT)
    return out[:, ids_BT.shape[1] :].tolist()


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
    hook = CustomGenerate(Method(HashedDrafter({}), "marginal", footprints=HashedFootprints()))
    assert torch.equal(model.generate(ids_BT, custom_generate=hook, **options), expected)
    assert len(hook.last_run.new_by_row) == 4


def forest_by_hand(parents, prob, footprints, gamma):
    """Joint selection with Python sets: all roots, then the best node of any tree against one shared buffer."""
    B, N = parents.shape
    pairs = {(b, n): {tuple(p) for p in footprints[b, n].nonzero().tolist()} for b in range(B) for n in range(N)}
    depth = {(b, 0): 0 for b in range(B)}
    for b in range(B):
        for n in range(1, N):
            depth[b, n] = depth[b, int(parents[b, n])] + 1
    chosen = {(b, 0) for b in range(B)}
    buffer = set().union(*(pairs[node] for node in chosen))
    while len(chosen) < min(gamma, N) * B:
        candidates = [(b, n) for b, n in pairs if (b, n) not in chosen and (b, int(parents[b, n])) in chosen]
        if not candidates:
            break

        def key(node, covered=buffer):
            score = prob[node] / (torch.tensor(float(len(pairs[node] - covered))) + 1e-6)
            return (score, -depth[node], -node[0] * N - node[1])

        best = max(candidates, key=key)
        chosen.add(best)
        buffer = buffer | pairs[best]
    return chosen


@pytest.mark.parametrize("seed", range(20))
def test_joint_selection_takes_all_roots_then_the_best_node_of_any_text(seed):
    generator = torch.Generator().manual_seed(seed)
    B, N, gamma = 3, 7, 3
    parents = torch.tensor([[-1] + [int(torch.randint(n, (), generator=generator)) for n in range(1, N)]] * B)
    prob = torch.ones(B, N)
    for n in range(1, N):
        prob[:, n] = prob[torch.arange(B), parents[:, n]] * torch.rand(B, generator=generator)
    footprints = torch.rand(B, N, 2, 5, generator=generator) < 0.4
    real = torch.ones(B, N, dtype=torch.bool)
    chosen = choose(parents, prob, real, footprints, "marginal", gamma, joint=True)
    assert {tuple(node) for node in chosen.nonzero().tolist()} == forest_by_hand(parents, prob, footprints, gamma)


@pytest.mark.parametrize("policy", ["confidence", "marginal", "global"])
@pytest.mark.parametrize("joint", [False, True])
def test_selection_compiles_whole_and_chooses_the_same(policy, joint):
    generator = torch.Generator().manual_seed(0)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]] * 2)
    prob = torch.rand(2, 7, generator=generator).cummin(1).values
    footprints = torch.rand(2, 7, 2, 5, generator=generator) < 0.4
    real = torch.ones(2, 7, dtype=torch.bool)
    arguments = (parents, prob, real, footprints, policy, 4)
    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments, joint=joint), choose(*arguments, joint=joint))
