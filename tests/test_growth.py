"""A drafter's cache changes nothing: trees over many rounds are those of reading everything afresh.

A wrong cache leaves decoded texts right and lets drafts be refused, so only such a comparison finds it.
"""

import pytest
import torch

from ecospec.errors import InputError
from ecospec.inference.drafters.base import EachRow
from ecospec.inference.drafters.draft_lm.head import LanguageModelHead
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.drafters.mtp.head import load_mtp_head
from ecospec.inference.selection.config import EPSILON
from ecospec.inference.selection.greedy import SCORES, forest_of, greedy
from ecospec.inference.tree import stack, tree_from_levels
from ecospec.predictor.kinds.predictor.source import PredictorFootprints
from tests import eagle3_heads as heads
from tests.eagle3_reference import loaded
from tests.growth_by_hand import hidden_by_hand, tree_by_hand
from tests.mtp_reference import YARN, random_layer, write_checkpoint
from tests.selecting import POLICIES, trees_of
from tests.stand_ins import EmptyDrafter, tiny_predictor
from tests.tiny import VOCABULARY, tiny_model

EAGLE = {
    "safeailab": heads.safeailab,
    "eagle31": heads.eagle31,
    "two layers": heads.two_layers,
    "last hidden state": heads.modelopt_short,
    "full vocabulary": heads.full_vocabulary,
}


MTP = {"mtp": 1, "two mtp layers": 2, "three mtp layers": 3}


def eagle(kind, seed, folder):
    return loaded(EAGLE[kind](seed), folder, seed), heads.V, heads.H


def mtp(kind, seed, folder):
    count = MTP[kind]
    model = tiny_model("deepseek_v3", seed, rope_parameters=YARN, num_mtp_layers=count)
    layers = [random_layer(seed + number) for number in range(count)]
    return load_mtp_head(write_checkpoint(folder, model, *layers), model), VOCABULARY, 32


def language_model(kind, seed, folder):
    return LanguageModelHead(tiny_model(kind, seed).requires_grad_(False), VOCABULARY), VOCABULARY, 32


HEADS = {
    **dict.fromkeys(EAGLE, eagle),
    **dict.fromkeys(MTP, mtp),
    "qwen3_moe": language_model,
    "deepseek_v3": language_model,
}


