"""The kind's object; see `ecospec.predictor.kinds.base`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ecospec.predictor.kinds.predictor.config import TrainingKeys
from ecospec.predictor.kinds.trained import TrainedKind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.predictor.kinds.predictor.model import ExpertPredictor
    from ecospec.predictor.kinds.routing import TargetIdentity


class PredictorKind(TrainedKind):
    """A small decoder with a cache of its own."""

    order = 1
    model_type = "ecospec_expert_predictor"
    training_keys = TrainingKeys

    @property
    def column(self) -> str:
        """See `Kind`; the name that tree files have had from the start."""
        return "experts_pred"

    @property
    def model_class(self) -> "type[ExpertPredictor]":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.predictor.model import ExpertPredictor

        return ExpertPredictor

    def source(self, loaded: "ExpertPredictor") -> "FootprintSource":
        """See `Kind`."""
        from ecospec.predictor.kinds.predictor.source import PredictorFootprints

        return PredictorFootprints(loaded)

    def new(
        self, config: TrainingKeys, identity: "TargetIdentity", traces: "Traces"
    ) -> "tuple[ExpertPredictor, Traces]":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.predictor.fresh import new_predictor

        return new_predictor(config, identity), traces

    def step(self, model: "ExpertPredictor", context: int, nodes: int) -> Callable[[], object]:
        """See `TrainedKind`: `nodes` new tokens after a cached context."""
        from ecospec.predictor.kinds.predictor.source import predictor_step

        return predictor_step(model, context, nodes)


KIND = PredictorKind()
