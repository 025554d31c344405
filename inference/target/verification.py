"""One target pass over chosen draft nodes: which targets can do it, and the masks that make a tree of a sequence.

Letters: B texts, N nodes in the pass (root first), S cached positions, L MoE layers, K experts per token.
Masks and cache rules are those of Transformers: `cache.get_mask_sizes` tells which columns a layer shows.
"""

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ecospec.errors import InputError, first_few
from ecospec.inference.target.cache import RowCache, additive, seen_past
from ecospec.inference.tree import DraftTrees, ancestors_of

FULL = "full_attention"
LAYER_TYPES = {FULL, "sliding_attention", "indexed_attention"}
TREE_CAPABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)
EXPERTS = ("eager", "grouped_mm")  # these read the weights of each active expert once
FUSED = "Mxfp4GptOssMLP"  # a block that routes inside its kernel


def check_tree_support(model: nn.Module) -> None:
    """Raises InputError naming the reason when a tree cannot be verified on this model."""
    config = model.config.get_text_config()
    family = config.model_type
    if getattr(model, "_is_stateful", False):
        raise InputError(f"target family {family}: its recurrent or compressed state cannot forget rejected drafts")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise InputError(f"target family {family}: cannot verify a tree in layers of type {first_few(sorted(unknown))}")
    check_cache(DynamicCache(config=config), family)
    attention = model.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise InputError(
            f"target attention {attention}: a tree mask needs eager or sdpa attention; load the model with "
            "attn_implementation, or switch with model.set_attn_implementation"
        )
    check_experts(model)
    check_kernels(model)


def check_experts(model: nn.Module) -> None:
    """Raises InputError for experts kernels that read an expert's weights once for every token that uses it."""
    for implementation in model.get_experts_implementation().values():
        if implementation not in (None, *EXPERTS):
            raise InputError(
                f"target experts {implementation}: verification needs kernels that read each active expert once; load "
                f"the model with experts_implementation {' or '.join(EXPERTS)}"
            )


def check_kernels(model: nn.Module) -> None:
    """Raises InputError for MoE blocks replaced as a whole, which call neither router nor experts module."""
    for name, module in model.named_modules():
        if type(module).__name__ == FUSED and not getattr(module.experts, "_is_hooked", False):  # hooked: split experts
            raise InputError(
                f"{name}: MXFP4 kernels hide which experts run; load plain weights with --target.dequantize true, in "
                "Python with Mxfp4Config(dequantize=True)"
            )
    if model.use_kernels:
        raise InputError("use_kernels: kernels of the hub hide which experts run; load the model without them")


def check_cache(cache: Cache, where: str = "cache") -> None:
    """Raises InputError for cache layers that cannot drop rejected drafts."""
    for layer in cache.layers:
        if type(layer) not in TREE_CAPABLE_LAYERS:
            raise InputError(
                f"{where}: cache layer {type(layer).__name__} cannot drop rejected drafts; a dynamic cache can"
            )


def check_batch(config: PreTrainedConfig) -> None:
    """Raises InputError where only one text at a time can be decoded: in a batch every layer keeps all positions."""
    config = config.get_text_config()
    if any(isinstance(layer, DynamicIndexedLayer) for layer in DynamicCache(config=config).layers):
        raise InputError(
            f"target family {config.model_type}: sparse attention decodes one text at a time; batch size 1"
        )


def check_context(config: PreTrainedConfig, length: int) -> None:
    """Raises InputError for texts of up to `length` tokens where sparse attention would begin to choose positions."""
    config = config.get_text_config()
    limit = getattr(config, "index_topk", None)
    if limit is not None and length > limit:
        raise InputError(
            f"target family {config.model_type}: a tree can be verified up to {limit} tokens (index_topk), where its "
            f"sparse attention still sees everything; prompt and new tokens make {length}"
        )


def verify(model: nn.Module, cache: RowCache, trees: DraftTrees, **forward_options):
    """The target's output for every node of `trees`, appended to `cache` in node order; options pass through."""
    alone = len(trees) == 1 and trees.width == 1
    lengths_B = cache.lengths_B(trees.tokens_BN.device)
    return model(
        input_ids=trees.tokens_BN,
        attention_mask=None if alone else tree_masks(model, cache, trees, lengths_B),
        position_ids=trees.depth_BN + lengths_B[:, None],
        cache=cache.cache,
        use_cache=True,
        **forward_options,
    )


def tree_masks(model: nn.Module, cache: RowCache, trees: DraftTrees, lengths_B: Tensor) -> Tensor | dict[str, Tensor]:
    """Additive masks [B, 1, N, columns]: one, or one for each layer type where the model takes a dict."""
    config = model.config.get_text_config()
    ancestors_BNN, windows = ancestors_of(trees.parents_BN), cache.windows(config)

    def mask(layer: int) -> Tensor:
        return additive(_seen(cache, trees, lengths_B, ancestors_BNN, layer, windows[layer]), model.dtype)

    types = getattr(config, "layer_types", None)
    if types is None or set(types) == {FULL}:
        return mask(0)
    return {kind: mask(types.index(kind)) for kind in dict.fromkeys(types)}


def _seen(
    cache: RowCache, trees: DraftTrees, lengths_B: Tensor, ancestors_BNN: Tensor, layer: int, window: int | None
) -> Tensor:
    """bool [B, N, columns]: a node sees itself, its ancestors, and the past, all within the window."""
    columns, offset = cache.cache.get_mask_sizes(trees.width, layer)
    past = seen_past(lengths_B, columns - trees.width, trees.depth_BN, offset, window)
    if window is not None:
        ancestors_BNN = ancestors_BNN & (trees.depth_BN[:, :, None] - trees.depth_BN[:, None] < window)
    return torch.cat([past, ancestors_BNN], dim=-1)
