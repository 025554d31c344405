"""Speculative decoding of MoE targets: draft trees, selection, verification, evaluation.

The names below are imported when first used, so that `--help` does not wait for PyTorch.
"""

from ecospec.lazy import attributes

_HOMES = {
    "CustomGenerate": "decoding.generation",
    "DraftTree": "tree",
    "DrafterConfig": "config",
    "EcoSpecDecoder": "api",
    "Method": "decoding.method",
    "generate": "api",
    "select": "selection.rule",
    "selector": "selection.config",
}
__all__ = sorted(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
