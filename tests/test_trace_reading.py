"""Whatever reads a trace folder, by our code or not, finds the ids that were written."""

from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from ecospec.data.traces import Trace, read_traces
from ecospec.files import read_json
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.store.export import export_tokens
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import COLUMNS
from tests.trace_folders import KEYS, complete_folder, header, rewrite_part, row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return complete_folder(tmp_path / "traces")


def test_the_exported_table_has_a_row_a_token_with_its_own_ids(folder: Path, tmp_path: Path) -> None:
    tokens = sum(4 + index for index in range(6))
    assert export_tokens(folder, tmp_path / "sql") == tokens
    rows = pq.read_table(tmp_path / "sql" / "tokens.parquet").to_pylist()
    assert len(rows) == tokens
    traces = {trace.sample_id: trace for trace in read_traces(folder)}
    for found in rows:
        trace, position = traces[found["sample_id"]], found["position"]
        assert found["token_id"] == trace.input_ids[position]
        assert found["is_prompt"] == (position < 3)
        assert (found["dataset"], found["split"]) == (trace.dataset, trace.split)
        ids = [found[f"experts_layer_{layer}"] for layer in (1, 2, 4)]
        assert np.array_equal(ids, trace.experts[position])


def test_the_datasets_library_reads_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    parts = sorted(map(str, folder.glob("part-*")))
    loaded = datasets.load_dataset("parquet", data_files=parts, split="train", cache_dir=str(tmp_path / "cache"))
    assert {found["key"]: found["experts"] for found in loaded} == {row(i)["key"]: row(i)["experts"] for i in range(6)}


@pytest.mark.parametrize("split", [None, "train", "test"])
def test_datasets_and_a_loader_give_the_samples_of_read_traces(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str | None
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    traces = read_traces(folder, split)
    expected = {trace.key: trace.experts.tolist() for trace in traces}
    assert {row["key"]: row["experts"].tolist() for row in traces.to_datasets()} == expected
    loader = DataLoader(traces, batch_size=2, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    assert {trace.key: trace.experts.tolist() for batch in loader for trace in batch} == expected


def test_duckdb_reads_the_ids_by_the_manifest_alone(folder: Path) -> None:
    manifest = read_json(folder / "manifest.json")
    shape = {"T": -1, "L": len(manifest["moe_layers"]), "K": manifest["top_k"]}
    paths = [str(folder / part["file"]) for part in manifest["parts"]]
    found = duckdb.sql(f"SELECT key, experts FROM read_parquet({paths})").fetchall()
    dtype = np.dtype(manifest["id_dtype"]).newbyteorder(manifest["byte_order"])
    axes = [shape[letter] for letter in manifest["layout"].split(",")]
    ids = {key: np.frombuffer(value, dtype).reshape(axes).tolist() for key, value in found}
    assert ids == {trace.key: trace.experts.tolist() for trace in read_traces(folder)}


def test_a_slice_is_the_samples_of_its_places(folder: Path) -> None:
    traces = read_traces(folder)
    assert [trace.key for trace in traces[1:5:2]] == [traces[1].key, traces[3].key]


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A trace folder of two parts: one from before rows had a `source_id`, one in which a row has it."""
    opened = TraceFolder(tmp_path, header(samples=3))
    opened.add([row(0)])
    opened.commit()
    opened.add([row(1) | {"source_id": "mine/1"}, row(2)])
    opened.finalise(KEYS[:3])
    old = [part["rows"] for part in read_json(tmp_path / "manifest.json")["parts"]].index(1)
    rewrite_part(tmp_path, lambda rows: pa.Table.from_pylist(rows, COLUMNS).drop_columns("source_id"), old)
    return tmp_path


def test_a_row_s_own_id_comes_back_and_its_column_may_be_absent(
    named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(named)
    expected = {KEYS[0]: None, KEYS[1]: "mine/1", KEYS[2]: None}
    assert {trace.key: trace.source_id for trace in read_traces(named)} == expected
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert {found["key"]: found["source_id"] for found in read_traces(named).to_datasets()} == expected
    export_tokens(named, tmp_path / "sql")
    rows = pq.read_table(tmp_path / "sql/tokens.parquet", columns=["sample_id", "source_id"]).to_pylist()
    assert {(found["sample_id"], found["source_id"]) for found in rows} == {
        ("lab/maths/0/0", None),
        ("lab/maths/1/0", "mine/1"),
        ("lab/maths/2/0", None),
    }


def test_traces_are_equal_when_all_that_they_hold_is(folder: Path) -> None:
    traces, again = list(read_traces(folder)), list(read_traces(folder))
    assert traces == again and set(traces) == set(again)
    assert len(set(traces)) == len(traces)
    experts = traces[0].experts.copy()
    experts[-1, -1] = experts[-1, -1, ::-1]
    changes = [{"experts": experts}, {"input_ids": traces[0].input_ids[:-1]}, {"source_id": "x"}, {"key": "y"}]
    for change in changes:
        assert replace(traces[0], **change) != traces[0]
    assert traces[0] != traces[0].key


@dataclass(frozen=True, eq=False)
class WithTensor(Trace):
    extra: torch.Tensor


def test_traces_of_a_kind_that_holds_more_are_equal_when_that_is_too(folder: Path) -> None:
    first, *_ = read_traces(folder)
    held = WithTensor(**vars(first), extra=torch.ones(4, 2))
    assert held == replace(held, extra=torch.ones(4, 2)) and hash(held) == hash(first)
    assert held != replace(held, extra=torch.zeros(4, 2)) and held != replace(held, extra=torch.ones(4, 3))
    assert held != first
