"""A small trace folder of made-up samples, for whatever writes, reads and checks such folders.

Letters: T tokens, L MoE layers, K experts per token.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.data.prompts import split_of
from ecospec.files import read_json, sha256_file, write_json
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import COLUMNS, encode_experts, id_dtype
from ecospec.tracing.store.manifest import Header, PromptSource, TracedTarget

L, K = 3, 2
KEYS = [f"key{i}" for i in range(6)]


def header(num_experts: int = 8, seed: int = 0, samples: int = 6) -> Header:
    return Header(
        target=TracedTarget(name="tiny", config_sha256="c0ffee"),
        moe_layers=[1, 2, 4],
        num_experts=num_experts,
        top_k=K,
        id_dtype=id_dtype(num_experts).name,
        prompts=[PromptSource(dataset="lab/maths", samples=samples)],
        generation={"seed": seed},
    )


def random_experts(T: int, num_experts: int = 8, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(num_experts)[:K] for _ in range(T * L)]).reshape(T, L, K)


def row(index: int, num_experts: int = 8) -> dict:
    T = 4 + index
    return {
        "key": KEYS[index],
        "sample_id": f"lab/maths/{index}/0",
        "dataset": "lab/maths",
        "turn": 0,
        "input_ids": list(range(T)),
        "prompt_len": 3,
        "experts": encode_experts(random_experts(T, num_experts, seed=index), num_experts),
        "split": split_of("lab/maths", index),
    }


def refused(index: int) -> dict:
    identity = {name: row(index)[name] for name in ("key", "sample_id", "dataset", "turn")}
    return identity | {"reason": "too long"}


def complete_folder(path: Path) -> Path:
    """A complete trace folder of six samples in three parts."""
    opened = TraceFolder(path, header())
    for first in (0, 2, 4):
        opened.add([row(first), row(first + 1)])
        opened.commit()
    opened.finalise(KEYS)
    return path


def rewrite_part(folder: Path, change: Callable[[list[dict]], list[dict] | pa.Table], number: int = 0) -> None:
    """Replace one part by a changed one that the manifest agrees with, as a faulty writer would have left it."""
    manifest = read_json(folder / "manifest.json")
    part = manifest["parts"][number]
    rows = change(pq.read_table(folder / part["file"]).to_pylist())
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, schema=COLUMNS)
    pq.write_table(table, folder / part["file"])
    part["sha256"], part["rows"] = sha256_file(folder / part["file"]), table.num_rows
    manifest["samples"]["written"] = sum(p["rows"] for p in manifest["parts"])
    write_json(folder / "manifest.json", manifest)
