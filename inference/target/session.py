"""The one seam between decoding and whatever runs the target: passes over texts and trees, and what is kept of them.

A session holds B texts. `prefill` reads them, `verify` reads a tree below each, `keep` says which of the tree's nodes
have become text. An engine is one class of this interface; the loop above knows no model, cache, mask or hook.

Letters: B texts, T tokens of the longest text, N nodes of the widest tree (root first), V vocabulary, L MoE layers,
K experts per token, F width of the features.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.tree import DraftTrees


@dataclass(frozen=True)
class Pass:
    """What one pass of the target told.

    `logits_BNV`: after each node, of a prefill [B, 1, V] after each text; `experts_BNLK`: ids that the routers chose
    (-1: an expert without weights), of a prefill [B, T, L, K]; `features_BNF`: the hidden states asked for, or None.
    """

    logits_BNV: Tensor
    experts_BNLK: Tensor
    features_BNF: Tensor | None


class TargetSession(ABC):
    """A context manager: between entry and exit it decodes one batch of texts."""

    device: torch.device

    @abstractmethod
    def __enter__(self) -> "TargetSession": ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    @abstractmethod
    def prefill(self, texts: list[Tensor]) -> Pass:
        """Read whole texts, ids [T] each; the session is empty before."""

    @abstractmethod
    def verify(self, trees: DraftTrees) -> Pass:
        """Read the trees' nodes; those of padding may hold anything. `keep` follows."""

    @abstractmethod
    def keep(self, paths: list[list[int]]) -> None:
        """Of the nodes read last keep the listed ones of each text, a path from its root, and drop the others."""

    @abstractmethod
    def keep_rows(self, rows: list[int]) -> None:
        """Drop all texts but `rows`."""
