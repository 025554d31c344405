"""Expert footprints of draft nodes, as the decoding loop asks for them; every kind of source is a folder of
`ecospec.predictor.kinds`.

A footprint says which experts a node is expected to use in each MoE layer. Knows nothing of models and tables.

Letters: B texts, T tokens of a text (root last), N tree nodes (root first), n new tokens of a text, L MoE layers,
E experts, K experts per token.
"""

from typing import Protocol

import torch
from torch import Tensor

from ecospec.inference.tree import DraftTrees


class FootprintSource(Protocol):
    """What the decoding loop asks of a source. One with `needs_hidden = True` gets trees that have `hidden_BNH`."""

    def reset(self, rows: int) -> None:
        """Begin `rows` new texts."""

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor]) -> Tensor:
        """Footprints [B, N, L, E], bool or the probability in 0..1 that a node uses an expert.

        Asked at every step that drafts.

        `texts` int64 [T], roots last, grow from step to step; `routed` [n, L, K]: the target's own experts at the n
        positions before the root that are new since the last call, a text each (-1: none).
        """

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all texts but `rows`."""


class Stateless:
    """The part of a `FootprintSource` that remembers nothing from step to step."""

    def reset(self, rows: int) -> None:
        """Nothing to forget."""

    def keep_rows(self, rows: list[int]) -> None:
        """Nothing to keep."""


def needs_hidden(source: FootprintSource | None) -> bool:
    """Whether a source reads the draft head's hidden input."""
    return getattr(source, "needs_hidden", False)


def as_footprints(experts_XLK: Tensor, num_experts: int) -> Tensor:
    """bool [..., L, E] from expert ids [..., L, K]."""
    shape = (*experts_XLK.shape[:-1], num_experts)
    return torch.zeros(shape, dtype=torch.bool, device=experts_XLK.device).scatter_(-1, experts_XLK, True)


def same_for_all(experts_BLK: Tensor, nodes: int, num_experts: int) -> Tensor:
    """bool [B, N, L, E]: of each text the same experts at all of its nodes; an id of -1 stands for none."""
    experts_BLK = experts_BLK.where(experts_BLK >= 0, num_experts)
    return as_footprints(experts_BLK, num_experts + 1)[:, None, ..., :-1].expand(-1, nodes, -1, -1)
