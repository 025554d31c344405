"""Write a trace folder so that a kill at any moment loses only what was not yet committed, beside other workers.

A commit is a part becoming visible by rename; it holds whole batches. What is finished is read from the key columns of
the visible parts, never from names or counts, and again before each commit, under a lock: a sample that another worker
has finished meanwhile is not written twice. Knows nothing about models or about what the rows mean.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ecospec.errors import DamageError, InputError, first_few
from ecospec.files import replace_file, sha256_file, sha256_json
from ecospec.provenance import Provenance
from ecospec.tracing.store.layout import (
    COLUMNS,
    HEADER_KEY,
    LEFTOVERS,
    LOCK,
    MANIFEST,
    PARTS,
    REJECTED,
    REJECTED_COLUMNS,
    header_of,
    read_columns,
)
from ecospec.tracing.store.manifest import Header, Manifest, PartFile, SampleCounts

COMMIT_BYTES = 8 * 2**20  # of expert ids
COMMIT_SECONDS = 30.0
LEFTOVER_SECONDS = 600.0  # a commit takes seconds: a half-written file of this age has no writer any more
log = logging.getLogger(__name__)


class TraceFolder:
    """The folder of one job, which its `header` identifies.

    Raises InputError when the folder holds something else or the traces of another configuration, DamageError when a
    part is unreadable.
    """

    def __init__(self, folder: str | Path, header: Header) -> None:
        self.folder, self.header = Path(folder), header
        self._metadata = {HEADER_KEY: json.dumps(asdict(header))}
        self._pending: dict[str, list[pa.Table]] = {PARTS: [], REJECTED: []}
        self._keys: dict[Path, list[str]] = {}
        self._last_commit = time.monotonic()
        self._open()
        self.done: set[str] = set()
        self.refresh()

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def refresh(self) -> None:
        """Read the keys of parts that have become visible, whoever wrote them, into `done`."""
        for path in {*self.folder.glob(PARTS), *self.folder.glob(REJECTED)} - self._keys.keys():
            table = read_columns(path, ["key"])
            self._require_same(header_of(table.schema, path))
            self._keys[path] = table["key"].to_pylist()
            self.done.update(self._keys[path])

    def require_finished(self, expected: Collection[str]) -> None:
        """Raises DamageError when the parts of a complete folder lack a key of `expected`, InputError when they hold
        another job's."""
        self._require_own(expected)
        missing = len(set(expected) - self.done)
        if missing:
            raise DamageError(
                f"{self.folder}: complete by its {MANIFEST}, but {missing} of {len(expected)} samples are missing; "
                f"delete {MANIFEST} and run the same ecospec-trace command again"
            )

    def forget_rejected(self) -> None:
        """Count rejected samples as not done; `delete_rejected` makes that so in the folder."""
        for path in [path for path in self._keys if path.match(REJECTED)]:
            self.done.difference_update(self._keys.pop(path))

    def delete_rejected(self) -> None:
        """Delete the manifest, then the parts that hold rejected samples."""
        with self._locked():
            (self.folder / MANIFEST).unlink(missing_ok=True)
            for path in self.folder.glob(REJECTED):
                path.unlink()

    def answers(self, keys: Collection[str]) -> dict[str, list[int]]:
        """The token ids after the prompt of those samples of `keys` that are written."""
        found = {}
        for path, held in self._keys.items():
            if path.match(PARTS) and not set(keys).isdisjoint(held):
                table = read_columns(path, ["key", "input_ids", "prompt_len"])
                rows = table.filter(pc.is_in(table["key"], pa.array(keys, pa.string()))).to_pylist()
                found |= {row["key"]: row["input_ids"][row["prompt_len"] :] for row in rows}
        return found

    def rejected(self) -> dict[str, str]:
        """By sample id why samples were rejected."""
        reasons = {}
        for path in sorted(path for path in self._keys if path.match(REJECTED)):
            table = read_columns(path, ["sample_id", "reason"])
            reasons |= dict(zip(*(column.to_pylist() for column in table.columns), strict=True))
        return reasons

    def add(self, rows: Sequence[dict], rejected: Sequence[dict] = ()) -> None:
        """Take the rows of one batch, each with the columns of `layout`; commit what gathered once it is due."""
        for kind, columns, items in ((PARTS, COLUMNS, rows), (REJECTED, REJECTED_COLUMNS, rejected)):
            if items:
                table = pa.Table.from_pylist(list(items), schema=columns.with_metadata(self._metadata))
                self._pending[kind].append(table)
        large = sum(table["experts"].nbytes for table in self._pending[PARTS]) >= COMMIT_BYTES
        if large or time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make what has gathered visible, as one part, and the rejected samples as another."""
        with self._locked():
            self._commit()

    def _commit(self) -> None:
        self.refresh()
        for kind, tables in self._pending.items():
            new = [table for table in map(self._unfinished, tables) if len(table)]
            if new:
                self._write(kind, new)
        self._pending, self._last_commit = {PARTS: [], REJECTED: []}, time.monotonic()

    def finalise(self, expected: Collection[str]) -> bool:
        """Commit the rest; once every key of `expected` is there, write the manifest and return True.

        Raises InputError when the parts hold a key that is not expected, DamageError when they hold one twice.
        """
        with self._locked():
            self._commit()
            return self._finalise(expected)

    def _finalise(self, expected: Collection[str]) -> bool:
        self._require_own(expected)
        counts = Counter(key for keys in self._keys.values() for key in keys)
        twice = next((key for key, count in counts.items() if count > 1), None)
        if twice is not None:
            names = sorted(path.name for path, keys in self._keys.items() if twice in keys)
            shown = first_few(names, separator=" and ")
            raise DamageError(
                f"{self.folder}: {shown} hold the same sample; delete one of them and run the same ecospec-trace "
                "command again"
            )
        if len(counts) < len(set(expected)) or self.complete:
            return self.complete  # where another worker was first
        parts, rejected = (self._listed(pattern) for pattern in (PARTS, REJECTED))
        counts = SampleCounts(*(sum(part.rows for part in group) for group in (parts, rejected)))
        found = {"samples": counts, "parts": parts, "rejected_parts": rejected}
        Manifest(**vars(self.header), **found, provenance=Provenance.of().to_json()).write(self.folder)
        _flush_folder(self.folder)
        (self.folder / LOCK).unlink(missing_ok=True)  # nothing is left that another worker could write
        return True

    def _require_own(self, expected: Collection[str]) -> None:
        if not self.done.issubset(expected):
            raise InputError(
                f"--output {self.folder}: holds samples of another job (the same prompts in other tokens, perhaps); "
                "choose another folder"
            )

    def _unfinished(self, table: pa.Table) -> pa.Table:
        return table.filter(pc.invert(pc.is_in(table["key"], pa.array(self.done, pa.string()))))

    def _write(self, kind: str, tables: list[pa.Table]) -> None:
        keys = [key for table in tables for key in table["key"].to_pylist()]
        path = self.folder / kind.replace("*", sha256_json(keys)[:16])
        replace_file(path, lambda partial: _write_part(partial, tables))
        _flush_folder(self.folder)
        self._keys[path] = keys
        self.done.update(keys)

    def _listed(self, pattern: str) -> list[PartFile]:
        paths = sorted(path for path in self._keys if path.match(pattern))
        return [PartFile(path.name, len(self._keys[path]), sha256_file(path)) for path in paths]

    def _open(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--output {self.folder}: is a file, not a folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output {self.folder}: cannot be made ({error.strerror}); choose another") from None
        ours = (MANIFEST, LOCK, PARTS, REJECTED, *LEFTOVERS)
        foreign = [path.name for path in self.folder.iterdir() if not any(map(path.match, ours))]
        if foreign:
            raise InputError(f"--output {self.folder}: holds {min(foreign)}, so it is no trace folder; choose another")
        if self.complete:
            self._require_same(asdict(Manifest.read(self.folder)))
        if not self.complete or any(self._leftovers()):
            with self._locked() as alone:
                self._remove_leftovers(0 if alone else LEFTOVER_SECONDS)

    def _leftovers(self) -> set[Path]:
        return {path for pattern in LEFTOVERS for path in self.folder.glob(pattern)}

    def _remove_leftovers(self, seconds: float) -> None:
        """Remove half-written files that are older than `seconds`: without locks a younger one may be being written."""
        for path in self._leftovers():
            with contextlib.suppress(FileNotFoundError):  # it was completed, or another worker was faster
                if time.time() - path.stat().st_mtime >= seconds:
                    path.unlink()
                    log.info("removed %s, which a stopped run left half-written", path.name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other workers from making anything visible meanwhile; False where the file system has no locks."""
        with (self.folder / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                log.warning("%s: no file locks here; start no shard twice at the same time", self.folder)
                yield False
            else:
                yield True

    def _require_same(self, found: dict) -> None:
        differences = header_differences(found, asdict(self.header))
        if differences:
            shown = first_few(differences, separator="; ")
            raise InputError(
                f"--output {self.folder}: holds traces of another configuration ({shown}); "
                "choose another folder, or repeat the command that began this one"
            )


def header_differences(found: dict, wanted: dict, prefix: str = "") -> list[str]:
    """Each key of `wanted` that `found` has otherwise, as `generation.seed is 0, not 1`."""
    differences = []
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            differences += header_differences(other, value, f"{prefix}{key}.")
        elif other != value:
            short = f"is {other}, not {value}" if isinstance(value, str | int | float) else "differs"
            differences.append(f"{prefix}{key} {short}")
    return differences


def _write_part(path: Path, batches: Sequence[pa.Table]) -> None:
    """One row group a batch, checksums for its pages; no dictionary for what never repeats."""
    repeated = [name for name in ("dataset", "split", "reason") if name in batches[0].column_names]
    options = {"compression": "zstd", "use_dictionary": repeated, "write_statistics": repeated}
    options |= {"write_page_checksum": True}
    with pq.ParquetWriter(path, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_table(batch)


def _flush_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
