"""Kinds that are models of routing, trained by `ecospec-train predictor` and kept in an exported folder.

Letters: B batch, N tree nodes, L MoE layers, E experts per layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ecospec.predictor.kinds.base import FootprintOptions, Kind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.predictor.kinds.routing import RoutingModel, TargetIdentity
    from ecospec.tracing.target.loading import MoeShape, Target


@dataclass
class NoKeys:
    """A kind without keys of its own."""


class TrainedKind(Kind):
    """A model in an exported folder. `model_type` is what its `config.json` says.

    `training_keys`: the dataclass of the keys of `ecospec-train predictor` that only this kind reads, joined to that
    subcommand's; `evaluation_keys`: those that `ecospec-train evaluate` needs to measure it. `made_for`: fields of the
    model's configuration that a resumed training must share, and what to say where they differ.
    """

    trained = True
    model_type: ClassVar[str]
    training_keys: ClassVar[type] = NoKeys
    evaluation_keys: ClassVar[type] = NoKeys
    made_for: ClassVar[Mapping[str, str]] = {}

    @property
    def own_keys(self) -> frozenset[str]:
        """The names of the `training_keys`."""
        return frozenset(key.name for key in fields(self.training_keys))

    @property
    def model_class(self) -> "type[RoutingModel]":
        """The class whose `from_pretrained` reads such a folder."""
        raise NotImplementedError

    def folder(self, path: str | None) -> Path:
        """See `Kind`."""
        from ecospec.tracing.target.names import part_folder

        return part_folder(path, self.name)

    def inspect(self, options: FootprintOptions, shape: "MoeShape", config_sha256: str, hidden: int | None) -> str:
        """See `Kind`."""
        from ecospec.predictor.kinds.loading import count_weights, predictor_values, require_target

        folder = self.folder(options.path)
        values = predictor_values(folder, self.name)
        require_target(options.path, values, shape, config_sha256)
        self.check_width(options.path, values, hidden)
        return f"{folder}, {count_weights(folder) / 1e6:.2f} M weights, trained for {values.get('target')}"

    def check_width(self, path: str | None, values: dict, hidden: int | None) -> None:
        """Raise InputError where a model with this `config.json` reads no draft head whose hidden input is so wide."""

    def load(self, options: FootprintOptions, target: "Target") -> "RoutingModel":
        """See `Kind`."""
        from ecospec.predictor.kinds.loading import load_for_target

        return load_for_target(self.folder(options.path), self.name, target)

    def new(self, config: Any, identity: "TargetIdentity", traces: "Traces") -> "tuple[RoutingModel, Traces]":
        """A fresh model, on the target's embeddings, and `traces` with whatever it learns from beside them.

        `config` has `training_keys` and `target`. Raises InputError for keys that do not fit together.
        """
        raise NotImplementedError

    def samples_for(self, config: Any, traces: "Traces", model: "RoutingModel") -> "Traces":
        """`traces` with whatever `model` reads beside their tokens; `config` has `evaluation_keys` and `target`.

        Raises InputError when the model was made for something else than the keys name.
        """
        return traces

    def step(self, model: "RoutingModel", context: int, nodes: int) -> Callable[[], object]:
        """What predicts one step's draft tree of `nodes` after `context` tokens, to be timed."""
        raise NotImplementedError
