"""Prompt lookup drafts what followed the text's ending before, by hand and against a slow reading of the rule."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec.inference.drafters.prompt_lookup.lookup import PromptLookupDrafter

TEXTS = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters), min_size=1, max_size=24))


def draft(text, steps=3, topk=2, max_ngram=3):
    return PromptLookupDrafter(steps, topk, max_ngram).draft(torch.tensor(text), None)


def paths(tree):
    """Each node's tokens below the root and its conditional probability."""
    named, result = {0: ()}, {}
    for node in range(1, len(tree)):
        parent = int(tree.parents_N[node])
        named[node] = (*named[parent], int(tree.tokens_N[node]))
        assert tree.depth_N[node] == len(named[node]) == tree.depth_N[parent] + 1
        assert named[node] not in result, "a path stands in the tree once"
        result[named[node]] = float(tree.prob_N[node] / tree.prob_N[parent])
    return result


def slowly(text, steps, topk, max_ngram):
    """The rule read literally: the paths of the tree and their conditional probabilities."""
    T = len(text)
    for n in range(max_ngram, 0, -1):
        ends = [end for end in range(T - 1, n - 1, -1) if text[end - n : end] == text[T - n :]]
        if ends:
            break
    found = [tuple(text[end : end + steps]) for end in ends]  # the latest first
    chosen = []
    for continuation in found:
        longer = [other for other in found if other[: len(continuation)] == continuation]
        longest = max(longer, key=len)  # of equals the first, which is the latest
        if len(chosen) < topk and not any(other[: len(continuation)] == continuation for other in chosen):
            chosen.append(longest)
    nodes = {path[:length] for path in chosen for length in range(1, len(path) + 1)}
    going_on = Counter(path[:length] for path in found for length in range(1, len(path) + 1))
    after = Counter(path[: length - 1] for path in found for length in range(1, len(path) + 1))
    return {node: going_on[node] / after[node[:-1]] for node in nodes}


def test_the_longest_ending_decides_and_the_latest_occurrence_comes_first():
    text = [1, 2, 3, 7, 8, 9, 5, 3, 6, 6, 6, 1, 2, 3]  # [1, 2, 3] went on with 7; the lone 3 also with 6
    assert paths(draft(text)) == {(7,): 1.0, (7, 8): 1.0, (7, 8, 9): 1.0}
    assert list(paths(draft(text, max_ngram=1))) == [(6,), (7,), (6, 6), (7, 8), (6, 6, 6), (7, 8, 9)]


def test_branches_share_their_beginning_and_probabilities_are_shares_of_occurrences():
    text = [1, 5, 6, 1, 5, 7, 1, 5, 7, 1, 8, 9, 1]
    assert paths(draft(text, steps=2, topk=3)) == pytest.approx(
        {(8,): 1 / 4, (5,): 3 / 4, (8, 9): 1.0, (5, 7): 2 / 3, (5, 6): 1 / 3}
    )
    assert set(paths(draft(text, steps=2, topk=1))) == {(8,), (8, 9)}
    tree = draft(text, steps=2, topk=3)
    assert tree.prob_N[tree.depth_N == 2].sum() == pytest.approx(1.0)


def test_a_text_that_repeats_itself_is_drafted_to_full_depth():
    assert paths(draft([4] * 9, steps=3, topk=2)) == {(4,): 1.0, (4, 4): 1.0, (4, 4, 4): 1.0}


@pytest.mark.parametrize("text", [[1], [1, 2, 3], [5, 5, 5, 1]])
def test_an_ending_that_never_occurred_leaves_the_root_alone(text):
    tree = draft(text)
    assert tree.tokens_N.tolist() == [text[-1]]
    assert (tree.parents_N.tolist(), tree.prob_N.tolist(), tree.depth_N.tolist()) == ([-1], [1.0], [0])


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_the_tree_is_what_the_rule_says(text, steps, topk, max_ngram):
    expected = slowly(text, steps, topk, max_ngram)
    tree = draft(text, steps, topk, max_ngram)
    assert tree.tokens_N[0] == text[-1]
    assert paths(tree) == pytest.approx(expected)
    for path, share in paths(tree).items():
        assert 0 < share <= 1
        assert any(tuple(text[at : at + len(path) + 1]) == (text[-1], *path) for at in range(len(text)))
    leaves = len(tree) - len(set(tree.parents_N.tolist()) - {-1})
    assert leaves <= topk


def test_the_slow_reading_meets_every_case():
    """The property above is not vacuous: among such texts there are trees of every kind."""
    sizes = Counter()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        text = torch.randint(0, 3, (20,), generator=generator).tolist()
        sizes[len(slowly(text, 3, 2, 2))] += 1
    assert {3, 4, 5, 6} <= sizes.keys()
