"""Choose which draft nodes to verify: pure functions over small fixed-shape tensors, no model in sight.

One greedy loop serves every policy (paper, Algorithm 1): the root first, then the best-scoring node whose parent is
chosen, until γ nodes are chosen. A policy is one row of `POLICIES`: a score per node. Restricting the choice to nodes
whose parent is chosen changes nothing for scores that never rise along a path, and keeps the set prefix-closed always.

The loop runs over groups of nodes that share a budget and a buffer of experts: each text's tree alone, or (`joint`) the
trees of all texts as one forest whose roots come first. Shapes depend on nothing that is computed, so the loop stays on
the device and compiles whole.

Letters: B texts, N tree nodes (root included), L MoE layers, E experts; P = L·E (layer, expert) pairs; G groups of
M nodes; R picks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ecospec.errors import InputError
from ecospec.inference.tree import ancestors_of

EPSILON = 1e-6


class Tree(Protocol):
    """What selection reads of a tree: `parents` [N] (root -1, parents first) and `prob` [N] (cumulative, root 1)."""

    @property
    def parents(self) -> Tensor: ...

    @property
    def prob(self) -> Tensor: ...


@dataclass(frozen=True)
class Scores:
    """The inputs of a policy: probabilities, each node's own pairs, its whole path's number of pairs, and noise."""

    prob_GM: Tensor
    own_GMP: Tensor
    path_cost_GM: Tensor
    epsilon: float
    noise_RGM: Tensor

    def confidence(self, covered_GP: Tensor, pick: int) -> Tensor:
        """EAGLE's rule: cumulative draft probability."""
        return self.prob_GM

    def marginal(self, covered_GP: Tensor, pick: int) -> Tensor:
        """Paper equation 9: P / (new pairs + ε). The path above a candidate is covered, so its own pairs suffice."""
        return self.prob_GM / ((self.own_GMP & ~covered_GP[:, None]).sum(-1) + self.epsilon)

    def path_cost(self, covered_GP: Tensor, pick: int) -> Tensor:
        """Paper equation 10, the static ablation: P / (pairs of the whole path + ε)."""
        return self.prob_GM / (self.path_cost_GM + self.epsilon)

    def random(self, covered_GP: Tensor, pick: int) -> Tensor:
        """A uniformly random candidate: fresh noise for each pick."""
        return self.noise_RGM[pick]


