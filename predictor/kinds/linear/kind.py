"""The kind's object; see `ecospec.predictor.kinds.base`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ecospec.predictor.kinds.trained import TrainedKind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.predictor.kinds.linear.model import LinearPredictor
    from ecospec.predictor.kinds.routing import TargetIdentity


class LinearKind(TrainedKind):
    """One matrix on the token's embedding."""

    order = 2
    model_type = "ecospec_linear_predictor"

    @property
    def model_class(self) -> "type[LinearPredictor]":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.linear.model import LinearPredictor

        return LinearPredictor

    def source(self, loaded: "LinearPredictor") -> "FootprintSource":
        """See `Kind`."""
        from ecospec.predictor.kinds.linear.source import LinearFootprints

        return LinearFootprints(loaded)

    def new(self, config: Any, identity: "TargetIdentity", traces: "Traces") -> "tuple[LinearPredictor, Traces]":
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.linear.model import LinearConfig, LinearPredictor

        return LinearPredictor(LinearConfig(**identity.fields)).attach_embedding(identity.table_VD), traces

    def step(self, model: "LinearPredictor", context: int, nodes: int) -> Callable[[], object]:
        """See `TrainedKind`."""
        from ecospec.predictor.kinds.routing import step_tokens

        ids_1N = step_tokens(model, nodes)
        return lambda: model(ids_1N).cpu()


KIND = LinearKind()
