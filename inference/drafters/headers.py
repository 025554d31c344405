"""Checkpoints by their headers: which tensors are there, in which shape, and what does not fit."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ecospec.errors import InputError


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by key. Raises InputError when the file cannot be read."""
    try:
        with safe_open(path, framework="pt") as header:
            return {key: tuple(header.get_slice(key).get_shape()) for key in header.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def key_faults(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Every key that is missing, unused or of another shape, in one line; empty where all fits."""
    faults = {
        "missing keys": sorted(expected.keys() - found.keys()),
        "unused keys": sorted(found.keys() - expected.keys()),
        "wrong shapes": [
            f"{key} {list(found[key])} instead of {list(expected[key])}"
            for key in sorted(expected.keys() & found.keys())
            if tuple(found[key]) != tuple(expected[key])
        ],
    }
    return "; ".join(f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys)
