"""Laws of draft selection, held against a brute-force reading of the paper's Algorithm 1."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec.errors import InputError
from ecospec.inference.selection.greedy import SCORES, GreedySelector, Score
from ecospec.inference.selection.rule import select
from tests.selecting import POLICIES, trees_of

L, E = 2, 6


def algorithm_1(parents, prob, footprints, gamma, epsilon, static=False):
    """Algorithm 1 word for word with Python sets: all unselected nodes, path footprints, ties to shallow then low."""

    def path(node):
        return [] if node < 0 else [*path(parents[node]), node]

    def pairs(node):
        return {(layer, e) for t in path(node) for layer in range(L) for e in range(E) if footprints[t, layer, e]}

    chosen, buffer = set(), set()
    while len(chosen) < min(gamma, len(parents)):
        scores = {}
        for node in set(range(len(parents))) - chosen:
            cost = len(pairs(node)) if static and chosen else len(pairs(node) - buffer)
            scores[node] = torch.tensor(prob[node]) / (torch.tensor(float(cost)) + epsilon)
        first = {0: scores[0]} if 0 in scores else scores  # the root is selected first
        best = max(first, key=lambda node: (first[node], -len(path(node)), -node))
        chosen.add(best)
        buffer |= pairs(best)
    return sorted(chosen)


@st.composite
def trees(draw):
    """Trees of 1 to 11 nodes; conditional probabilities include 1.0 and exact ties, footprints include equal ones."""
    N = draw(st.integers(1, 11))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, N)]
    conditional = [1.0] + [draw(st.sampled_from([1.0, 0.5, 0.5, 0.25, 0.9, 1e-4, 0.0])) for _ in range(N - 1)]
    prob = [1.0]
    for node in range(1, N):
        prob.append(float(torch.tensor(prob[parents[node]]) * torch.tensor(conditional[node])))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    footprints = torch.rand(N, L, E, generator=generator) < draw(st.sampled_from([0.2, 0.5]))
    if N > 2 and draw(st.booleans()):
        footprints[-1] = footprints[1]
    return parents, prob, footprints


def as_tree(parents, prob):
    return SimpleNamespace(parents=torch.tensor(parents), prob=torch.tensor(prob))


def check_against_algorithm_1(tree, gamma, epsilon):
    parents, prob, footprints = tree
    for policy, static in (("marginal", False), ("global", True)):
        chosen = select(as_tree(parents, prob), footprints, policy, gamma, epsilon).tolist()
        assert chosen == algorithm_1(parents, prob, footprints, gamma, epsilon, static)


ANY_CASE = given(trees(), st.integers(1, 12), st.sampled_from([1e-6, 1.0, 1e6]))


@settings(max_examples=150, deadline=None)
@ANY_CASE
def test_marginal_and_global_choose_what_algorithm_1_chooses(tree, gamma, epsilon):
    check_against_algorithm_1(tree, gamma, epsilon)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@ANY_CASE
def test_marginal_and_global_choose_what_algorithm_1_chooses_at_full_size(tree, gamma, epsilon):
    check_against_algorithm_1(tree, gamma, epsilon)


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(1, 12))
def test_every_chosen_nodes_parent_is_chosen_under_every_policy(tree, gamma):
    parents, prob, footprints = tree
    for policy in POLICIES:
        chosen = select(as_tree(parents, prob), footprints, policy, gamma).tolist()
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(gamma, len(parents))
        assert 0 in chosen
        assert all(parents[node] in chosen for node in chosen if node)


def test_the_papers_figure_3_selects_the_cheaper_draft():
    footprints = torch.zeros(3, 1, 10, dtype=torch.bool)
    footprints[0, 0, [1, 2, 3, 4]] = True
    footprints[1, 0, [1, 5, 6, 7]] = True  # three new experts
    footprints[2, 0, [1, 2, 8, 9]] = True  # two new experts
    tree = as_tree([-1, 0, 0], [1.0, 0.53, 0.40])
    assert select(tree, footprints, "marginal", 2, 1e-6).tolist() == [0, 2]
    assert select(tree, footprints, "confidence", 2).tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_a_large_epsilon_turns_marginal_into_confidence(seed):
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 5, 5]
    prob = [1.0]
    for node in range(1, 11):
        prob.append(prob[parents[node]] * float(torch.rand((), generator=generator)))
    footprints = torch.rand(11, L, E, generator=generator) < 0.4
    tree = as_tree(parents, prob)
    for gamma in range(1, 12):
        assert torch.equal(
            select(tree, footprints, "marginal", gamma, 1e9), select(tree, footprints, "confidence", gamma)
        )


def test_experts_in_the_initial_buffer_are_free():
    footprints = torch.zeros(3, 1, 4, dtype=torch.bool)
    footprints[1, 0, 1] = True
    footprints[2, 0, 2] = True
    tree = as_tree([-1, 0, 0], [1.0, 0.6, 0.3])
    buffer = torch.tensor([[False, False, True, False]])
    assert select(tree, footprints, "marginal", 2).tolist() == [0, 1]
    assert select(tree, footprints, "marginal", 2, buffer=buffer).tolist() == [0, 2]


def test_random_choices_repeat_with_their_generator():
    tree = as_tree([-1, 0, 0, 0, 1, 2], [1.0, 0.5, 0.3, 0.1, 0.2, 0.1])
    draws = [select(tree, None, "random", 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(draw.tolist()) for draw in draws}) > 1


@pytest.mark.parametrize("policy", ["marginal", "global"])
def test_cost_aware_policies_refuse_to_guess_footprints(policy):
    with pytest.raises(InputError, match="needs footprints"):
        select(as_tree([-1, 0], [1.0, 0.5]), None, policy, 2)


def test_gamma_zero_and_unknown_policies_are_refused_by_name():
    tree = as_tree([-1, 0], [1.0, 0.5])
    with pytest.raises(InputError, match="gamma 0"):
        select(tree, None, "confidence", 0)
    with pytest.raises(InputError, match="policy 'greedy': unknown; choose one of"):
        select(tree, None, "greedy", 2)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 12), st.sampled_from(["marginal", "global"]))
def test_certain_probabilities_are_footprints(tree, gamma, policy):
    """Footprints may be probabilities that an expert is used: of 0 and 1 they choose what bool ones choose."""
    parents, prob, footprints = tree
    certain = select(as_tree(parents, prob), footprints.float(), policy, gamma)
    assert torch.equal(certain, select(as_tree(parents, prob), footprints, policy, gamma))


def test_uncertain_experts_cost_their_probability():
    footprints = torch.zeros(3, 1, 4)
    footprints[1, 0, :2] = 0.5  # one new expert is expected
    footprints[2, 0, 2:] = 1.0  # two
    tree = as_tree([-1, 0, 0], [1.0, 0.4, 0.6])
    assert select(tree, footprints, "marginal", 2).tolist() == [0, 1]
    assert select(tree, footprints > 0, "marginal", 2).tolist() == [0, 2]


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 12), st.sampled_from([0.3, 0.6, 2.0]))
def test_a_node_scored_minus_infinity_is_never_chosen_and_ends_the_choice(tree, gamma, least):
    """A score is a stop rule too: what is below `least` is not worth verifying, however many nodes γ allows."""
    parents, prob, _ = tree

    def worth(forest, epsilon, generator):
        return lambda covered_GP, pick: forest.prob_GM.where(forest.prob_GM >= least, -torch.inf)

    stopping = GreedySelector("worth", Score(worth), gamma)
    pool = trees_of(torch.tensor([parents]), torch.tensor([prob]))
    chosen = stopping.choose(pool)[0].nonzero()[:, 0].tolist()
    allowed = [node for node in range(len(parents)) if node == 0 or prob[node] >= least]
    confident = GreedySelector("all", SCORES["confidence"], len(parents)).choose(pool)[0]
    assert 0 in chosen
    assert all(parents[node] in chosen for node in chosen if node)
    assert set(chosen) <= set(allowed)
    assert len(chosen) == min(gamma, len(allowed)), "the allowed nodes are closed"
    assert confident.all()
