"""What a drafter kind is: one folder of `ecospec.inference.drafters`, whose `kind.py` has one object `KIND`.

The folder's name is the kind's name, in `--drafter.kind` and in results. Importing a `kind.py` loads no torch: methods
import what they need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ecospec.discovery import kinds_in
from ecospec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.base import BatchDrafter, DraftHead
    from ecospec.tracing.target.loading import Target

OWN_KEYS = ("path", "feature_layers", "rope_theta")  # of `drafter`, read by some kinds only


@dataclass(frozen=True)
class Facts:
    """What is known of a drafter without its weights.

    `value`: one line for `ecospec-decode check`; `vocabulary`: how many tokens it can draft; `hidden`: width of the
    hidden input of its head; both None where it has none. `notes`: what its user should know.
    """

    value: str
    vocabulary: int | None = None
    hidden: int | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class TreeShape:
    """The shape of a drafter's trees: no node is deeper than `depth`; `described` is what results say of it."""

    depth: int
    described: dict[str, int]


class DrafterKind:
    """Is inspected (`ecospec-decode check`), loaded, and turned into drafters for the loop.

    `reads`: the keys of `drafter`, of `OWN_KEYS`, that it reads. `ships_with_lab`: the lab has one, which is taken
    where the lab is the target and no path is given. `has_hidden`: the target feeds its head hidden states, which
    footprints may read too. `order`: its place in lists, the smallest first; the first is the default.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    ships_with_lab: ClassVar[bool] = False
    has_hidden: ClassVar[bool] = False
    order: ClassVar[int] = 100

    @property
    def name(self) -> str:
        """The name of its folder."""
        return type(self).__module__.split(".")[-2]

    def complete(self, config: "DrafterConfig", target: str) -> "DrafterConfig":
        """`config` with the defaults for the target of that name. Raises InputError for keys it does not read."""
        for key in OWN_KEYS:
            if key not in self.reads and getattr(config, key) is not None:
                raise InputError(f"--drafter.{key} {getattr(config, key)}: {self.name} does not read it; leave it out")
        if self.ships_with_lab and config.path is None and target == "lab":
            return replace(config, path="lab")
        return config

    def shape(self, config: "DrafterConfig") -> TreeShape:
        """The shape of the trees that a drafter of this configuration grows."""
        return TreeShape(config.steps, {"steps": config.steps, "topk": config.topk})

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """What is known from configurations and headers alone. Raises InputError when it does not fit the target."""
        raise NotImplementedError

    def learnt_from(self, config: "DrafterConfig") -> Path | None:
        """The folder whose `provenance.json` says what it was trained on, where there is one."""
        return None

    def load_head(self, config: "DrafterConfig", target: "Target") -> "DraftHead | None":
        """What drafters of one configuration share, whatever their trees; None where that is nothing.

        Raises InputError when it does not fit the target.
        """
        return None

    def drafter(self, head: Any, config: "DrafterConfig") -> "BatchDrafter":
        """A drafter of its own on what `load_head` returned."""
        from ecospec.inference.drafters.growth import TreeDrafter

        return TreeDrafter(head, config.steps, config.topk)


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Every kind, the default first."""
    return kinds_in("ecospec.inference.drafters")


def drafter_kind(name: str) -> DrafterKind:
    """The kind of this name. Raises InputError when there is none."""
    for kind in drafter_kinds():
        if kind.name == name:
            return kind
    raise InputError(f"--drafter.kind {name}: is none of {', '.join(kind.name for kind in drafter_kinds())}")


def no_hidden() -> InputError:
    """The error of footprints that read a draft head's hidden input, beside a drafter without one."""
    able = " or ".join(kind.name for kind in drafter_kinds() if kind.has_hidden)
    return InputError(
        "--selection.footprints: these read what the target feeds a draft head, and this drafter is fed nothing; "
        f"draft with {able}, or take other footprints"
    )


if TYPE_CHECKING:
    DrafterName = str
else:  # as a literal, so that `--help` lists the names and other ones are refused
    DrafterName = Literal[tuple(kind.name for kind in drafter_kinds())]
