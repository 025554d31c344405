"""The trace folder's format: file names, columns, how ids become bytes and back. Writes nothing; loads no torch.

A folder holds `part-*.parquet`, visible only when complete, and `manifest.json`, written when the last part is there.
Samples that an engine or the context refused are in `rejected-*.parquet`, with the reason and without routing.
`experts` is [T, L, K] in C order, ids ascending in each group of K, in the narrowest unsigned type that holds E-1,
little-endian; its byte length is always T·L·K·itemsize. `source_id`, the prompt row's own id, may be null, and parts
written before it existed lack the column.

The `datasets` library's numpy and torch formats strip trailing zero bytes of such a value: read it with Arrow.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.errors import DamageError

MANIFEST = "manifest.json"
PARTS, REJECTED = "part-*.parquet", "rejected-*.parquet"
LOCK = ".lock"  # held by whichever worker makes something visible
LEFTOVERS = (".part-*.partial", ".rejected-*.partial", ".manifest.json.*.partial")  # of `replace_file`
HEADER_KEY = b"ecospec"  # of each part's schema metadata: the manifest's header as JSON
REMEDY = f"delete it and {MANIFEST}, then run the same ecospec-trace command again"
COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("sample_id", pa.string()),
        ("dataset", pa.string()),
        ("turn", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("prompt_len", pa.int32()),
        ("experts", pa.binary()),
        ("split", pa.string()),
        ("source_id", pa.string()),
    ]
)
REJECTED_COLUMNS = pa.schema(
    [*(COLUMNS.field(name) for name in COLUMNS.names[:4]), ("reason", pa.string()), COLUMNS.field("source_id")]
)


def id_dtype(num_experts: int) -> np.dtype:
    return np.min_scalar_type(num_experts - 1).newbyteorder("<")


def encode_experts(experts_TLK: np.ndarray, num_experts: int) -> bytes:
    """Raises DamageError when an id is out of range or occurs twice in a group."""
    sorted_TLK = np.sort(experts_TLK, axis=-1)
    require_sound_ids(sorted_TLK, num_experts)
    return sorted_TLK.astype(id_dtype(num_experts)).tobytes()


def decode_experts(value: bytes | pa.Buffer, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """[T, L, K], read-only. Raises DamageError when the bytes are no whole number of tokens."""
    ids = np.frombuffer(value, np.uint8)
    dtype = id_dtype(num_experts)
    if len(ids) % (num_layers * top_k * dtype.itemsize):
        raise DamageError(f"{len(ids)} bytes of expert ids are no whole number of tokens")
    return ids.view(dtype).reshape(-1, num_layers, top_k)


def require_sound_ids(experts_TLK: np.ndarray, num_experts: int) -> None:
    """Raises DamageError unless all ids lie in [0, E) and ascend strictly within each group."""
    if experts_TLK.size and (experts_TLK.min() < 0 or experts_TLK.max() >= num_experts):
        raise DamageError(f"expert ids outside 0..{num_experts - 1}")
    if (experts_TLK[..., 1:] <= experts_TLK[..., :-1]).any():
        raise DamageError("a token uses one expert twice in a layer, or its ids do not ascend")


def header_of(schema: pa.Schema, path: Path) -> dict:
    """What the part `path` says of the job it was written for. Raises DamageError when that cannot be read."""
    with reading(path):
        return json.loads((schema.metadata or {}).get(HEADER_KEY, b"{}"))


def read_columns(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a part. Raises DamageError when they cannot be read."""
    with reading(path):
        return pq.read_table(path, columns=list(columns), page_checksum_verification=True)


def open_part(path: Path, columns: pa.Schema = COLUMNS, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """The part, whose `footer` need not be parsed again where it is known.

    Raises DamageError when it is no Parquet file or has other columns than a trace (or `columns`).
    """
    with reading(path):
        file = pq.ParquetFile(path, metadata=footer, memory_map=True, page_checksum_verification=True)
        found = file.schema_arrow.remove_metadata()
        if not (found.equals(columns) or found.equals(_without_source_id(columns))):
            raise DamageError("its columns are not those of a trace")
    return file


def _without_source_id(columns: pa.Schema) -> pa.Schema:
    return columns.remove(columns.get_field_index("source_id"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises DamageError, naming the part `path` and the remedy, for what is found wrong while it is read.

    What the system refuses, such as a missing permission, stays the OSError that it is; Arrow's own have no `errno`.
    """
    try:
        yield
    except (pa.ArrowException, OSError, DamageError, json.JSONDecodeError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise DamageError(f"{path}: damaged ({error}); {REMEDY}") from None