POLICIES: dict[str, Callable[[Scores, Tensor, int], Tensor]] = {
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
    """Indices of one tree's chosen nodes, int64 [min(γ, N)], ascending, root included.

    `footprints` bool [N, L, E] (None where the policy needs none); `buffer` bool [L, E], experts covered beforehand.
    Ties go to the shallower node, then to the lower index. Raises InputError for γ < 1, ε <= 0 or an unknown policy.
    """
    check_selection(policy, gamma, epsilon)
    if footprints is None and policy in NEEDS_FOOTPRINTS:
        raise InputError(f"--selection.policy {policy}: needs footprints; give a predictor or --footprints")
    parents_1N = torch.as_tensor(tree.parents).long()[None]
    prob_1N = torch.as_tensor(tree.prob)[None]
    chosen_1N = choose(
        parents_1N,
        prob_1N,
        torch.ones_like(parents_1N, dtype=torch.bool),
        None if footprints is None else torch.as_tensor(footprints)[None],
        policy,
        gamma,
        epsilon,
        None if buffer is None else torch.as_tensor(buffer)[None],
        noise_RBN=draw_noise(policy, gamma, parents_1N, generator),
    )
    return chosen_1N[0].nonzero().squeeze(1)


def check_selection(policy: str, gamma: int, epsilon: float = EPSILON) -> None:
    """Raises InputError naming the key and the remedy."""
    if policy not in POLICIES:
        raise InputError(f"--selection.policy {policy}: unknown; choose one of {', '.join(POLICIES)}")
    if not isinstance(gamma, int) or gamma < 1:
        raise InputError(f"--selection.gamma {gamma}: must be a whole number from 1 on (1 verifies the root alone)")
    if not 0 < epsilon < math.inf:
        raise InputError(f"--selection.epsilon {epsilon}: must be positive and finite")


def draw_noise(
    policy: str, gamma: int, parents_BN: Tensor, generator: torch.Generator | None = None, joint: bool = False
) -> Tensor | None:
    """The draws [R, B, N] of the policy `random`, from a generator of the CPU; None for the others."""
    if policy != "random":
        return None
    B, N = parents_BN.shape
    picks = (min(gamma, N) - 1) * (B if joint else 1)
    return torch.rand(picks, B, N, generator=generator).to(parents_BN.device)


def choose(
    parents_BN: Tensor,
    prob_BN: Tensor,
    real_BN: Tensor,
    footprints_BNLE: Tensor | None,
    policy: str,
    gamma: int,
    epsilon: float = EPSILON,
    buffer_BLE: Tensor | None = None,
    joint: bool = False,
    noise_RBN: Tensor | None = None,
) -> Tensor:
    """The chosen nodes of B trees, bool [B, N]: up to γ of each, or with `joint` up to γ·B of all together.

    `real_BN` leaves out padding; `buffer_BLE` are experts covered beforehand (with `joint` by any text).
    """
    B, N = parents_BN.shape
    ancestors_BNN = ancestors_of(parents_BN)
    own_BNP = torch.zeros(B, N, 1, dtype=torch.bool, device=prob_BN.device)
    if footprints_BNLE is not None:
        own_BNP = footprints_BNLE.flatten(2)
    path_cost_BN = _path_cost(own_BNP, ancestors_BNN) if policy == "global" else prob_BN
    groups = 1 if joint else B
    scores = Scores(
        prob_BN.float().reshape(groups, -1),
        own_BNP.reshape(groups, -1, own_BNP.shape[-1]),
        path_cost_BN.reshape(groups, -1),
        epsilon,
        noise_RBN.reshape(len(noise_RBN), groups, B // groups * N) if noise_RBN is not None else prob_BN,
    )
    first_B = torch.arange(B, device=parents_BN.device)[:, None] * N if joint else 0
    parents_GM = torch.where(parents_BN >= 0, parents_BN + first_B, -1).reshape(groups, -1)
    depth_GM = (ancestors_BNN.sum(-1) - 1).reshape(groups, -1)
    covered_GP = None if buffer_BLE is None else buffer_BLE.flatten(1).reshape(groups, B // groups, -1).any(1)
    picks = (min(gamma, N) - 1) * (B // groups)
    chosen_GM = _greedy(POLICIES[policy], scores, parents_GM, depth_GM, real_BN.reshape(groups, -1), covered_GP, picks)
    return chosen_GM.reshape(B, N)


def _greedy(
    policy: Callable,
    scores: Scores,
    parents_GM: Tensor,
    depth_GM: Tensor,
    real_GM: Tensor,
    covered_GP: Tensor | None,
    picks: int,
) -> Tensor:
    """All roots, then the best candidate `picks` times; a group that runs out of candidates takes no more."""
    M = parents_GM.shape[1]
    index_M = torch.arange(M, device=parents_GM.device)
    rank_GM = depth_GM * M + index_M  # smaller wins a tie
    chosen_GM = (parents_GM < 0) & real_GM
    roots_GP = (scores.own_GMP & chosen_GM[..., None]).any(1)
    covered_GP = roots_GP if covered_GP is None else covered_GP | roots_GP
    for pick in range(picks):
        candidate_GM = chosen_GM.gather(1, parents_GM.clamp(min=0)) & ~chosen_GM & real_GM & (parents_GM >= 0)
        score_GM = policy(scores, covered_GP, pick).masked_fill(~candidate_GM, -torch.inf)
        best_GM = (score_GM == score_GM.amax(1, keepdim=True)) & candidate_GM
        first_G1 = rank_GM.masked_fill(~best_GM, M * M).argmin(1, keepdim=True)
        picked_GM = (index_M == first_G1) & candidate_GM
        chosen_GM = chosen_GM | picked_GM
        covered_GP = covered_GP | (scores.own_GMP & picked_GM[..., None]).any(1)
    return chosen_GM


def _path_cost(own_BNP: Tensor, ancestors_BNN: Tensor) -> Tensor:
    """Pairs in the footprint of every node's whole path from the root (paper equation 7)."""
    return ((ancestors_BNN.float() @ own_BNP.float()) > 0).sum(-1)
