"""Benchmark: `ecospec-trace stats` on a synthetic trace of 1 million tokens x 94 layers x 8 of 128 experts.

    python tests/benchmarks/stats_speed.py [folder]

Writes the trace into `folder` (a temporary one by default; about 0.5 GB, reused when it is complete), runs the command
as a process, and prints its seconds and peak memory against the limits: 30 s and 1 GiB on 2 cores.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ecospec.data.prompts import split_of
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import MANIFEST, encode_experts, id_dtype
from ecospec.tracing.store.manifest import Header, PromptSource, TracedTarget

SECONDS, MEBIBYTES, WINDOWS = 30.0, 1024, 200_000
L, E, K = 94, 128, 8
DATASETS, SAMPLES, T, BATCH = 7, 2002, 500, 16


def header(samples: int = SAMPLES) -> Header:
    counts = {f"set{n}": len(range(n, samples, DATASETS)) for n in range(DATASETS)}
    return Header(
        target=TracedTarget(name="synthetic", config_sha256="none"),
        engine={"name": "synthetic"},
        moe_layers=list(range(L)),
        num_experts=E,
        top_k=K,
        id_dtype=id_dtype(E).name,
        prompts=[PromptSource(dataset=name, samples=count) for name, count in counts.items()],
    )


def random_row(index: int, generator: np.random.Generator) -> dict:
    """A sample whose low experts are used more often, each token keeping its predecessor's in a third of the layers."""
    draws = generator.random((T, L, K), np.float32) ** 1.5 * (E - K + 1)
    experts = np.sort(draws.astype(np.uint8), -1) + np.arange(K, dtype=np.uint8)
    kept = generator.random((T - 1, L)) < 1 / 3
    experts[1:][kept] = experts[:-1][kept]
    dataset, row = f"set{index % DATASETS}", index // DATASETS
    return {
        "key": f"key{index}",
        "sample_id": f"{dataset}/{row}/0",
        "dataset": dataset,
        "turn": 0,
        "input_ids": np.arange(T, dtype=np.int32),
        "prompt_len": T // 4,
        "experts": encode_experts(experts, E),
        "split": split_of(dataset, row),
    }


def write_trace(path: Path, samples: int = SAMPLES) -> None:
    folder, generator = TraceFolder(path, header(samples)), np.random.default_rng(0)
    for first in range(0, samples, BATCH):
        folder.add([random_row(index, generator) for index in range(first, min(first + BATCH, samples))])
    folder.finalise([f"key{index}" for index in range(samples)])


def measure(traces: Path, output: Path) -> int:
    """1 when a limit is broken. The trace was written by this process: only the command counts as its child."""
    code = "import sys; from ecospec.tracing.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "stats", str(traces), "--output", str(output), "--overwrite"]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    stats = json.loads((output / "stats.json").read_text())
    windows = stats["windows"]["counted"]
    page = (output / "stats.html").stat().st_size / 1024
    print(f"{stats['overall']['tokens']:,} tokens, {windows:,} windows, page of {page:.0f} KiB")
    print(f"{seconds:.1f} s (limit {SECONDS:g}), {peak:.0f} MiB (limit {MEBIBYTES})")
    return int(seconds > SECONDS or peak > MEBIBYTES or windows < WINDOWS)


def main(folder: str | None = None) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        traces = Path(folder or temporary) / "traces"
        if not (traces / MANIFEST).exists():
            write_trace(traces)
        return measure(traces, Path(temporary) / "stats")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
