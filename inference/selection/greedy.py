"""The greedy selectors: the root first, then the best-scoring node whose parent is chosen (paper, Algorithm 1).

A policy is a `Score`: a number for every node, given what is covered so far. Restricting the choice to nodes whose
parent is chosen changes nothing for scores that never rise along a path, and keeps the set prefix-closed always. A node
of score -inf is never chosen, so a score can also stop the loop before γ nodes are chosen.

The loop runs over groups of nodes that share a budget and the experts covered: each text's tree alone, or (`joint`) the
trees of all texts as one forest whose roots come first. Shapes depend on nothing that is computed, so the loop stays on
the device and compiles whole.

Letters: B texts, N tree nodes (root included), L MoE layers, E experts; P = L·E (layer, expert) pairs; G groups of
M nodes; R picks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.selection.base import Selector, any_of, either, footprints_missing, new_pairs
from ecospec.inference.selection.config import EPSILON
from ecospec.inference.tree import DraftTrees

Scorer = Callable[[Tensor, int], Tensor]  # (covered_GP, number of the pick) → score_GM


@dataclass(frozen=True)
class Forest:
    """G groups of M nodes: what a score may look at. `own_GMP` is each node's own footprint, empty where none is known.

    `ancestors_GMM`: entry (i, j) says that j is i or an ancestor of i; `picks`: how often the loop chooses.
    """

    parents_GM: Tensor
    prob_GM: Tensor
    real_GM: Tensor
    own_GMP: Tensor
    ancestors_GMM: Tensor
    picks: int


@dataclass(frozen=True)
class Score:
    """A greedy policy. `begin(forest, epsilon, generator)` gives the scorer of one choice, whose draws, if any, come
    from the CPU generator."""

    begin: Callable[[Forest, float, torch.Generator], Scorer]
    needs_footprints: bool = False


def confidence(forest: Forest, epsilon: float, generator: torch.Generator) -> Scorer:
    """EAGLE's rule: cumulative draft probability."""
    return lambda covered_GP, pick: forest.prob_GM


def marginal(forest: Forest, epsilon: float, generator: torch.Generator) -> Scorer:
    """Paper equation 9: P / (new pairs + ε). The path above a candidate is covered, so its own pairs suffice."""
    return lambda covered_GP, pick: forest.prob_GM / (new_pairs(forest.own_GMP, covered_GP[:, None]) + epsilon)


def path_cost(forest: Forest, epsilon: float, generator: torch.Generator) -> Scorer:
    """Paper equations 7 and 10, the static ablation: P / (pairs of the whole path from the root + ε)."""
    paths_GMP, rows_G = forest.own_GMP.clone(), torch.arange(len(forest.own_GMP), device=forest.own_GMP.device)
    for node in range(1, paths_GMP.shape[1]):  # parents come first
        parent_G, own_GP = forest.parents_GM[:, node], forest.own_GMP[:, node]
        with_path_GP = either(paths_GMP[rows_G, parent_G.clamp(min=0)], own_GP)
        paths_GMP[:, node] = torch.where((parent_G >= 0)[:, None], with_path_GP, own_GP)
    score_GM = forest.prob_GM / (paths_GMP.sum(-1) + epsilon)
    return lambda covered_GP, pick: score_GM


def random(forest: Forest, epsilon: float, generator: torch.Generator) -> Scorer:
    """A uniformly random candidate: fresh noise for each pick."""
    noise_RGM = torch.rand(forest.picks, *forest.prob_GM.shape, generator=generator).to(forest.prob_GM.device)
    return lambda covered_GP, pick: noise_RGM[pick]


SCORES = {
    "confidence": Score(confidence),
    "marginal": Score(marginal, needs_footprints=True),
    "global": Score(path_cost, needs_footprints=True),
    "random": Score(random),
}


