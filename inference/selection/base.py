"""What the decoding loop, and replay, ask of whatever chooses the drafts to verify.

Letters: B texts, N tree nodes (root included), L MoE layers, E experts, K experts per token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ecospec.errors import InputError
from ecospec.inference.tree import DraftTrees


class Selector:
    """Chooses which nodes of draft trees are verified; lives along texts, from `reset` on.

    `needs_footprints`: `choose` is given the experts of the nodes. `drafts`: it ever asks for drafts. `learns`:
    `choose` or `wants_drafts` depend on earlier steps, so that replay goes through a text step by step.
    """

    needs_footprints = False
    drafts = True
    learns = False

    def reset(self, rows: int, seed: int = 0) -> None:
        """Forget everything: `rows` new texts begin.

        `seed` is of the selector's own draws, which must not touch those of sampling. What is to be known beforehand is
        given to the constructor: only then is a text the same alone, among others and in replay.
        """

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all texts but `rows`."""

    def wants_drafts(self) -> bool:
        """Whether the next step drafts at all; where it does not, the roots alone are verified."""
        return True

    def choose(
        self, trees: DraftTrees, footprints_BNLE: Tensor | None = None, covered_BLE: Tensor | None = None
    ) -> Tensor:
        """The nodes to verify, bool [B, N]: every real root, and with a node its parent.

        `footprints_BNLE`: bool, or float probabilities, that a node uses an expert; None where none are needed.
        `covered_BLE`: the same for experts that cost nothing, whatever is chosen. Raises InputError without footprints
        that are needed.
        """
        raise NotImplementedError

    def most(self, trees: DraftTrees) -> int | None:
        """The most nodes chosen of any of these trees, where that is known without reading the device."""
        return None

    def observe(self, trees: DraftTrees, experts_BNLK: Tensor, kept: Sequence[Sequence[int]]) -> Mapping[str, object]:
        """Learn from a step: the verified `trees`, their true experts (-1: none), and each text's accepted nodes.

        Returns what the selector measured of it, by the keys of its metrics. Prefill is not shown: tree files lack it.
        """
        return {}

    def describe(self) -> dict:
        """What results say of it: `selection` and `gamma`, `epsilon` where it has one; whatever else in `options`."""
        raise NotImplementedError


class WholePool(Selector):
    """Chooses every node: how trees are recorded."""

    def choose(
        self, trees: DraftTrees, footprints_BNLE: Tensor | None = None, covered_BLE: Tensor | None = None
    ) -> Tensor:
        """See `Selector`."""
        return trees.real_BN

    def most(self, trees: DraftTrees) -> int:
        """See `Selector`."""
        return trees.width


def new_pairs(own_XP: Tensor, covered_XP: Tensor) -> Tensor:
    """How many pairs of `own` [..., P] are not `covered`: a count for bool, the expected count for probabilities."""
    if own_XP.dtype == torch.bool:
        return (own_XP & ~covered_XP).sum(-1)
    return (own_XP * (1 - covered_XP.to(own_XP))).sum(-1)


def either(one: Tensor, other: Tensor) -> Tensor:
    """Pairs in one or the other; of probabilities that of at least one, as if they were independent."""
    if one.dtype == other.dtype == torch.bool:
        return one | other
    return 1 - (1 - one.float()) * (1 - other.float())


def any_of(own_XMP: Tensor, chosen_XM: Tensor) -> Tensor:
    """Pairs [..., P] in any chosen node, as `either`."""
    if own_XMP.dtype == torch.bool:
        return (own_XMP & chosen_XM[..., None]).any(-2)
    return 1 - (1 - own_XMP * chosen_XM[..., None]).prod(-2)


def footprints_missing(policy: str) -> InputError:
    """The error of a selector that is given no footprints."""
    return InputError(f"--selection.policy {policy}: needs footprints; give a predictor or --footprints")
