"""Speculative decoding of MoE targets: draft trees, selection, verification, evaluation.

The names below are imported when first used, so that `--help` does not wait for PyTorch.
"""

from importlib import import_module

_HOMES = {
    "DraftTree": "tree",
    "EcoSpecDecoder": "api",
    "generate": "api",
    "select": "selection",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"ecospec.inference.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
