"""Benchmark: writing and reading expert ids as a trace folder does, beside list and array layouts of the same ids.

    python tests/benchmarks/store_speed.py [tokens]

94 layers × 8 of 128 experts, uniform ids (the worst case for compression). Prints MB of ids a second each way and bytes
a token; the folder's own layout must beat both others in all three.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.data.traces import read_traces
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import encode_experts
from tests.benchmarks.stats_speed import header

L, E, K, T = 94, 128, 8, 500


def random_ids(tokens: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        np.sort(generator.random((T, L, E), np.float32).argpartition(K, -1)[..., :K].astype(np.uint8), -1)
        for _ in range(tokens // T)
    ]


def write_folder(path: Path, samples: list[np.ndarray]) -> None:
    folder = TraceFolder(path, header() | {"prompts": [{"dataset": "d", "samples": len(samples)}]})
    for row, experts in enumerate(samples):
        ids = {"input_ids": np.arange(T, dtype=np.int32), "prompt_len": 1, "split": "train"}
        name = {"key": f"key{row}", "sample_id": f"d/{row}/0", "dataset": "d", "turn": 0}
        folder.add([name | ids | {"experts": encode_experts(experts, E)}])
    folder.finalise([f"key{row}" for row in range(len(samples))])


def read_folder(path: Path) -> list[np.ndarray]:
    return [trace.experts for trace in read_traces(path)]


def write_lists(path: Path, samples: list[np.ndarray]) -> None:
    """A list of fixed-size lists of L·K ids a sample."""
    path.mkdir()
    rows = [pa.FixedSizeListArray.from_arrays(pa.array(experts.ravel()), L * K) for experts in samples]
    column = pa.ListArray.from_arrays(pa.array(np.arange(len(rows) + 1) * T, pa.int32()), pa.concat_arrays(rows))
    pq.write_table(pa.table({"experts": column}), path / "0.parquet", compression="zstd", use_dictionary=False)


def read_lists(path: Path) -> list[np.ndarray]:
    column = pq.read_table(path / "0.parquet")["experts"].combine_chunks()
    return list(column.flatten().flatten().to_numpy().reshape(-1, T, L, K))


def write_arrays(path: Path, samples: list[np.ndarray]) -> None:
    """The `datasets` library's own array type, with its own settings of Parquet."""
    path.mkdir()
    features = datasets.Features({"experts": datasets.Array3D((None, L, K), "uint8")})
    rows = datasets.Dataset.from_dict({"experts": samples}, features=features)
    rows.to_parquet(path / "0.parquet")


def read_arrays(path: Path) -> list[np.ndarray]:
    cache = str(path / "cache")
    rows = datasets.load_dataset("parquet", data_files=str(path / "0.parquet"), split="train", cache_dir=cache)
    return [np.asarray(row["experts"], np.uint8) for row in rows.with_format("numpy")]


LAYOUTS = {
    "trace folder": (write_folder, read_folder),
    "lists": (write_lists, read_lists),
    "Array3D of datasets": (write_arrays, read_arrays),
}


def measure(write: Callable, read: Callable, path: Path, samples: list[np.ndarray]) -> tuple[float, float, float]:
    """MB of ids a second written and read, and bytes a token on disk."""
    began = time.perf_counter()
    write(path, samples)
    written = time.perf_counter()
    size = sum(file.stat().st_size for file in path.glob("*.parquet"))
    found = read(path)
    done = time.perf_counter()
    assert all(np.array_equal(one, other) for one, other in zip(found, samples, strict=True))
    megabytes = sum(experts.nbytes for experts in samples) / 1e6
    return megabytes / (written - began), megabytes / (done - written), size / (len(samples) * T)


def main(tokens: str = "20000") -> int:
    samples = random_ids(int(tokens))
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as temporary:
        found = {
            name: measure(*functions, Path(temporary) / str(place), samples)
            for place, (name, functions) in enumerate(LAYOUTS.items())
        }
    for name, (write, read, size) in found.items():
        print(f"{name:<20} write {write:7.1f} MB/s  read {read:7.1f} MB/s  {size:6.0f} bytes a token")
    ours, *others = found.values()
    return int(any(ours[0] < write or ours[1] < read or ours[2] > size for write, read, size in others))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
