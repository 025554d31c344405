"""The linear probe.

Letters: B batch, T tokens, L MoE layers, E experts per layer, D width of the target's embeddings.
"""

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from ecospec.predictor.kinds.linear.kind import KIND
from ecospec.predictor.kinds.routing import RoutingConfig, RoutingModel

if TYPE_CHECKING:
    from ecospec.data.module import Batch


class LinearConfig(RoutingConfig):
    """A linear probe has no sizes of its own."""

    model_type = KIND.model_type


class LinearPredictor(RoutingModel):
    """`forward(input_ids [B, T]) → logits [B, T, L, E]`: one matrix on the token's embedding, scaled to unit RMS."""

    config: LinearConfig

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.head = nn.Linear(config.embedding_size, config.num_layers * config.num_experts)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Routing logits [B, T, L, E] in float32; each depends on its own token alone."""
        return self.logits(self.hidden(input_ids))

    def hidden(self, input_ids: Tensor) -> Tensor:
        """The scaled embedding of each token, [..., D]."""
        rows = self._embed(input_ids)
        return F.rms_norm(rows, rows.shape[-1:])

    def read(self, batch: "Batch", chosen_BT: Tensor) -> tuple[Tensor, Tensor]:
        """See `RoutingModel`."""
        return self.hidden(batch.input_ids[chosen_BT]), batch.experts[chosen_BT]
