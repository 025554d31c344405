"""Overlap of padded batches, token by token and over all processes: what training watches on held-out samples.

Letters: N answer positions of a batch, L MoE layers, E experts, K experts per token, H hidden width.
"""

from typing import TYPE_CHECKING

import torch
import torchmetrics
from torch import Tensor

from ecospec.predictor.objective.loss import CHUNK_TOKENS
from ecospec.predictor.objective.metrics import shared_experts, top_experts

if TYPE_CHECKING:
    from ecospec.data.module import Batch
    from ecospec.predictor.kinds.routing import RoutingModel


class Overlap(torchmetrics.Metric):
    """Overlap of answer positions over batches, weighted by token and summed over processes."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("hits", "choices"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, model: "RoutingModel", batch: "Batch") -> None:
        """Count a padded batch; its peak memory is 5 · `CHUNK_TOKENS` · L · E float32 numbers beyond hidden states."""
        hidden_NH, true_NLK = model.read(batch, batch.answers())
        for hidden, true in zip(hidden_NH.split(CHUNK_TOKENS), true_NLK.split(CHUNK_TOKENS), strict=True):
            logits = model.logits(hidden)
            self.hits += shared_experts(top_experts(logits, true.shape[-1]), true.long(), logits.shape[-1]).sum()
            self.choices += true.numel()

    def compute(self) -> Tensor:
        """Share of the true experts that were predicted."""
        return self.hits / self.choices
