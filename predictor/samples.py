"""Samples in memory: some of a trace folder's, or the same with more beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ecospec.data.traces import Trace, Traces
from ecospec.tracing.store.manifest import Manifest


@dataclass(frozen=True)
class Samples(Sequence[Trace]):
    """`Traces` in memory, with the shape and the manifest of the trace folder they come from."""

    items: list[Trace]
    num_layers: int
    num_experts: int
    top_k: int
    manifest: Manifest

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Trace:
        return self.items[index]


def subset(traces: Traces, items: list[Trace]) -> Samples:
    """These items as samples of `traces`."""
    return Samples(items, traces.num_layers, traces.num_experts, traces.top_k, traces.manifest)
