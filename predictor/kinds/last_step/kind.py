"""The kind's object; see `ecospec.predictor.kinds.base`."""

from typing import TYPE_CHECKING

from ecospec.predictor.kinds.base import Baseline, FootprintOptions, Kind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.tracing.target.loading import MoeShape, Target


class LastStepKind(Kind):
    """Every node is expected to use the experts of the token before the root; `load` gives their number."""

    order = 4

    def inspect(self, options: FootprintOptions, shape: "MoeShape", config_sha256: str, hidden: int | None) -> str:
        """See `Kind`."""
        return f"{self.name}, the experts of the token before the root"

    def load(self, options: FootprintOptions, target: "Target") -> int:
        """See `Kind`."""
        return target.shape.num_experts

    def source(self, loaded: int) -> "FootprintSource":
        """See `Kind`."""
        from ecospec.predictor.kinds.last_step.source import LastStepFootprints

        return LastStepFootprints(loaded)

    def replay_source(self, traces: "Traces | None", num_experts: int, vocab_size: int) -> "FootprintSource":
        """See `Kind`."""
        return self.source(num_experts)

    def baseline(self, traces: "Traces", vocab_size: int, nodes: int) -> Baseline:
        """See `Kind`."""
        from ecospec.predictor.kinds.last_step.source import last_step_baseline

        return last_step_baseline(traces, nodes)


KIND = LastStepKind()
