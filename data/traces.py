"""Read a trace folder, one sequence at a time. Loads no torch.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.data.lab import shipped
from ecospec.errors import DamageError, InputError
from ecospec.tracing.store.layout import COLUMNS, MANIFEST, decode_experts, open_part, reading
from ecospec.tracing.store.manifest import Manifest

if TYPE_CHECKING:
    import datasets
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Trace:
    """One sequence: `input_ids` int32 [T], its first `prompt_len` the prompt; `experts` [T, L, K], ascending.

    `source_id` is the prompt row's own id in the user's data, None where it had none. Traces are equal when all their
    fields are, arrays by value.
    """

    key: str
    sample_id: str
    dataset: str
    turn: int
    split: str
    prompt_len: int
    input_ids: np.ndarray
    experts: np.ndarray
    source_id: str | None = field(default=None, kw_only=True)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def columns(self) -> "Mapping[str, Tensor]":
        """Further values of every token, [T, ...] by name, that go into batches; a recorded trace has none."""
        return {}


class Traces(Protocol):
    """Samples of one target with its L, E and K: a trace folder's (`TraceSet`), or some in memory.

    `manifest` is that of the trace folder they come from.
    """

    num_layers: int
    num_experts: int
    top_k: int
    manifest: Manifest

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Trace: ...

    def __iter__(self) -> Iterator[Trace]: ...


class TraceSet(Sequence[Trace]):
    """The sequences of a trace folder, in the order of its parts; decoded on access, one row group in memory.

    It is a map-style PyTorch data set as it stands (`DataLoader(read_traces(DIR), collate_fn=…)`).
    """

    def __init__(self, folder: str | Path, split: Literal["train", "test"] | None = None) -> None:
        self.folder = shipped(folder, "traces") or Path(folder)
        self.manifest = Manifest.read(self.folder)
        self.num_layers = self.manifest.num_layers
        self.num_experts = self.manifest.num_experts
        self.top_k = self.manifest.top_k
        self.split = split
        self._rows = [row for part in self.manifest.parts for row in _rows_of(self.folder / part.file, split)]
        self._footer: tuple[Path, pq.FileMetaData] | None = None  # of the open part: parsing it again takes long
        self._group: tuple[Path, int] | None = None
        self._table: pa.Table | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Trace | list[Trace]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        path, group, row = self._rows[index]
        if self._group != (path, group):
            known = self._footer is not None and self._footer[0] == path
            file = open_part(path, footer=self._footer[1] if known else None)
            self._footer = path, file.metadata
            with reading(path):
                self._table, self._group = file.read_row_group(group), (path, group)
        with reading(path):
            return self._trace(row)

    def to_datasets(self) -> "datasets.Dataset":
        """The same samples as a `datasets.Dataset` of memory-mapped rows, with `experts` decoded on access.

        Do not set another format on it: the library's numpy and torch formats cut trailing zero bytes off.
        """
        import datasets

        paths = [str(self.folder / part.file) for part in self.manifest.parts]
        filters = None if self.split is None else [("split", "==", self.split)]
        columns = datasets.Features.from_arrow_schema(COLUMNS)  # parts of one folder may differ: old ones lack one
        return datasets.Dataset.from_parquet(paths, features=columns, filters=filters).with_transform(self._decoded)

    def _decoded(self, columns: dict[str, list]) -> dict[str, list]:
        if "experts" not in columns:
            return columns
        shape = (self.num_layers, self.top_k, self.num_experts)
        return columns | {"experts": [decode_experts(value, *shape) for value in columns["experts"]]}

    def _trace(self, row: int) -> Trace:
        values = {name: self._table[name][row] for name in self._table.column_names}
        experts = decode_experts(values.pop("experts").as_buffer(), self.num_layers, self.top_k, self.num_experts)
        input_ids = values.pop("input_ids").values.to_numpy()
        if len(experts) != len(input_ids):
            raise DamageError(f"expert ids of {len(experts)} tokens beside {len(input_ids)} tokens")
        return Trace(**{n: value.as_py() for n, value in values.items()}, input_ids=input_ids, experts=experts)


def _same(value: object, other: object) -> bool:
    """Equality as one answer, of arrays and tensors too."""
    if not hasattr(value, "shape"):
        return value == other
    return value.shape == other.shape and bool((value == other).all())


def read_traces(folder: str | Path, split: Literal["train", "test"] | None = None) -> TraceSet:
    """The traces of `folder`, all or those of one split; the word `lab` is the shipped lab's.

    Raises InputError when the folder is no complete trace folder, DamageError when a listed part is missing or
    damaged; the returned set raises DamageError on access to a damaged sample.
    """
    if split not in (None, "train", "test"):
        raise InputError(f"split {split!r}: expected train or test")
    return TraceSet(folder, split)


def _rows_of(path: Path, split: str | None) -> list[tuple[Path, int, int]]:
    """(file, row group, row in the group) of the rows that belong to `split`."""
    if not path.is_file():
        raise DamageError(f"{path}: listed in {MANIFEST} but missing")
    file = open_part(path)
    rows = []
    for group in range(file.num_row_groups):
        with reading(path):
            splits = file.read_row_group(group, columns=["split"])["split"].to_pylist()
        rows += [(path, group, row) for row, found in enumerate(splits) if split in (None, found)]
    return rows
