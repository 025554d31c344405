"""Choose which draft nodes to verify: pure functions over small arrays, no model in sight.

One greedy loop serves every policy (paper, Algorithm 1): the root first, then the best-scoring node whose parent is
chosen, until γ nodes are chosen. A policy is one row of `POLICIES`: a score per node. Restricting the choice to nodes
whose parent is chosen changes nothing for scores that never rise along a path, and keeps the set prefix-closed always.

Letters: N tree nodes (root included), L MoE layers, E experts; P = L·E (layer, expert) pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ecospec.configs.errors import InputError
from ecospec.inference.tree import depths_of

EPSILON = 1e-6


class Tree(Protocol):
    """What selection reads of a tree: `parents` [N] (root -1, parents first) and `prob` [N] (cumulative, root 1)."""

    @property
    def parents(self) -> Tensor: ...

    @property
    def prob(self) -> Tensor: ...


@dataclass(frozen=True)
class Scores:
    """The inputs of a policy: `prob_N` float32, footprints in pairs (bool [N, P]) and the experts already covered."""

    prob_N: Tensor
    own_NP: Tensor
    path_NP: Tensor
    epsilon: float
    generator: torch.Generator | None = None

    def confidence(self, covered_P: Tensor) -> Tensor:
        """EAGLE's rule: cumulative draft probability."""
        return self.prob_N

    def marginal(self, covered_P: Tensor) -> Tensor:
        """Paper equation 9: P / (new pairs + ε). The path above a candidate is covered, so its own pairs suffice."""
        return self.prob_N / ((self.own_NP & ~covered_P).sum(1) + self.epsilon)

    def path_cost(self, covered_P: Tensor) -> Tensor:
        """Paper equation 10, the static ablation: P / (pairs of the whole path + ε)."""
        return self.prob_N / (self.path_NP.sum(1) + self.epsilon)

    def random(self, covered_P: Tensor) -> Tensor:
        """A uniformly random candidate: fresh noise for each pick."""
        return torch.rand(len(self.prob_N), generator=self.generator).to(self.prob_N.device)


POLICIES: dict[str, Callable[[Scores, Tensor], Tensor]] = {
    "confidence": Scores.confidence,
    "marginal": Scores.marginal,
    "global": Scores.path_cost,
    "random": Scores.random,
}
NEEDS_FOOTPRINTS = frozenset({"marginal", "global"})


def select(
    tree: Tree,
    footprints: Tensor | None,
    policy: str,
    gamma: int,
    epsilon: float = EPSILON,
    buffer: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Indices of the chosen nodes, int64 [min(γ, N)], ascending, root included.

    `footprints` bool [N, L, E] (None where the policy needs none); `buffer` bool [L, E], experts covered beforehand.
    Ties go to the shallower node, then to the lower index. Raises InputError for γ < 1 or an unknown policy.
    """
    check_selection(policy, gamma)
    parents_N = torch.as_tensor(tree.parents).long()
    prob_N = torch.as_tensor(tree.prob).float()
    own_NP = _pairs(footprints, policy, prob_N)
    scores = Scores(prob_N, own_NP, _path_pairs(own_NP, parents_N, policy), epsilon, generator)
    covered_P = own_NP[0] if buffer is None else own_NP[0] | torch.as_tensor(buffer).reshape(-1)
    return _greedy(POLICIES[policy], scores, parents_N, covered_P, min(gamma, len(prob_N)))


def check_selection(policy: str, gamma: int) -> None:
    """Raises InputError naming the key and the remedy."""
    if policy not in POLICIES:
        raise InputError(f"--selection.policy {policy}: unknown; choose one of {', '.join(POLICIES)}")
    if gamma < 1:
        raise InputError(f"--selection.gamma {gamma}: must be 1 or more (1 verifies the root alone)")


def _greedy(policy: Callable, scores: Scores, parents_N: Tensor, covered_P: Tensor, count: int) -> Tensor:
    N = len(parents_N)
    index_N = torch.arange(N, device=parents_N.device)
    rank_N = depths_of(parents_N) * N + index_N  # smaller wins a tie
    chosen_N = index_N == 0
    for _ in range(count - 1):
        candidate_N = chosen_N[parents_N.clamp(min=0)] & ~chosen_N
        score_N = policy(scores, covered_P).masked_fill(~candidate_N, -torch.inf)
        best_N = (score_N == score_N.max()) & candidate_N
        pick_N = index_N == rank_N.masked_fill(~best_N, N * N).argmin()
        chosen_N = chosen_N | pick_N
        covered_P = covered_P | (scores.own_NP & pick_N[:, None]).any(0)
    return chosen_N.nonzero().squeeze(1)


def _pairs(footprints: Tensor | None, policy: str, prob_N: Tensor) -> Tensor:
    if footprints is None:
        if policy in NEEDS_FOOTPRINTS:
            raise InputError(f"--selection.policy {policy}: needs footprints; give a predictor or --footprints")
        return torch.zeros(len(prob_N), 1, dtype=torch.bool, device=prob_N.device)
    return torch.as_tensor(footprints).flatten(1)


def _path_pairs(own_NP: Tensor, parents_N: Tensor, policy: str) -> Tensor:
    """Footprint of every node's whole path from the root (paper equation 7); only `global` reads it."""
    if policy != "global":
        return own_NP
    path_NP = own_NP
    for _ in range(len(parents_N) - 1):
        path_NP = own_NP | torch.where((parents_N >= 0)[:, None], path_NP[parents_N.clamp(min=0)], own_NP)
    return path_NP
