"""The tensors of one multi-token-prediction (MTP) layer in a checkpoint: whether all are there, and their values.

Names are those below `model.layers.{number}.`. Knows nothing about what is computed with them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ecospec.errors import InputError
from ecospec.tracing.target.checkpoint import FP8, Checkpoint, key_faults
from ecospec.tracing.target.fp8 import SCALE, grid_of


class MtpTensors:
    """The tensors of layer `number` of a checkpoint.

    `shapes` and `dtypes` (as safetensors names them) come from the headers. Raises InputError when there is no such
    layer, and as `Checkpoint` does.
    """

    def __init__(self, checkpoint: Checkpoint, number: int) -> None:
        self.checkpoint, self.number = checkpoint, number
        self.prefix = f"model.layers.{number}."
        self.shapes = self._below(checkpoint.shapes(self.prefix))
        self.dtypes = self._below(checkpoint.dtypes(self.prefix))
        if not self.shapes:
            raise InputError(
                f"{checkpoint.name}: holds no key {self.prefix}*; this checkpoint comes without a "
                "multi-token-prediction layer that its config.json names (num_nextn_predict_layers)"
            )

    def _below(self, values: Mapping[str, object]) -> dict:
        return {key.removeprefix(self.prefix): value for key, value in values.items()}

    def require(self, needed: Mapping[str, torch.Size], optional: Mapping[str, torch.Size]) -> None:
        """Raises one InputError for the keys that are missing, unused or of another shape."""
        expected = {**needed, **{key: shape for key, shape in optional.items() if key in self.shapes}}
        for key in [key for key in expected if self.dtypes.get(key) in FP8]:
            expected[key + SCALE] = self._scales(key, expected[key])
        faults = key_faults(expected, self.shapes)
        if faults:
            raise InputError(f"{self.checkpoint.name}: {self.prefix}* is not this model's prediction layer; {faults}")

    def _scales(self, key: str, shape: torch.Size) -> tuple[int, ...]:
        """The shape of a weight's scales: one a block, or without a block size whatever there is."""
        block = self.checkpoint.block
        return self.shapes.get(key + SCALE, ()) if block is None else grid_of(shape, block)

    def read(self, key: str) -> Tensor:
        """The value of `key` on the CPU, float32 where it is stored in FP8, else in the stored dtype."""
        return self.checkpoint.read(self.prefix + key)
