"""Speculative decoding of MoE targets: draft trees, selection, verification, evaluation.

The names below are imported when first used, so that `--help` does not wait for PyTorch.
"""

from typing import TYPE_CHECKING

from ecospec.lazy import offered

if TYPE_CHECKING:
    from ecospec.inference.api import EcoSpecDecoder as EcoSpecDecoder
    from ecospec.inference.api import generate as generate
    from ecospec.inference.config import DrafterConfig as DrafterConfig
    from ecospec.inference.decoding.generation import CustomGenerate as CustomGenerate
    from ecospec.inference.decoding.method import Method as Method
    from ecospec.inference.selection.config import selector as selector
    from ecospec.inference.selection.rule import select as select
    from ecospec.inference.tree import DraftTree as DraftTree
else:
    __all__, __getattr__ = offered(__name__)
