"""Selection over trees given as plain tensors.

Letters: B texts, N tree nodes (root first), L MoE layers, E experts.
"""

import torch

from ecospec.inference.selection.config import selector
from ecospec.inference.selection.greedy import SCORES
from ecospec.inference.tree import DraftTrees, depths_of

POLICIES = tuple(SCORES)


def trees_of(parents_BN, prob_BN, real_BN=None):
    depth_BN, zeros_BN = depths_of(parents_BN), torch.zeros_like(parents_BN)
    real_BN = zeros_BN == 0 if real_BN is None else real_BN
    return DraftTrees(zeros_BN, parents_BN, prob_BN, depth_BN, real_BN, int(depth_BN.max()))


def chosen_of(parents_BN, prob_BN, real_BN, footprints_BNLE, policy, gamma, joint=False, seed=0):
    """bool [B, N]: what a selector of this policy chooses."""
    chooser = selector(policy, gamma, joint=joint)
    chooser.reset(len(parents_BN), seed)
    return chooser.choose(trees_of(parents_BN, prob_BN, real_BN), footprints_BNLE)
