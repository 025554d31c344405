"""Where footprints come from: a kind is a folder here, with one object `KIND` in its `kind.py`; no list names them.

Loads no torch. Knows nothing of training loops and of the decoding loop.
"""

from typing import TYPE_CHECKING, Literal

from ecospec.discovery import kinds_in, named
from ecospec.predictor.kinds.base import Kind
from ecospec.predictor.kinds.trained import TrainedKind


def all_kinds() -> tuple[Kind, ...]:
    """Every kind, in the order of lists and files."""
    return kinds_in(__name__)


def trained_kinds() -> tuple[TrainedKind, ...]:
    """Those that `ecospec-train predictor` trains."""
    return tuple(kind for kind in all_kinds() if isinstance(kind, TrainedKind))


def kind_named(name: str) -> Kind:
    """The kind of this name. Raises InputError when there is none."""
    return named(all_kinds(), name, "selection.footprints")


def trained_kind(name: str) -> TrainedKind:
    """The trained kind of this name. Raises InputError when there is none."""
    return named(trained_kinds(), name, "kind")


def yardstick() -> Kind:
    """The best of the kinds that need no training, which a learning curve is held against."""
    return next(kind for kind in all_kinds() if kind.yardstick)


if TYPE_CHECKING:
    KindName = TrainedKindName = str
else:  # as literals, so that `--help` lists the names and other ones are refused
    KindName = Literal[tuple(kind.name for kind in all_kinds())]
    TrainedKindName = Literal[tuple(kind.name for kind in trained_kinds())]
