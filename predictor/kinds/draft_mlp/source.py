"""The draft MLP as a footprint source. Letters: B texts, N tree nodes, L MoE layers, E experts."""

import torch
from torch import Tensor

from ecospec.inference.footprints import Stateless
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.draft_mlp.model import DraftMLP
from ecospec.predictor.kinds.routing import likeliest


class DraftMLPFootprints(Stateless):
    """The MLP on each node's token and the hidden input of the draft head there."""

    needs_hidden = True

    def __init__(self, model: DraftMLP) -> None:
        self.model = model

    @torch.inference_mode()
    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return likeliest(self.model(trees.tokens_BN, trees.hidden_BNH), self.model.config.num_experts_per_tok)
