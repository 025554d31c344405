"""Benchmark: expert ids read from a trace folder and put into batches, at 94 layers × 8 of 128 experts.

    python -m tests.benchmarks.loader_speed [tokens] [folder]

Writes the trace into `folder` (a temporary one by default; reused when it is complete). Prints MB of ids a second for
reading, for an epoch of batches of 16 samples, and for both one after the other, which must reach 100; and the peak
memory of the process beside the bytes of the ids, which it holds once, as narrow as they are stored.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

from ecospec.data.module import BatchLimits, TraceDataModule
from ecospec.data.traces import read_traces
from ecospec.tracing.store.layout import MANIFEST
from tests.benchmarks.stats_speed import T, write_trace

LIMIT = 100.0  # MB of ids a second


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(traces: Path) -> float:
    """MB of ids a second, reading and batching together."""
    before, began = peak_mb(), time.perf_counter()
    items = list(read_traces(traces))
    read = time.perf_counter()
    seen = sum(int(batch.lengths.sum()) for batch in TraceDataModule(items, [], BatchLimits(16)).train_dataloader())
    done = time.perf_counter()
    megabytes = sum(item.experts.nbytes for item in items) / 1e6
    print(f"{seen:,} tokens, {megabytes:,.0f} MB of ids; peak {peak_mb() - before:,.0f} MB more than before")
    print(f"reading {megabytes / (read - began):,.0f} MB/s, batches {megabytes / (done - read):,.0f} MB/s", end=", ")
    return megabytes / (done - began)


def main(tokens: str = "5000000", folder: str | None = None) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        traces = Path(folder or temporary) / "traces"
        if not (traces / MANIFEST).exists():
            write_trace(traces, int(tokens) // T)
        rate = measure(traces)
    print(f"both {rate:,.0f} MB/s (limit {LIMIT:g})")
    return int(rate < LIMIT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
