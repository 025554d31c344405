"""Checkpoints in FP8 with one scale a block, and the same with weights dequantized by hand, entry by entry.

Letters: R rows and C columns of a weight, r and c of its scales.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SCALE = "_scale_inv"


def quantized(weights: dict[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """Projections in FP8 with a random scale per block, the rest as it is."""
    generator, stored = torch.Generator().manual_seed(0), dict(weights)
    for key, tensor in weights.items():
        if key.endswith(("_proj.weight", "with_mqa.weight")) and not key.endswith("eh_proj.weight"):
            grid = [math.ceil(size / step) for size, step in zip(tensor.shape, block, strict=True)]
            stored[key] = (tensor * 8).to(torch.float8_e4m3fn)
            stored[key + SCALE] = 0.05 + 0.2 * torch.rand(grid, generator=generator)
    return stored


def dequantized_by_hand(weight_RC: Tensor, scale_rc: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = (torch.arange(size) // step for size, step in zip(weight_RC.shape, block, strict=True))
    return weight_RC.float() * scale_rc[rows][:, columns]


def quantize_folder(folder: Path, by_hand: Path, block: tuple[int, int]) -> Path:
    """Turn the model in `folder` into FP8, and write it to `by_hand` with its weights as they then are in float32."""
    stored = quantized(load_file(folder / "model.safetensors"), block)
    plain = {
        key: dequantized_by_hand(tensor, stored[key + SCALE], block) if key + SCALE in stored else tensor
        for key, tensor in stored.items()
        if not key.endswith(SCALE)
    }
    shutil.copytree(folder, by_hand)
    save_file(plain, by_hand / "model.safetensors", metadata={"format": "pt"})
    rewrite(folder, stored, {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"})
    return folder


def rewrite(folder: Path, stored: dict[str, Tensor], quantization: dict) -> None:
    """Give a folder these tensors and this `quantization_config`."""
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
