"""The training objective (EcoSpec §4.1, equations 5 and 6) on plain tensors, a stretch of tokens at a time.

With q uniform over the K true experts, -Σ_e q_e log p_e is the mean of -log p over those K, so q is never formed. Nor
are all logits: head and loss run on `CHUNK_TOKENS` tokens at a time, and again in the backward pass. Knows nothing
about models or files.

Letters: N tokens of a batch without padding, L MoE layers, E experts, K experts per token, H hidden
width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from ecospec.data.module import Batch
    from ecospec.predictor.kinds.routing import RoutingModel

CHUNK_TOKENS = 1024
LOSS_CHUNKS = 5  # as large as a chunk's logits, alive at once; measured 3.1, with an idle allocator's slack 4.2
LogitsOf = Callable[[Tensor], Tensor]  # hidden states [N, H] → logits [N, L, E]


def layer_losses(logits: Tensor, experts: Tensor) -> Tensor:
    """Cross-entropy in nats of each token and layer: logits [..., L, E], true ids [..., L, K] → [..., L]."""
    return -logits.log_softmax(-1).gather(-1, experts.long()).mean(-1)


def expert_loss(logits: Tensor, experts: Tensor) -> Tensor:
    """Equation 6 as a mean over tokens and layers, in nats: logits [..., L, E], true ids [..., L, K] → a number."""
    return layer_losses(logits, experts).mean()


def batch_loss(model: "RoutingModel", batch: "Batch") -> Tensor:
    """The objective on one batch, as `expert_loss` of its tokens without padding; 0 where it has none."""
    return chunked_loss(model.logits, *model.read(batch, batch.tokens()))


def chunked_loss(logits_of: LogitsOf, hidden_NH: Tensor, experts_NLK: Tensor) -> Tensor:
    """`expert_loss` with logits of `CHUNK_TOKENS` tokens at most in memory.

    Its peak is `LOSS_CHUNKS` · `CHUNK_TOKENS` · L · E float32 numbers beyond its arguments, the model's parameters, and
    the gradients of both.
    """
    run = _sum_of_losses
    if len(hidden_NH) > CHUNK_TOKENS:  # nothing is saved by computing a single chunk again
        run = partial(checkpoint, _sum_of_losses, use_reentrant=False)
    total = hidden_NH.new_zeros((), dtype=torch.float32)
    for hidden, experts in zip(hidden_NH.split(CHUNK_TOKENS), experts_NLK.split(CHUNK_TOKENS), strict=True):
        total = total + run(logits_of, hidden, experts)
    return total / max(1, len(experts_NLK) * experts_NLK.shape[1])


def _sum_of_losses(logits_of: LogitsOf, hidden_NH: Tensor, experts_NLK: Tensor) -> Tensor:
    return layer_losses(logits_of(hidden_NH), experts_NLK).sum()


def excess_loss(loss: float, top_k: int) -> float:
    """How far a mean loss lies above its minimum, log K: 0 when exactly the true experts share the mass evenly."""
    return loss - math.log(top_k)
