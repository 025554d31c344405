"""What a position may see: the past of its text, its window, and in a tree its ancestors.

Masks and cache rules are those of Transformers: `cache.get_mask_sizes` tells which columns a layer shows.

Letters: B texts, N nodes in the pass (root first), S slots of past entries that a layer shows.
"""

import torch
from torch import Tensor, nn

from ecospec.inference.target.cache import RowCache
from ecospec.inference.tree import DraftTrees

FULL = "full_attention"


def seen_past(lengths_B: Tensor, slots: int, depth_BN: Tensor, offset: int = 0, window: int | None = None) -> Tensor:
    """bool [B, N, S]: which past slots, from `offset` on, a node at `depth` past its text's end sees in its window."""
    slot_S = torch.arange(offset, offset + slots, device=lengths_B.device)
    seen_BNS = (slot_S < lengths_B[:, None, None]).expand(-1, depth_BN.shape[1], -1)
    if window is None:
        return seen_BNS
    return seen_BNS & ((lengths_B[:, None] + depth_BN)[:, :, None] - slot_S < window)


def additive(seen_BNS: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, N, S] that every attention takes: 0 where a position sees, the dtype's minimum elsewhere."""
    mask = torch.zeros(seen_BNS.shape, dtype=dtype, device=seen_BNS.device)
    return mask.masked_fill_(~seen_BNS, torch.finfo(dtype).min)[:, None]


def tree_masks(model: nn.Module, cache: RowCache, trees: DraftTrees, lengths_B: Tensor) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, columns]: one, or one for each layer type where the model takes a dict."""
    config = model.config.get_text_config()
    windows = cache.windows(config)

    def mask(layer: int) -> Tensor:
        return additive(_seen(cache, trees, lengths_B, layer, windows[layer]), model.dtype)

    types = getattr(config, "layer_types", None)
    if types is None or set(types) == {FULL}:
        return mask(0)
    return {kind: mask(types.index(kind)) for kind in dict.fromkeys(types)}


def _seen(cache: RowCache, trees: DraftTrees, lengths_B: Tensor, layer: int, window: int | None) -> Tensor:
    """bool [B, N, columns]: a node sees itself, its ancestors, and the past, all within the window."""
    columns, offset = cache.cache.get_mask_sizes(trees.width, layer)
    past = seen_past(lengths_B, columns - trees.width, trees.depth_BN, offset, window)
    ancestors_BNN = trees.ancestors_BNN
    if window is not None:
        ancestors_BNN = ancestors_BNN & (trees.depth_BN[:, :, None] - trees.depth_BN[:, None] < window)
    return torch.cat([past, ancestors_BNN], dim=-1)
