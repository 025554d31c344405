"""The selection rule alone, on plain arrays of one tree.

Letters: N tree nodes (root included), L MoE layers, E experts.
"""

from typing import Protocol

import torch
from torch import Tensor

from ecospec.inference.selection.config import EPSILON, selector
from ecospec.inference.tree import DraftTrees, depths_of


class Tree(Protocol):
    """What selection reads of a tree: `parents` [N] (root -1, parents first) and `prob` [N] (cumulative, root 1)."""

    @property
    def parents(self) -> Tensor: ...

    @property
    def prob(self) -> Tensor: ...


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

    `footprints` [N, L, E], bool or probabilities (None where the policy needs none); `buffer` [L, E], experts covered
    beforehand; `generator` (of the CPU; by default the global one) draws for `random`. Ties go to the shallower node,
    then to the lower index. Raises InputError for γ < 1, ε <= 0, an unknown policy and footprints that are missing.
    """
    chooser = selector(policy, gamma, epsilon)
    if policy == "random":
        chooser.reset(1, int(torch.randint(2**62, (), generator=generator)))
    given = [None if part is None else torch.as_tensor(part)[None] for part in (footprints, buffer)]
    return chooser.choose(_trees_of(tree), *given)[0].nonzero().squeeze(1)


def _trees_of(tree: Tree) -> DraftTrees:
    """A batch of this one tree, whose tokens do not matter."""
    parents_1N, prob_1N = torch.as_tensor(tree.parents).long()[None], torch.as_tensor(tree.prob)[None]
    depth_1N, zeros_1N = depths_of(parents_1N), torch.zeros_like(parents_1N)
    return DraftTrees(zeros_1N, parents_1N, prob_1N, depth_1N, zeros_1N == 0, int(depth_1N.max()))
