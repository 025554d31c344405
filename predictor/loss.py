"""The training objective (EcoSpec §4.1, equations 5 and 6) on plain tensors.

With q uniform over the K true experts, -Σ_e q_e log p_e = logsumexp(z) - mean of z over those K, so neither q nor
log p is ever formed. Knows nothing about models or files.

Letters: B batch, T tokens, L MoE layers, E experts, K experts per token.
"""

import math
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ecospec.data.module import Batch
    from ecospec.predictor.model import ExpertPredictor

PADDING = -1  # expert id of positions that are no tokens


def layer_losses(logits: Tensor, experts: Tensor) -> Tensor:
    """Cross-entropy in nats of each token and layer: logits [..., L, E], true ids [..., L, K] → [..., L].

    Where `experts` is padding the value means nothing.
    """
    return logits.logsumexp(-1) - logits.gather(-1, experts.clamp(min=0)).mean(-1)


def expert_loss(logits_BTLE: Tensor, experts_BTLK: Tensor) -> Tensor:
    """Equation 6 as a mean over tokens and layers, in nats; padded positions do not count."""
    real_BTL = experts_BTLK[..., 0] != PADDING
    return (layer_losses(logits_BTLE, experts_BTLK) * real_BTL).sum() / real_BTL.sum()


def batch_loss(predictor: "ExpertPredictor", batch: "Batch") -> Tensor:
    """The objective on one batch, as `expert_loss`."""
    return expert_loss(predictor(batch.input_ids), batch.experts)


def excess_loss(loss: float, top_k: int) -> float:
    """How far a mean loss lies above its minimum, log K: 0 when exactly the true experts share the mass evenly."""
    return loss - math.log(top_k)
