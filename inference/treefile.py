"""The tree file `trees.parquet`: at each position of a text the whole draft pool and what the target made of it.

One row a position, rows of a prompt together and in order. Draft lists leave the root out: entry i is node i + 1 of the
tree, and a parent p >= 0 is the entry p, -1 the root. What holds for all rows stands in the schema's metadata as JSON.

Letters: N tree nodes (root first), M = N - 1 drafts, L MoE layers, E experts, K experts per token.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.configs.errors import DamageError, InputError
from ecospec.configs.files import replace_file
from ecospec.tracing.layout import decode_experts, encode_experts, id_dtype

SCHEMA_VERSION = 1
METADATA_KEY = b"ecospec.trees"
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
        ("position", pa.int32()),
        ("root", pa.int32()),
        *DRAFTS,
        ("experts_true", pa.binary()),
        ("experts_pred", pa.binary()),
    ]
)


@dataclass(frozen=True)
class Identity:
    """What holds for a whole tree file. `datasets`: each recorded prompt's data set, by prompt id.

    A prompt whose text ended with its first token has no rows, yet stands in `datasets`.
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
    steps: int
    topk: int
    datasets: dict[str, str] = field(default_factory=dict)

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
    its parent. `experts_pred_NLK` is None where nothing predicted.
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
    experts_pred_NLK: np.ndarray | None

    @property
    def width(self) -> int:
        """N, the root included."""
        return len(self.tokens_M) + 1


@dataclass
class TreeSet:
    """A tree file's identity and its positions, in order; `spans`: of each prompt the numbers of its positions.

    Raises DamageError when a prompt is unknown or has a gap.
    """

    identity: Identity
    positions: list[Position]

    def __post_init__(self) -> None:
        self.spans, start = dict.fromkeys(self.identity.datasets, range(0)), 0
        for prompt_id, group in itertools.groupby(self.positions, key=lambda position: position.prompt_id):
            places = [position.position for position in group]
            if self.spans.get(prompt_id) != range(0) or places != list(range(places[0], places[0] + len(places))):
                raise DamageError(f"trees of prompt {prompt_id}: positions are missing, or twice")
            self.spans[prompt_id] = range(start, start + len(places))
            start += len(places)


def write_trees(path: Path, identity: Identity, positions: Iterable[Position]) -> int:
    """Write all positions, as they come, then show the file; returns their number.

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
        batches = file.iter_batches(ROWS_TOGETHER, columns=COLUMNS.names)
        return TreeSet(identity, [row for batch in batches for row in _positions(batch, identity)])


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
    wrong = [column.name for column in COLUMNS if column not in list(schema)]
    if text is None or wrong:
        raise InputError(f"--trees {path}: is no tree file; ecospec-decode record writes them")
    known = json.loads(text)
    if known.get("schema") != SCHEMA_VERSION:
        raise InputError(f"--trees {path}: has tree schema {known.get('schema')}, this version reads {SCHEMA_VERSION}")
    return Identity(**{part.name: known[part.name] for part in fields(Identity)})


def _to_row(position: Position, num_experts: int) -> dict:
    pred_NLK = position.experts_pred_NLK
    return {
        "prompt_id": position.prompt_id,
        "position": position.position,
        "root": position.root,
        **{name: getattr(position, f"{name}_M") for name in DRAFTS.names},
        "experts_true": encode_experts(position.experts_true_NLK, num_experts),
        "experts_pred": None if pred_NLK is None else encode_experts(pred_NLK, num_experts),
    }


def _positions(batch: pa.RecordBatch, identity: Identity) -> Iterator[Position]:
    lists = {name: _split(batch.column(name)) for name in DRAFTS.names}
    heads = batch.select(["prompt_id", "position", "root", "experts_true", "experts_pred"]).to_pylist()
    shape = (identity.num_layers, identity.top_k, identity.num_experts)
    for number, head in enumerate(heads):
        drafts = {f"{name}_M": values[number] for name, values in lists.items()}
        true_NLK = decode_experts(head.pop("experts_true"), *shape)
        pred = head.pop("experts_pred")
        pred_NLK = None if pred is None else decode_experts(pred, *shape)
        lengths = {len(values) + 1 for values in drafts.values()} | {len(true_NLK)}
        if len(lengths | ({len(pred_NLK)} if pred_NLK is not None else set())) > 1:
            raise DamageError(f"prompt {head['prompt_id']}, position {head['position']}: lists of unequal length")
        yield Position(**head, **drafts, experts_true_NLK=true_NLK, experts_pred_NLK=pred_NLK)


def _split(column: pa.ListArray) -> list[np.ndarray]:
    """A list column as an array a row."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]
