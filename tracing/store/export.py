"""Rewrite a trace folder for people with SQL: one row a token.

Letters: T tokens, L MoE layers, K experts per token.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.data.traces import Trace, TraceSet, read_traces
from ecospec.files import replace_file

TOKENS_FILE = "tokens.parquet"


def export_tokens(folder: str | Path, output: str | Path) -> int:
    """Write `output`/tokens.parquet and return its number of rows.

    Columns: sample_id, source_id, dataset, split, position (from 0), token_id, is_prompt, and for each MoE layer a list
    column `experts_layer_<the model's own layer number>` of K ascending ids. Raises InputError when `folder` is no
    trace folder.
    """
    traces = read_traces(folder)
    schema = tokens_schema(traces)
    replace_file(Path(output) / TOKENS_FILE, lambda partial: _write(partial, traces, schema))
    return pq.read_metadata(Path(output) / TOKENS_FILE).num_rows


LAYOUTS = {"tokens": (TOKENS_FILE, export_tokens)}  # a value of the key `layout` → what it writes, and how


def tokens_schema(traces: TraceSet) -> pa.Schema:
    ids = pa.list_(pa.type_for_alias(traces.manifest.id_dtype))
    columns = [
        ("sample_id", pa.string()),
        ("source_id", pa.string()),
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("is_prompt", pa.bool_()),
    ]
    return pa.schema(columns + [(f"experts_layer_{layer}", ids) for layer in traces.manifest.moe_layers])


def _write(path: Path, traces: TraceSet, schema: pa.Schema) -> None:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for trace in traces:
            writer.write_table(_token_rows(trace, schema))


def _token_rows(trace: Trace, schema: pa.Schema) -> pa.Table:
    T, L, K = trace.experts.shape
    names = (trace.sample_id, trace.source_id, trace.dataset, trace.split)
    columns = [pa.array([value] * T, pa.string()) for value in names]
    positions = np.arange(T, dtype=np.int32)
    columns += [pa.array(positions), pa.array(trace.input_ids), pa.array(positions < trace.prompt_len)]
    offsets = pa.array(np.arange(0, T * K + 1, K, dtype=np.int32))
    for layer in range(L):
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(trace.experts[:, layer].reshape(-1))))
    return pa.Table.from_arrays(columns, schema=schema)