class GreedySelector(Selector):
    """Up to `gamma` nodes of each tree by `score`, or with `joint` up to γ·B of all trees together.

    `joint`: a batch shares its budget and its experts. γ = 1 verifies the roots alone, so nothing is drafted.
    """

    def __init__(self, policy: str, score: Score, gamma: int, epsilon: float = EPSILON, joint: bool = False) -> None:
        self.policy = policy
        self.score = score
        self.gamma = gamma
        self.epsilon = epsilon
        self.joint = joint
        self.needs_footprints = score.needs_footprints
        self.drafts = gamma > 1
        self._generator = torch.Generator()

    def reset(self, rows: int, seed: int = 0) -> None:
        """See `Selector`."""
        self._generator.manual_seed(seed)

    def wants_drafts(self) -> bool:
        """See `Selector`."""
        return self.drafts

    def choose(
        self, trees: DraftTrees, footprints_BNLE: Tensor | None = None, covered_BLE: Tensor | None = None
    ) -> Tensor:
        """See `Selector`; ties go to the shallower node, then to the lower index."""
        if self.needs_footprints and footprints_BNLE is None:
            raise footprints_missing(self.policy)
        forest = forest_of(trees, footprints_BNLE, self.gamma, self.joint)
        covered_GP = None if covered_BLE is None else _by_group(covered_BLE.flatten(1), self.joint)
        scorer = self.score.begin(forest, self.epsilon, self._generator)
        return greedy(forest, scorer, covered_GP).reshape(trees.parents_BN.shape)

    def most(self, trees: DraftTrees) -> int | None:
        """See `Selector`."""
        return None if self.joint else min(self.gamma, trees.width)

    def describe(self) -> dict:
        """See `Selector`."""
        described = {"selection": self.policy, "gamma": self.gamma}
        described["epsilon"] = self.epsilon if self.needs_footprints else None
        return described | ({"options": {"joint": True}} if self.joint else {})


def forest_of(trees: DraftTrees, footprints_BNLE: Tensor | None, gamma: int, joint: bool) -> Forest:
    """The trees as groups that share a budget of γ nodes a tree."""
    B, N = trees.parents_BN.shape
    groups = 1 if joint else B
    own_BNP = trees.real_BN[..., None][..., :0] if footprints_BNLE is None else footprints_BNLE.flatten(2)
    parents_BN, ancestors_GMM = trees.parents_BN, trees.ancestors_BNN
    if joint:
        first_B1 = torch.arange(B, device=parents_BN.device)[:, None] * N
        parents_BN = torch.where(parents_BN >= 0, parents_BN + first_B1, -1)
        ancestors_GMM = torch.block_diag(*ancestors_GMM)[None].bool()
    return Forest(
        parents_BN.reshape(groups, -1),
        trees.prob_BN.float().reshape(groups, -1),
        trees.real_BN.reshape(groups, -1),
        own_BNP.reshape(groups, B * N // groups, own_BNP.shape[-1]),
        ancestors_GMM,
        (min(gamma, N) - 1) * (B // groups),
    )


def greedy(forest: Forest, scorer: Scorer, covered_GP: Tensor | None = None) -> Tensor:
    """bool [G, M]: all roots, then the best candidate `picks` times, while there is one above -inf."""
    parents_GM, real_GM = forest.parents_GM, forest.real_GM
    M = parents_GM.shape[1]
    index_M = torch.arange(M, device=parents_GM.device)
    rank_GM = (forest.ancestors_GMM.sum(-1) - 1) * M + index_M  # smaller wins a tie
    chosen_GM = (parents_GM < 0) & real_GM
    roots_GP = any_of(forest.own_GMP, chosen_GM)
    covered_GP = roots_GP if covered_GP is None else either(covered_GP, roots_GP)
    for pick in range(forest.picks):
        candidate_GM = chosen_GM.gather(1, parents_GM.clamp(min=0)) & ~chosen_GM & real_GM & (parents_GM >= 0)
        score_GM = scorer(covered_GP, pick).masked_fill(~candidate_GM, -torch.inf)
        best_GM = (score_GM == score_GM.amax(1, keepdim=True)) & (score_GM > -torch.inf)
        first_G1 = rank_GM.masked_fill(~best_GM, M * M).argmin(1, keepdim=True)
        picked_GM = (index_M == first_G1) & best_GM
        chosen_GM = chosen_GM | picked_GM
        covered_GP = either(covered_GP, any_of(forest.own_GMP, picked_GM))
    return chosen_GM


def _by_group(covered_BP: Tensor, joint: bool) -> Tensor:
    """What is covered for a group: with `joint` by any text."""
    if not joint:
        return covered_BP
    return any_of(covered_BP, torch.ones_like(covered_BP[:, 0], dtype=torch.bool))[None]
