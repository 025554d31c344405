"""One target pass over chosen draft nodes, and the cache kept as plain decoding would have left it.

Letters: B batch (1 here), N nodes in the pass (root first), S cached positions, L MoE layers, K experts per token.
Masks and cache rules are those of Transformers: `cache.get_mask_sizes` tells which columns a layer shows.
"""

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ecospec.configs.errors import InputError
from ecospec.inference.tree import DraftTree, ancestors_of

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
TREE_CAPABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)


def check_tree_support(model: nn.Module) -> None:
    """Raises InputError naming the reason when a tree cannot be verified on this model."""
    family = model.config.get_text_config().model_type
    if getattr(model, "_is_stateful", False):
        raise InputError(f"target family {family}: recurrent layers cannot verify a tree of drafts")
    unknown = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KNOWN_LAYER_TYPES
    if unknown:
        raise InputError(f"target family {family}: cannot verify a tree in layers of type {', '.join(sorted(unknown))}")
    attention = model.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise InputError(f"target attention {attention}: a tree mask needs eager or sdpa attention")


def check_cache(cache: Cache) -> None:
    """Raises InputError for cache layers that cannot drop rejected drafts."""
    for layer in cache.layers:
        if type(layer) not in TREE_CAPABLE_LAYERS:
            raise InputError(f"cache layer {type(layer).__name__} cannot drop rejected drafts; use a dynamic cache")


def verify(model: nn.Module, cache: Cache, tree: DraftTree, **forward_options):
    """The target's output for every node of `tree`, appended to `cache` in node order; options pass through."""
    past = int(cache.get_seq_length())
    return model(
        input_ids=tree.tokens_N[None],
        attention_mask=None if len(tree) == 1 else tree_masks(model, cache, tree),
        position_ids=(tree.depth_N + past)[None],
        cache=cache,
        use_cache=True,
        **forward_options,
    )


def tree_masks(model: nn.Module, cache: Cache, tree: DraftTree) -> Tensor | dict[str, Tensor]:
    """Additive masks [1, 1, N, columns]: one, or one for each layer type where the model takes a dict."""
    config = model.config.get_text_config()
    ancestors_NN = ancestors_of(tree.parents_N)
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = isinstance(cache.layers[0], DynamicSlidingWindowLayer)
        return _mask(model, cache, tree, ancestors_NN, 0, config.sliding_window if sliding else None)
    if set(types) == {"full_attention"}:
        return _mask(model, cache, tree, ancestors_NN, 0, None)
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    return {kind: _mask(model, cache, tree, ancestors_NN, types.index(kind), windows[kind]) for kind in set(types)}


def _mask(
    model: nn.Module, cache: Cache, tree: DraftTree, ancestors_NN: Tensor, layer: int, window: int | None
) -> Tensor:
    """0 where a node may look, the dtype's minimum elsewhere: itself, its ancestors, and the past within the window."""
    N, past = len(tree), int(cache.get_seq_length())
    columns, offset = cache.get_mask_sizes(N, layer)
    at_S = torch.arange(offset, offset + columns - N, device=ancestors_NN.device)
    if window is None:
        past_NS = torch.ones(N, len(at_S), dtype=torch.bool, device=at_S.device)
    else:
        at_N = past + tree.depth_N
        past_NS = at_N[:, None] - at_S < window
        ancestors_NN = ancestors_NN & (tree.depth_N[:, None] - tree.depth_N < window)
    seen = torch.cat([past_NS, ancestors_NN], dim=1)
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(model.dtype).min)[None, None]


def compact(cache: Cache, nodes: int, kept: list[int]) -> None:
    """Of the last `nodes` cache entries keep those of the accepted path `kept` (root first), in that order.

    Accepted entries move to the front of the block, then the library crops the rest and repairs its own lengths.
    """
    if kept != list(range(len(kept))):
        order = torch.tensor(kept + [node for node in range(nodes) if node not in kept])
        for layer in cache.layers:
            _reorder_tail(layer, nodes, order)
    cache.crop(len(kept) - nodes)


def _reorder_tail(layer: object, nodes: int, order: Tensor) -> None:
    for tensor in (layer.keys, layer.values):
        tail = tensor[..., -nodes:, :]
        tail.copy_(tail.index_select(-2, order.to(tail.device)))
    if getattr(layer, "indexer_keys", None) is not None:
        tail = layer.indexer_keys[:, -nodes:]
        tail.copy_(tail.index_select(1, order.to(tail.device)))
