"""The experts of the last token that went through the target, as a footprint source and as a baseline.

Letters: B texts, N tree nodes, n new tokens, T tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec.data.traces import Trace, Traces
from ecospec.inference.footprints import Stateless, same_for_all
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.base import Baseline
from ecospec.predictor.kinds.counting import ExpertShares, count_shares, stretches


class LastStepFootprints(Stateless):
    """Every node is expected to use the experts of the last token that went through the target.

    As they are the same for all nodes, none adds to what the root needs: selection falls back on EAGLE's rule.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor]) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return same_for_all(torch.stack([new_nLK[-1] for new_nLK in routed]), trees.width, self.num_experts)


@dataclass(frozen=True)
class LastStepPredictor:
    """The experts of the token before; shares break ties and fill gaps."""

    shares: ExpertShares

    def known(self, experts_TLK: np.ndarray) -> np.ndarray:
        """bool [T, L, E]: the experts of the token before each; none before the first."""
        known_TLE = np.zeros((len(experts_TLK), *self.shares.share_LE.shape), bool)
        np.put_along_axis(known_TLE[1:], experts_TLK[:-1].astype(np.int64), True, axis=-1)
        return known_TLE

    def logits(self, item: Trace) -> Iterator[Tensor]:
        """log of what is `known`, to which one token's worth of choices is added, [t, L, E] of each stretch."""
        return map(self.shares.fill, stretches(self.known(item.experts)))


def last_step_baseline(traces: Traces, nodes: int) -> Baseline:
    """Of the token right after the last one known, a step's root; drafts lie further from it."""
    experts_LK = next(iter(traces)).experts[0]
    return Baseline(LastStepPredictor(count_shares(traces)).logits, lambda: np.repeat(experts_LK[None], nodes, axis=0))
