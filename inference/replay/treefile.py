"""The tree file `trees.parquet`: at each position of a text the whole draft pool and what the target made of it.

One row a position, rows of a prompt together and in order. Draft lists leave the root out: entry i is node i + 1 of the
tree, and a parent p >= 0 is the entry p, -1 the root. What holds for all rows stands in the schema's metadata as JSON.

Letters: N tree nodes (root first), M = N - 1 drafts, L MoE layers, E experts, K experts per token.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.errors import DamageError, InputError
from ecospec.files import replace_file
from ecospec.predictor.kinds import all_kinds
from ecospec.tracing.store.layout import decode_experts, encode_experts, id_dtype

SCHEMA_VERSION = 1
METADATA_KEY = b"ecospec.trees"
SECONDS_KEY = b"ecospec.seconds"
TARGET = "target"  # in `seconds`: a pass of the target over the root alone
PREDICTED = {kind.name: kind.column for kind in all_kinds() if kind.column}  # recorded sources → their columns
ROWS_TOGETHER = 256  # of a row group
DRAFTS = pa.schema(
    [
        ("parents", pa.list_(pa.int16())),
        ("tokens", pa.list_(pa.int32())),
        ("prob", pa.list_(pa.float32())),
        ("depth", pa.list_(pa.int16())),
        ("rank", pa.list_(pa.int16())),
        ("accepted", pa.list_(pa.bool_())),
        ("target_prob", pa.list_(pa.float32())),
    ]
)
COLUMNS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("source_id", pa.string()),
        ("position", pa.int32()),
        ("root", pa.int32()),
        *DRAFTS,
        ("experts_true", pa.binary()),
        *((column, pa.binary()) for column in PREDICTED.values()),
    ]
)


@dataclass(frozen=True)
class Identity:
    """What holds for a whole tree file. `datasets`: each recorded prompt's data set, by prompt id.

    `tree`: the shape of the pools in the drafter's words. `predictor` is the folder of the predictor, `rungs` those of
    the other recorded sources, by name. A prompt whose text ended with its first token has no rows, yet stands in
    `datasets`.
    """

    target: str
    target_config_sha256: str
    drafter: str
    predictor: str | None
    temperature: float
    seed: int
    num_layers: int
    num_experts: int
    top_k: int
    tree: dict[str, int]
    datasets: dict[str, str] = field(default_factory=dict)
    rungs: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> tuple[int, int, int]:
        """(L, E, K)."""
        return self.num_layers, self.num_experts, self.top_k

    def to_json(self) -> str:
        known = {"schema": SCHEMA_VERSION, "id_dtype": id_dtype(self.num_experts).name}
        return json.dumps(known | asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Position:
    """The pool drafted after the token `root` at `position` of a text, verified whole.

    `prob_M` float32: draft probability given the parent; `rank_M`: place among siblings, from 0; `accepted_M`: the
    target's own text goes on with the draft's whole path; `target_prob_M`: the target's probability of the draft given
    its parent; `predicted`: expert ids [N, L, K] by the name of the recorded source; `source_id`: the prompt row's own
    id in the user's data, where it has one.
    """

    prompt_id: str
    position: int
    root: int
    parents_M: np.ndarray
    tokens_M: np.ndarray
    prob_M: np.ndarray
    depth_M: np.ndarray
    rank_M: np.ndarray
    accepted_M: np.ndarray
    target_prob_M: np.ndarray
    experts_true_NLK: np.ndarray
    predicted: Mapping[str, np.ndarray] = field(default_factory=dict)
    source_id: str | None = None

    @property
    def width(self) -> int:
        """N, the root included."""
        return len(self.tokens_M) + 1


@dataclass
class TreeSet:
    """A tree file's identity and its positions, in order; `spans`: of each prompt the numbers of its positions.

    `seconds`: medians a position of the sources that were timed, and of `TARGET`.

    Raises DamageError when a prompt is unknown or has a gap.
    """

    identity: Identity
    positions: list[Position]
    seconds: dict[str, float] = field(default_factory=dict)
    spans: dict[str, range] = field(init=False)

    def __post_init__(self) -> None:
        self.spans, start = dict.fromkeys(self.identity.datasets, range(0)), 0
        for prompt_id, group in itertools.groupby(self.positions, key=lambda position: position.prompt_id):
            places = [position.position for position in group]
            if self.spans.get(prompt_id) != range(0) or places != list(range(places[0], places[0] + len(places))):
                raise DamageError(f"trees of prompt {prompt_id}: positions are missing, or twice")
            self.spans[prompt_id] = range(start, start + len(places))
            start += len(places)


def write_trees(
    path: Path, identity: Identity, positions: Iterable[Position], seconds: Callable[[], dict[str, float]] = dict
) -> int:
    """Write all positions, as they come, then `seconds()`, and show the file; returns the number of positions.

    Raises DamageError for expert ids out of range.
    """
    schema = COLUMNS.with_metadata({METADATA_KEY: identity.to_json()})
    rows = (_to_row(position, identity.num_experts) for position in positions)
    written = 0

    def write(partial: Path) -> None:
        nonlocal written
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            while batch := list(itertools.islice(rows, ROWS_TOGETHER)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                written += len(batch)
            writer.add_key_value_metadata({SECONDS_KEY: json.dumps(seconds())})

    replace_file(path, write)
    return written


def read_trees(path: Path) -> TreeSet:
    """Raises InputError when `path` is no tree file of this version, DamageError when what it holds is broken."""
    if not path.is_file():
        raise InputError(f"--trees {path}: no such file")
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise InputError(f"--trees {path}: is no Parquet file ({error})") from None
    with file, _reading(path):
        identity = _read_identity(path, file.schema_arrow)
        columns = [name for name in COLUMNS.names if name in file.schema_arrow.names]
        batches = file.iter_batches(ROWS_TOGETHER, columns=columns)
        positions = [row for batch in batches for row in _positions(batch, identity)]
        return TreeSet(identity, positions, json.loads(file.metadata.metadata.get(SECONDS_KEY, "{}")))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises DamageError for what is found wrong; what the system refuses stays OSError (Arrow's have no `errno`)."""
    try:
        yield
    except (pa.ArrowException, OSError, DamageError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise DamageError(f"--trees {path}: damaged ({error}); record it again") from None


def _read_identity(path: Path, schema: pa.Schema) -> Identity:
    text = (schema.metadata or {}).get(METADATA_KEY)
    recorded = set(PREDICTED.values()) & set(schema.names)
    absent = {*PREDICTED.values(), "source_id"} - set(schema.names)  # what a file is older than
    wrong = [column.name for column in COLUMNS if column.name not in absent and column not in list(schema)]
    if text is None or wrong or not recorded:
        raise InputError(f"--trees {path}: is no tree file; ecospec-decode record writes them")
    known = {"rungs": {}} | json.loads(text)  # older files lack them
    known.setdefault("tree", {key: known[key] for key in ("steps", "topk") if key in known})  # as they say it
    if known.get("schema") != SCHEMA_VERSION:
        raise InputError(f"--trees {path}: has tree schema {known.get('schema')}, this version reads {SCHEMA_VERSION}")
    return Identity(**{part.name: known[part.name] for part in fields(Identity)})


def _to_row(position: Position, num_experts: int) -> dict:
    predicted = position.predicted.items()
    encoded = {PREDICTED[source]: encode_experts(ids_NLK, num_experts) for source, ids_NLK in predicted}
    return {
        "prompt_id": position.prompt_id,
        "source_id": position.source_id,
        "position": position.position,
        "root": position.root,
        **{name: getattr(position, f"{name}_M") for name in DRAFTS.names},
        "experts_true": encode_experts(position.experts_true_NLK, num_experts),
        **encoded,
    }


def _positions(batch: pa.RecordBatch, identity: Identity) -> Iterator[Position]:
    lists = {name: _split(batch.column(name)) for name in DRAFTS.names}
    columns = {"experts_true": "experts_true"} | {
        column: source for source, column in PREDICTED.items() if column in batch.schema.names
    }
    own = [name for name in ("prompt_id", "source_id", "position", "root") if name in batch.schema.names]
    heads = batch.select([*own, *columns]).to_pylist()
    shape = (identity.num_layers, identity.top_k, identity.num_experts)
    for number, head in enumerate(heads):
        drafts = {f"{name}_M": values[number] for name, values in lists.items()}
        found = {source: head.pop(column) for column, source in columns.items()}
        ids = {source: decode_experts(data, *shape) for source, data in found.items() if data is not None}
        lengths = {len(values) + 1 for values in drafts.values()} | {len(ids_NLK) for ids_NLK in ids.values()}
        if len(lengths) > 1:
            raise DamageError(f"prompt {head['prompt_id']}, position {head['position']}: lists of unequal length")
        yield Position(**head, **drafts, experts_true_NLK=ids.pop("experts_true"), predicted=ids)


def _split(column: pa.ListArray) -> list[np.ndarray]:
    """A list column as an array a row."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]
