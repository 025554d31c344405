"""FP8 weights in blocks of rows and columns, one scale a block: dequantized by the block size that a checkpoint names.

Transformers 5.24 takes a block to be rows / rows of scales high. Where the last block is partial that is no whole
number, on which it stops, or a wrong one: 192 rows with 2 rows of scales are blocks of 128 and 64, not twice 96. So
checkpoints that name their block size are loaded by a quantizer of our own, registered beside Transformers', which says
exactly which rows and columns each scale belongs to. Without a block size it is Transformers' rule.

Letters: R rows and C columns of a weight, r and c those of its scales.
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import FineGrainedFP8Config, PreTrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import QuantizationMethod

METHOD = "ecospec_fp8"
TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE = "_scale_inv"  # what the key of a weight's scales ends with
Block = tuple[int, int]


def quantization_of(config: PreTrainedConfig) -> dict:
    """How the checkpoint of this configuration is quantized, as its config.json says; empty where it is not."""
    stored = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    return (stored if isinstance(stored, dict) else stored.to_dict()) if stored else {}


def block_of(quantization: Mapping) -> Block | None:
    """Rows and columns of a block, None where the quantization names none."""
    return tuple(quantization.get("weight_block_size") or ()) or None


def grid_of(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """The shape (r, c) of the scales of a weight (R, C): one for each block, the last ones of which may be partial."""
    return tuple(-(-size // step) for size, step in zip(shape[-2:], block, strict=False))


def dequantize_blocks(weight_RC: Tensor, scale_rc: Tensor, block: Block | None) -> Tensor:
    """Each weight times the scale of its block, float32 [R, C].

    Without a block size the scales divide the weight evenly. Raises ValueError where they do not fit it.
    """
    scale_rc = even_scales(weight_RC, scale_rc, block)
    if scale_rc.numel() == 1:
        return weight_RC.float() * scale_rc
    rest = [size % scales for size, scales in zip(weight_RC.shape, scale_rc.shape, strict=True)]
    if any(rest):
        raise ValueError(f"{_sizes(scale_rc.shape)} scales do not divide {_sizes(weight_RC.shape)} weights")
    for axis, (size, scales) in enumerate(zip(weight_RC.shape, scale_rc.shape, strict=True)):
        scale_rc = scale_rc.repeat_interleave(size // scales, axis)
    return weight_RC.float() * scale_rc


def even_scales(weight_RC: Tensor, scale_rc: Tensor, block: Block | None) -> Tensor:
    """The scales in float32, along an axis whose last block is partial one for each row (column) of the weight.

    So they divide the weight evenly, as Transformers takes for granted. Raises ValueError where they are not one for
    each block.
    """
    is_exponent = scale_rc.dtype == torch.uint8
    scale_rc = (scale_rc.float() - 127).exp2() if is_exponent else scale_rc.float()
    if block is None:
        return scale_rc
    if tuple(scale_rc.shape[-2:]) != grid_of(weight_RC.shape, block):
        raise ValueError(
            f"{_sizes(scale_rc.shape)} scales are not one for each {_sizes(block)} block of "
            f"{_sizes(weight_RC.shape)} weights"
        )
    for axis, step in zip((-2, -1), block, strict=True):
        if weight_RC.shape[axis] % step:
            scale_rc = scale_rc.repeat_interleave(step, axis).narrow(axis, 0, weight_RC.shape[axis])
    return scale_rc


def _sizes(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def by_blocks(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` that `from_pretrained` dequantizes by its block size; `config` itself where it names none."""
    quantization = quantization_of(config)
    if quantization.get("quant_method") != QuantizationMethod.FP8 or block_of(quantization) is None:
        return config
    config = copy.deepcopy(config)
    config.quantization_config = quantization | {"quant_method": METHOD}
    return config


class BlockDequantize(Fp8Dequantize):
    """Transformers' operation, given scales that divide their weights. What is no FP8 (packed FP4) stays its own."""

    def convert(self, input_dict: dict[str, list[Tensor] | Tensor], **kwargs: object) -> dict:
        """See `Fp8Dequantize`: weights and `…_scale_inv` by key, each a tensor or a list of one for each expert."""
        block = self.hf_quantizer.quantization_config.weight_block_size
        given = dict(input_dict)
        for key in [key for key in input_dict if f"{key}{SCALE}" in input_dict]:
            weights, scales = _listed(input_dict[key]), _listed(input_dict[f"{key}{SCALE}"])
            if weights[0].dtype in TYPES and len(weights) == len(scales):
                given[f"{key}{SCALE}"] = [even_scales(*pair, block) for pair in zip(weights, scales, strict=True)]
        return super().convert(given, **kwargs)


def _listed(value: list[Tensor] | Tensor) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


register_quantization_config(METHOD)(FineGrainedFP8Config)


@register_quantizer(METHOD)
class BlockQuantizer(FineGrainedFP8HfQuantizer):
    """Transformers' FP8 quantizer in everything but how it dequantizes."""

    def __init__(self, quantization_config: FineGrainedFP8Config, **kwargs: object) -> None:
        quantization_config.quant_method = QuantizationMethod.FP8  # what the model is to say of itself
        super().__init__(quantization_config, **kwargs)

    def get_load_operations(self) -> dict:
        """See `HfQuantizer`."""
        return {"dequantize": BlockDequantize}
