"""The target's hidden states that a drafter is fed: chosen layers, concatenated.

Layers are counted as in `Drafter.feature_layers`: 0 the embeddings, j the output of decoder layer j before the final
norm, `FINAL` the last hidden state after it. All but the last layer's own output, which needs a hook, are an option of
Transformers' forward.

Letters: B texts, T positions of a pass, F features: the chosen layers' widths together.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from ecospec.errors import InputError

FINAL = -1  # the layer whose output is the target's last hidden state, after its final norm


class FeatureTap:
    """While entered, `options` are the forward options that make a pass of `model` keep what `read` concatenates.

    Raises InputError for a layer that the model does not have.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.depth = model.config.get_text_config().num_hidden_layers
        unknown = [layer for layer in self.layers if not FINAL <= layer <= self.depth]
        if unknown:
            raise InputError(
                f"--drafter.feature_layers {list(self.layers)}: the target has hidden states 0 to {self.depth}, "
                f"so there is no {unknown[0]}"
            )
        self._last_layer = decoder_layers(model)[-1] if self.depth in self.layers else None
        self._handle: torch.utils.hooks.RemovableHandle | None = None
        self._before_norm: Tensor | None = None

    def __enter__(self) -> Self:
        if self._last_layer is not None:
            self._handle = self._last_layer.register_forward_hook(self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    @property
    def options(self) -> dict:
        """Keyword arguments of the target's forward."""
        wanted = [self.depth if layer == FINAL else layer for layer in self.layers if layer != self.depth]
        return {"output_hidden_states": wanted} if wanted else {}

    def read(self, out: object) -> Tensor | None:
        """Features [B, T, F] of the pass whose output is `out`; None without layers."""
        if not self.layers:
            return None
        parts = [self._before_norm if layer == self.depth else out.hidden_states[layer] for layer in self.layers]
        return torch.cat([part.to(parts[0].device) for part in parts], dim=-1)

    def _keep(self, _module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
        self._before_norm = output[0] if isinstance(output, tuple) else output


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model. Raises InputError when it keeps them under another name."""
    for module in (model.get_decoder(), *model.modules()):
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise InputError(f"target family {model.config.model_type}: its decoder layers were not found")
