"""The linear probe as a footprint source. Letters: B texts, N tree nodes, L MoE layers, E experts."""

import torch
from torch import Tensor

from ecospec.inference.footprints import Stateless
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds.linear.model import LinearPredictor
from ecospec.predictor.kinds.routing import likeliest


class LinearFootprints(Stateless):
    """The probe on each node's token."""

    def __init__(self, model: LinearPredictor) -> None:
        self.model = model

    @torch.inference_mode()
    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor] | None = None) -> Tensor:
        """bool [B, N, L, E], see `FootprintSource`."""
        return likeliest(self.model(trees.tokens_BN), self.model.config.num_experts_per_tok)
