"""Write a trace folder so that a kill at any moment loses only what was not yet committed.

A commit is a part becoming visible by rename; it holds whole batches. What is finished is read from the key columns of
the visible parts, never from names or counts. Knows nothing about models or about what the rows mean.
"""

import json
import logging
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.configs.errors import DamageError, InputError
from ecospec.configs.files import provenance, replace_file, sha256_file, sha256_json, write_json
from ecospec.tracing.layout import COLUMNS, HEADER_KEY, LEFTOVERS, MANIFEST, PARTS, read_manifest, reading

COMMIT_BYTES = 8 * 2**20  # of expert ids
COMMIT_SECONDS = 30.0
log = logging.getLogger(__name__)


class TraceFolder:
    """The folder of one run, which its `header` (what the manifest says before any sample is traced) identifies.

    Opening it removes what a killed run left half-written. Raises InputError when the folder holds something else or
    the traces of another configuration, DamageError when a part is unreadable.
    """

    def __init__(self, folder: str | Path, header: dict) -> None:
        self.folder, self.header = Path(folder), header
        self._metadata = {HEADER_KEY: json.dumps(header)}
        self._pending: list[pa.Table] = []
        self._last_commit = time.monotonic()
        self._open()
        self.finished = self._finished_keys()

    @property
    def complete(self) -> bool:
        return (self.folder / MANIFEST).exists()

    def require_finished(self, expected: Collection[str]) -> None:
        """Raises DamageError when the parts of a complete folder lack a key of `expected`."""
        missing = len(set(expected) - self.finished)
        if missing:
            raise DamageError(
                f"{self.folder}: complete by its {MANIFEST}, but {missing} of {len(expected)} samples are missing; "
                f"delete {MANIFEST} and run the same ecospec-trace command again"
            )

    def add(self, rows: Sequence[dict]) -> None:
        """Take the rows of one batch, each with the columns of `layout`; commit what gathered once it is due."""
        self._pending.append(pa.Table.from_pylist(list(rows), schema=COLUMNS.with_metadata(self._metadata)))
        large = sum(table["experts"].nbytes for table in self._pending) >= COMMIT_BYTES
        if large or time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make the gathered batches visible as one part."""
        if not self._pending:
            return
        keys = [key for table in self._pending for key in table["key"].to_pylist()]
        path = self.folder / f"part-{sha256_json(keys)[:16]}.parquet"
        replace_file(path, lambda partial: _write_part(partial, self._pending))
        _flush_folder(self.folder)
        self.finished.update(keys)
        self._pending, self._last_commit = [], time.monotonic()

    def finalise(self, expected: Collection[str]) -> None:
        """Commit the rest and write the manifest. Raises DamageError when the parts do not hold exactly `expected`."""
        self.commit()
        paths = sorted(self.folder.glob(PARTS))
        parts = [{"file": p.name, "rows": pq.read_metadata(p).num_rows, "sha256": sha256_file(p)} for p in paths]
        written = sum(part["rows"] for part in parts)
        if self._finished_keys() != set(expected) or written != len(expected):
            raise DamageError(f"{self.folder}: {written} samples written where {len(expected)} were expected")
        manifest = self.header | {
            "samples": {"written": written, "rejected": 0},
            "parts": parts,
            "provenance": provenance(),
        }
        write_json(self.folder / MANIFEST, manifest)
        _flush_folder(self.folder)

    def _open(self) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--output {self.folder}: is a file, not a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        leftovers = {path for pattern in LEFTOVERS for path in self.folder.glob(pattern)}
        foreign = set(self.folder.iterdir()) - leftovers - set(self.folder.glob(PARTS)) - {self.folder / MANIFEST}
        if foreign:
            raise InputError(
                f"--output {self.folder}: holds {min(foreign).name}, so it is no trace folder; choose another"
            )
        if self.complete:
            self._require_same(read_manifest(self.folder))
        for path in leftovers:
            log.info("removing %s, which a stopped run left half-written", path.name)
            path.unlink()

    def _finished_keys(self) -> set[str]:
        keys = set()
        for path in self.folder.glob(PARTS):
            with reading(path):
                table = pq.read_table(path, columns=["key"])
            self._require_same(json.loads((table.schema.metadata or {}).get(HEADER_KEY, b"{}")))
            keys.update(table["key"].to_pylist())
        return keys

    def _require_same(self, found: dict) -> None:
        differences = header_differences(found, self.header)
        if differences:
            raise InputError(
                f"--output {self.folder}: holds traces of another configuration ({'; '.join(differences)}); "
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
    """One row group a batch. No dictionary for what never repeats."""
    options = {"compression": "zstd", "use_dictionary": ["dataset", "split"]}
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
