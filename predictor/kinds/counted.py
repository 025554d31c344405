"""Kinds that are tables counted from the `train` samples of traces: a node's token alone says its experts."""

from abc import abstractmethod
from typing import TYPE_CHECKING

from ecospec.predictor.kinds.base import Baseline, FootprintOptions, Kind

if TYPE_CHECKING:
    from ecospec.data.traces import Traces
    from ecospec.inference.footprints import FootprintSource
    from ecospec.predictor.kinds.counting import ExpertTable
    from ecospec.tracing.target.loading import MoeShape, Target


class CountedKind(Kind):
    """A table; a kind says how it is counted."""

    counted = True

    @abstractmethod
    def count(self, traces: "Traces", vocab_size: int) -> "ExpertTable":
        """Count over the `train` samples. Raises InputError when there are none, or for ids beyond `vocab_size`."""

    def inspect(self, options: FootprintOptions, shape: "MoeShape", config_sha256: str, hidden: int | None) -> str:
        """See `Kind`."""
        from ecospec.predictor.kinds.counting import open_traces

        return f"{self.name}, counted from {open_traces(options.traces, shape.counts, config_sha256).folder}"

    def load(self, options: FootprintOptions, target: "Target") -> "ExpertTable":
        """See `Kind`."""
        from ecospec.predictor.kinds.counting import open_traces

        traces = open_traces(options.traces, target.shape.counts, target.config_sha256)
        return self.count(traces, target.shape.vocab_size)

    def source(self, loaded: "ExpertTable") -> "FootprintSource":
        """See `Kind`."""
        from ecospec.predictor.kinds.counting import TableFootprints

        return TableFootprints(loaded)

    def replay_source(self, traces: "Traces | None", num_experts: int, vocab_size: int) -> "FootprintSource | None":
        """See `Kind`."""
        return None if traces is None else self.source(self.count(traces, vocab_size))

    def baseline(self, traces: "Traces", vocab_size: int, nodes: int) -> Baseline:
        """See `Kind`."""
        from ecospec.predictor.kinds.counting import table_baseline

        return table_baseline(self.count(traces, vocab_size), nodes)
