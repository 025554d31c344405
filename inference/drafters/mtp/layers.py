"""What the layers of an MTP head compute, and what each of them sees.

Letters: B texts, T new entries, S cached and new entries, H hidden width, N layers, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from ecospec.inference.target.masks import additive


class MtpLayer(nn.Module):
    """One layer with the target's (or its own) embedding and output matrix."""

    def __init__(self, layer: nn.Module, norm: type[nn.Module], config: PreTrainedConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = norm(H, eps=eps), norm(H, eps=eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.layer = layer
        self.shared_head = nn.ModuleDict({"norm": norm(H, eps=eps)})

    def attach(self, embedding_VH: Tensor, output_VH: Tensor, rotary: nn.Module) -> None:
        """Use these matrices and the target's rotary embedding."""
        self._attached = (embedding_VH, output_VH, rotary)  # a tuple, so that they stay no part of this module

    def forward(
        self, ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The output after shared_head.norm [B, T, H]; arguments as of `DraftHead`."""
        embedding_VH, _, rotary = self._attached
        embedded_BTH = F.embedding(ids_BT.to(embedding_VH.device), embedding_VH).to(hidden_BTH)
        x_BTH = self.eh_proj(torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], dim=-1))
        out_BTH = self.layer(
            x_BTH,
            attention_mask=None if seen_BTS is None else additive(seen_BTS, x_BTH.dtype),
            position_ids=positions_BT,
            position_embeddings=rotary(x_BTH, positions_BT),
            cache=cache,
        )
        return self.shared_head["norm"](out_BTH)

    def logits(self, out_BTH: Tensor) -> Tensor:
        """Logits [..., V] of outputs, float32."""
        return F.linear(out_BTH, self._attached[1]).float()


class Entries:
    """T new tokens of each text on their way into the cache of a head with N layers, N > 1.

    Behind the N layers' keys and values the cache has an entry of ours for each token, in the same slots: its "keys"
    are the outputs [B, N - 1, S, H] of layers 0 to N - 2, its "values" [B, 1, S, 1] how many layers can have the
    token, since layer k begins at a text's k-th entry. So whatever moves or drops entries does it to these as well.
    """

    def __init__(self, ids_BT: Tensor, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache, count: int) -> None:
        T = ids_BT.shape[1]
        self._ids_BT, self._positions_BT, self._cache, self._count = ids_BT, positions_BT, cache, count
        self._past = cache.layers[count] if len(cache.layers) > count else None
        self._reach_BT = (positions_BT + 1).clamp(max=count)
        reach_BS = self._reach_BT if self._past is None else self._with_past()
        eye_TT = torch.eye(T, dtype=torch.bool, device=ids_BT.device)
        self._own_TS = F.pad(eye_TT, (reach_BS.shape[1] - T, 0))
        self._seen_BTS = eye_TT.cumsum(0).bool()[None] if seen_BTS is None else seen_BTS  # None: causal
        self._reach_BS = reach_BS

    def _with_past(self) -> Tensor:
        return torch.cat([self._past.values[:, 0, :, 0], self._reach_BT], dim=1)

    def through(self, layer: MtpLayer, number: int, hidden_BTH: Tensor) -> Tensor:
        """Outputs [B, T, H] of layer `number`; of what each token may see, it sees what that layer can have."""
        seen_BTS = self._seen_BTS & (self._reach_BS > number)[:, None] | self._own_TS
        return layer(self._ids_BT, hidden_BTH, self._positions_BT, seen_BTS, self._cache)

    def outputs_before(self, like_BTH: Tensor) -> Tensor:
        """Outputs [B, N - 1, H] of the token before the first new one of each text; zeros where a text begins."""
        if self._past is None:
            return like_BTH.new_zeros(len(like_BTH), self._count - 1, like_BTH.shape[-1])
        rows_B = torch.arange(len(like_BTH), device=like_BTH.device)
        return self._past.keys[rows_B, :, self._positions_BT[:, 0] - 1]

    def remember(self, outs: list[Tensor]) -> None:
        """Keep these outputs [B, T, H] of layers 0 to N - 2 beside their tokens."""
        reach_B1T1 = self._reach_BT[:, None, :, None].to(outs[0])
        self._cache.update(torch.stack(outs, dim=1), reach_B1T1, self._count)

    def skip(self, number: int) -> None:
        """Fill the slots of layer `number`, through which these tokens do not go; nothing sees them there."""
        layer, T = self._cache.layers[number], self._ids_BT.shape[1]
        empty = (tensor.new_zeros(*tensor.shape[:2], T, tensor.shape[3]) for tensor in (layer.keys, layer.values))
        self._cache.update(*empty, number)
