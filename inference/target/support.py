"""Which Transformers models can verify a tree of drafts, and why the others cannot."""

from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from ecospec.errors import InputError, first_few
from ecospec.inference.target.masks import FULL
from ecospec.tracing.target.routers import find_sites

LAYER_TYPES = {FULL, "sliding_attention", "indexed_attention"}
TREE_CAPABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)
EXPERTS = ("eager", "grouped_mm")  # these read the weights of each active expert once
FUSED = "Mxfp4GptOssMLP"  # a block that routes inside its kernel


def check_tree_support(model: nn.Module) -> None:
    """Raises InputError naming the reason when a tree cannot be verified on this model, or its routing not be seen."""
    find_sites(model)
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
