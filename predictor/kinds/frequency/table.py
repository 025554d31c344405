"""The most used experts of each layer. Letters: T tokens, L MoE layers, E experts."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec.predictor.kinds.counting import ExpertTable


@dataclass(frozen=True)
class FrequencyTable(ExpertTable):
    """The same experts for every token: those with the largest shares."""

    def logits(self, input_ids_T: np.ndarray) -> Tensor:
        """log share of each expert, [T, L, E]."""
        return torch.from_numpy(np.log(self.shares.share_LE)).expand(len(input_ids_T), -1, -1)
