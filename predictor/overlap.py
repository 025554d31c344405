"""Overlap of padded batches, token by token and over all processes: what training watches on held-out samples.

Letters: B batch, T tokens, R real answer positions of a batch, L MoE layers, E experts, K experts per token.
"""

import torch
import torchmetrics
from torch import Tensor

from ecospec.data.module import Batch
from ecospec.predictor.loss import PADDING
from ecospec.predictor.metrics import shared_experts, top_experts


class Overlap(torchmetrics.Metric):
    """Overlap of answer positions over batches, weighted by token and summed over processes."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("hits", "choices"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits_BTLE: Tensor, batch: Batch) -> None:
        """Count a padded batch."""
        experts_BTLK = batch.experts
        after_BT = torch.arange(experts_BTLK.shape[1], device=experts_BTLK.device) >= batch.prompt_lens[:, None]
        real_BT = after_BT & (experts_BTLK[..., 0, 0] != PADDING)
        true_RLK = experts_BTLK[real_BT]
        predicted_RLK = top_experts(logits_BTLE[real_BT], true_RLK.shape[-1])
        self.hits += shared_experts(predicted_RLK, true_RLK, logits_BTLE.shape[-1]).sum()
        self.choices += true_RLK.numel()

    def compute(self) -> Tensor:
        """Share of the true experts that were predicted."""
        return self.hits / self.choices
