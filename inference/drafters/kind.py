"""What a drafter kind is: one folder of `ecospec.inference.drafters`, whose `kind.py` has one object `KIND`.

The folder's name is the kind's name, in `--drafter.kind` and in results. Importing a `kind.py` loads no torch: methods
import what they need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ecospec.discovery import Found, kinds_in, named
from ecospec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ecospec.configs.schema import TargetConfig
    from ecospec.inference.config import DrafterConfig
    from ecospec.inference.drafters.base import BatchDrafter, DraftHead
    from ecospec.tracing.target.loading import Target


@dataclass
class Keys:  # a dataclass itself: the parser takes a class with any other base for a type to choose subclasses of
    """The end of the chain of checks: keys of all kinds are bases of one configuration."""

    def __post_init__(self) -> None:
        """Nothing left to check."""


@dataclass
class TreeKeys(Keys):
    """Keys of the kinds that grow a tree level by level."""

    steps: int = 3
    """Forward steps of the drafter per tree, which is the tree's depth."""
    topk: int = 2
    """Children of a node, and nodes of a level that are expanded."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        for name, most in (("steps", 64), ("topk", 256)):
            if not 1 <= getattr(self, name) <= most:
                raise InputError(f"must be 1 to {most}", key=f"drafter.{name}", value=getattr(self, name))
        super().__post_init__()


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


class DrafterKind(Found):
    """Is inspected (`ecospec-decode check`), loaded, and turned into drafters for the loop.

    `keys`: the dataclass of the keys of `drafter` that it reads beside `kind`, and `path` where it `reads_path`; all
    kinds' are bases of the configuration. `ships_with_lab`: the lab has one, which is taken where the lab is the target
    and no path is given. `has_hidden`: the target feeds its head hidden states, which
    footprints may read too. The first in order is the default.
    """

    keys: ClassVar[type] = TreeKeys
    reads_path: ClassVar[bool] = True
    ships_with_lab: ClassVar[bool] = False
    has_hidden: ClassVar[bool] = False

    @property
    def read_keys(self) -> frozenset[str]:
        """The names of the keys of `drafter` that it reads."""
        own = {"kind", *(key.name for key in fields(self.keys))}
        return frozenset(own | {"path"} if self.reads_path else own)

    def complete(self, config: "DrafterConfig", target: str) -> "DrafterConfig":
        """`config` with the defaults for the target of that name. Raises InputError for keys it does not read."""
        for key in fields(config):
            value = getattr(config, key.name)
            if key.name not in self.read_keys and value != key.default:
                raise InputError(f"{self.name} does not read it; leave it out", key=f"drafter.{key.name}", value=value)
        if self.ships_with_lab and config.path is None and target == "lab":
            return replace(config, path="lab")
        return config

    def shape(self, config: "DrafterConfig") -> TreeShape:
        """The shape of the trees that a drafter of this configuration grows."""
        return TreeShape(config.steps, {"steps": config.steps, "topk": config.topk})

    def inspect(self, config: "DrafterConfig", target: "TargetConfig", model_config: "PreTrainedConfig") -> Facts:
        """What is known from configurations and headers alone. Raises InputError when it does not fit the target."""
        raise NotImplementedError

    def check(self, config: "DrafterConfig", facts: Facts) -> None:
        """Raise InputError when a drafter of which this is known cannot grow such trees."""
        if facts.vocabulary is not None and config.topk > facts.vocabulary:
            raise InputError(f"the head has only {facts.vocabulary} tokens", key="drafter.topk", value=config.topk)

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
    return named(drafter_kinds(), name, "drafter.kind")


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
