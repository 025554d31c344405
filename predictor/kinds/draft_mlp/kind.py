"""The kind's object; see `ecospec.predictor.kinds.base`."""

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from ecospec.errors import InputError
from ecospec.predictor.kinds.draft_mlp.config import EvaluationKeys, TrainingKeys
from ecospec.predictor.kinds.trained import TrainedKind

if TYPE_CHECKING:
    from torch import nn

    from ecospec.data.traces import Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.predictor.kinds.base import FootprintOptions
    from ecospec.predictor.kinds.draft_mlp.model import DraftMLP
    from ecospec.predictor.kinds.routing import TargetIdentity
    from ecospec.tracing.target.loading import MoeShape


class DraftMLPKind(TrainedKind):
    """Reads a node's token, and the hidden input of the draft head at that node."""

    order = 3
    model_type = "ecospec_draft_mlp"
    training_keys = TrainingKeys
    evaluation_keys = EvaluationKeys
    made_for = MappingProxyType({"drafter_fingerprint": "--drafter.path: that draft head has changed"})

    @property
    def model_class(self) -> "type[DraftMLP]":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.draft_mlp.model import DraftMLP

        return DraftMLP

    def inspect(self, options: "FootprintOptions", shape: "MoeShape", config_sha256: str, hidden: int | None) -> str:
        """See `Kind`."""
        return f"{super().inspect(options, shape, config_sha256, hidden)}, fed the drafter's hidden {hidden}"

    def check_width(self, path: str | None, values: dict, hidden: int | None) -> None:
        """See `TrainedKind`."""
        from ecospec.inference.drafters.kind import no_hidden

        if hidden is None:
            raise no_hidden()
        if values.get("draft_size") != hidden:
            raise InputError(
                f"--predictor.path {path}: reads {values.get('draft_size')} hidden values of a draft head, "
                f"this drafter has {hidden}; take the one that was trained on it"
            )

    def check_head(self, loaded: "DraftMLP", head: "nn.Module | None", depth: int) -> None:
        """See `Kind`."""
        if head is not None:  # a drafter without one refuses by itself to give a hidden input
            loaded.require_head(head, depth)

    def source(self, loaded: "DraftMLP") -> "FootprintSource":
        """See `Kind`."""
        from ecospec.predictor.kinds.draft_mlp.source import DraftMLPFootprints

        return DraftMLPFootprints(loaded)

    def new(self, config: TrainingKeys, identity: "TargetIdentity", traces: "Traces") -> "tuple[DraftMLP, Traces]":
        """See `TrainedKind`. Raises InputError also for a draft head that cannot be rolled out."""
        from ecospec.predictor.kinds.draft_mlp.fresh import new_draft_mlp

        return new_draft_mlp(config, identity, traces)

    def samples_for(self, config: EvaluationKeys, traces: "Traces", model: "DraftMLP") -> "Traces":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.draft_mlp.fresh import samples_for

        return samples_for(config, traces, model)

    def step(self, model: "DraftMLP", context: int, nodes: int) -> Callable[[], object]:
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.routing import step_tokens

        ids_1N = step_tokens(model, nodes)
        head_inputs_1NF = ids_1N.new_zeros(1, nodes, model.config.draft_size, dtype=model.dtype)
        return lambda: model(ids_1N, head_inputs_1NF).cpu()


KIND = DraftMLPKind()