class Texts:
    """Several texts that gain 1 to 4 tokens a round, and the features of every token before the last."""

    def __init__(self, lengths, vocabulary, width, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocabulary, self.width = vocabulary, width
        self.ids = [self.random_ids(length) for length in lengths]
        self.features = [self.random_features(length - 1) for length in lengths]

    def random_ids(self, count):
        return torch.randint(self.vocabulary, (count,), generator=self.generator)

    def random_features(self, count):
        return torch.randn(count, self.width, generator=self.generator)

    def grow(self):
        """The features that are new."""
        counts = [int(torch.randint(1, 5, (), generator=self.generator)) for _ in self.ids]
        new = [self.random_features(count) for count in counts]
        self.ids = [torch.cat([ids, self.random_ids(count)]) for ids, count in zip(self.ids, counts, strict=True)]
        self.features = [torch.cat(pair) for pair in zip(self.features, new, strict=True)]
        return new

    def keep(self, rows):
        self.ids, self.features = [self.ids[row] for row in rows], [self.features[row] for row in rows]


def assert_same_trees(trees, head, texts, steps, topk):
    given = texts.features if head.feature_layers else [None] * len(texts.ids)
    for row, (ids_T, features_nF) in enumerate(zip(texts.ids, given, strict=True)):
        nodes, tree = tree_by_hand(head, ids_T, features_nF, steps, topk), trees.row(row)
        assert tree.tokens_N.tolist() == [node.token for node in nodes]
        assert tree.parents_N.tolist() == [node.parent for node in nodes]
        assert tree.depth_N.tolist() == [node.depth for node in nodes]
        torch.testing.assert_close(tree.prob_N, torch.tensor([node.prob for node in nodes]), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(("seed", "steps", "topk"), [(0, 3, 2), (1, 4, 3), (2, 1, 2)])
def test_trees_of_many_rounds_are_those_of_reading_everything_afresh(kind, seed, steps, topk, tmp_path):
    head, vocabulary, hidden = HEADS[kind](kind, seed, tmp_path)
    drafter = TreeDrafter(head, steps, topk)
    drafter.reset(3)
    texts = Texts((2, 9, 5), vocabulary, hidden * max(len(head.feature_layers), 1), seed)
    new = texts.features
    for ending in (None, None, [2, 0], None, [1], None):
        trees = drafter.draft(texts.ids, new if head.feature_layers else None)
        assert_same_trees(trees, head, texts, steps, topk)
        assert drafter.cache.lengths == [len(ids) - head.first_token for ids in texts.ids], "no draft stays"
        if ending is not None:
            drafter.keep_rows(ending)
            texts.keep(ending)
        new = texts.grow()
    drafter.reset(1)  # a new text does not see the old ones
    texts = Texts((4,), vocabulary, texts.width, seed + 1)
    trees = drafter.draft(texts.ids, texts.features if head.feature_layers else None)
    assert_same_trees(trees, head, texts, steps, topk)


@pytest.mark.parametrize("kind", [*EAGLE, *MTP])
@pytest.mark.parametrize(("seed", "steps", "topk"), [(0, 3, 2), (1, 1, 3)])
def test_hidden_input_of_roots_and_leaves_is_that_of_reading_everything_afresh(kind, seed, steps, topk, tmp_path):
    head, vocabulary, hidden = HEADS[kind](kind, seed, tmp_path)
    drafter = TreeDrafter(head, steps, topk)
    texts = Texts((2, 9, 5), vocabulary, hidden * len(head.feature_layers), seed)
    assert TreeDrafter(head, steps, topk).draft(texts.ids[:1], texts.features[:1]).hidden_BNH is None, "not asked for"
    drafter.give_hidden()
    drafter.reset(3)
    new = texts.features
    for ending in (None, [2, 0], None):
        trees = drafter.draft(texts.ids, new)
        assert trees.hidden_BNH.shape[:2] == trees.tokens_BN.shape
        for row, given in enumerate(zip(texts.ids, texts.features, strict=True)):
            for node, hidden_H in enumerate(trees.hidden_BNH[row]):
                expected_H = hidden_by_hand(head, *given, tuple(path_to(trees.row(row), node)))
                torch.testing.assert_close(hidden_H, expected_H[: len(hidden_H)], rtol=1e-3, atol=1e-4)
        if ending is not None:
            drafter.keep_rows(ending)
            texts.keep(ending)
        new = texts.grow()


def test_drafters_that_are_fed_nothing_have_no_hidden_input_to_give():
    head = LanguageModelHead(tiny_model("qwen3_moe").requires_grad_(False), VOCABULARY)
    for drafter in (TreeDrafter(head), EachRow(EmptyDrafter())):
        with pytest.raises(InputError, match="is fed nothing"):
            drafter.give_hidden()


@pytest.mark.parametrize("kind", ["safeailab", "eagle31", *MTP])
def test_old_features_and_old_tokens_matter_to_a_tree(kind, tmp_path):
    """Otherwise the comparison above could not notice a cache that forgets or mixes them."""
    head, vocabulary, hidden = HEADS[kind](kind, 0, tmp_path)
    texts = Texts((9,), vocabulary, hidden * len(head.feature_layers), 0)

    def probabilities(ids_T, features_nF):
        drafter = TreeDrafter(head, 3, 2)
        return drafter.draft([ids_T], [features_nF]).prob_BN

    ids_T, features_nF = texts.ids[0], texts.features[0]
    plain = probabilities(ids_T, features_nF)
    for place in (0, 3, 7):
        other = features_nF.clone()
        other[place] = other[place].flip(0)
        assert not torch.allclose(probabilities(ids_T, other), plain, rtol=2e-4)
    changed = ids_T.clone()
    changed[1] = (changed[1] + 1) % vocabulary
    assert not torch.allclose(probabilities(changed, features_nF), plain, rtol=2e-4)


def random_tree(root, generator):
    """Three levels of two nodes below a node of the level above."""
    levels, above = [], [0]
    for depth in range(3):
        pick = torch.randint(len(above), (2,), generator=generator).tolist()
        tokens = torch.randint(VOCABULARY, (2,), generator=generator)
        levels.append((tokens, torch.tensor([above[place] for place in pick]), torch.tensor([0.5, 0.4])))
        above = [1 + 2 * depth, 2 + 2 * depth]
    return tree_from_levels(root, levels)


def path_to(tree, node):
    return [] if node == 0 else [*path_to(tree, int(tree.parents_N[node])), int(tree.tokens_N[node])]


@pytest.mark.parametrize("seed", range(3))
def test_predicted_experts_of_many_rounds_are_those_of_reading_everything_afresh(seed):
    torch.manual_seed(seed)
    predictor, texts = tiny_predictor(torch.nn.Embedding(VOCABULARY, 32), seed), Texts((2, 9, 5), VOCABULARY, 1, seed)
    source = PredictorFootprints(predictor)
    source.reset(3)
    for ending in (None, None, [2, 0], None, [1], None):
        trees = [random_tree(ids_T[-1], texts.generator) for ids_T in texts.ids]
        logits_BNLE = source.logits(texts.ids, stack(trees))
        for ids_T, tree, logits_NLE in zip(texts.ids, trees, logits_BNLE, strict=True):
            for node in range(len(tree)):
                alone = predictor(torch.tensor([ids_T.tolist() + path_to(tree, node)]))[0, -1]
                torch.testing.assert_close(logits_NLE[node], alone, rtol=1e-3, atol=1e-4)
        if ending is not None:
            source.keep_rows(ending)
            texts.keep(ending)
        texts.grow()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("joint", [False, True])
def test_selection_compiles_whole_and_chooses_the_same(policy, joint):
    torch.compiler.reset()
    compiled = [torch.compile(part, fullgraph=True, backend="eager") for part in (forest_of, greedy)]
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(torch.tensor(5), generator)
        parents = stack([tree, random_tree(torch.tensor(6), generator)]).parents_BN
        prob = torch.rand(2, 7, generator=generator).cummin(1).values
        real = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
        footprints = torch.rand(2, 7, 2, 5, generator=generator) < 0.4
        found = []
        for forests, loop in (compiled, (forest_of, greedy)):
            forest = forests(trees_of(parents, prob, real), footprints, 4, joint)
            scorer = SCORES[policy].begin(forest, EPSILON, torch.Generator().manual_seed(seed))
            found.append(loop(forest, scorer))
        assert torch.equal(*found)
        assert int(found[0].sum()) == 8
