"""Verify a trace folder against its manifest, part by part, without a model.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ecospec.data.lab import shipped
from ecospec.data.prompts import split_of
from ecospec.errors import DamageError, first_few
from ecospec.files import sha256_file
from ecospec.tracing.store.folder import header_differences
from ecospec.tracing.store.layout import (
    COLUMNS,
    MANIFEST,
    PARTS,
    REJECTED,
    REJECTED_COLUMNS,
    REMEDY,
    decode_experts,
    header_of,
    id_dtype,
    open_part,
    reading,
    require_sound_ids,
)
from ecospec.tracing.store.manifest import Manifest, PartFile


def check_folder(folder: str | Path) -> Manifest:
    """The manifest of a sound trace folder.

    Raises InputError when `folder` is no trace folder, DamageError for an unfinished run and for anything that is not
    as the manifest says: parts, checksums, columns, row counts, ids, a sample missing or written twice.
    """
    folder = shipped(folder, "traces") or Path(folder)
    if folder.is_dir() and any(folder.glob(PARTS)) and not (folder / MANIFEST).exists():
        raise DamageError(f"{folder}: the run did not finish; run the same ecospec-trace command again")
    manifest = Manifest.read(folder)
    _require_listed(folder, manifest)
    if manifest.id_dtype != id_dtype(manifest.num_experts).name:
        raise DamageError(f"{folder / MANIFEST}: id_dtype {manifest.id_dtype} is not that of num_experts")
    keys: set[str] = set()
    for part in manifest.parts:
        _check_part(folder / part.file, part, manifest, keys)
    written = len(keys)
    for part in manifest.rejected_parts:
        _check_rejected(folder / part.file, part, manifest, keys)
    _require_all(folder, written, len(keys) - written, manifest)
    return manifest


def _require_listed(folder: Path, manifest: Manifest) -> None:
    listed = {part.file for part in (*manifest.parts, *manifest.rejected_parts)}
    present = {path.name for pattern in (PARTS, REJECTED) for path in folder.glob(pattern)}
    for name in sorted(listed - present):
        raise DamageError(f"{folder / name}: listed in the manifest but missing; {REMEDY}")
    for name in sorted(present - listed):
        raise DamageError(f"{folder / name}: not listed in the manifest; it does not belong to this trace")


def _require_all(folder: Path, found: int, refused: int, manifest: Manifest) -> None:
    written, rejected = manifest.samples.written, manifest.samples.rejected
    expected = sum(source.samples for source in manifest.prompts)
    if found != written:
        raise DamageError(f"{folder}: {found} samples where the manifest says {written}")
    if refused != rejected:
        raise DamageError(f"{folder}: {refused} rejected samples where the manifest says {rejected}")
    if written + rejected != expected:
        raise DamageError(f"{folder}: {written} samples written and {rejected} rejected of {expected} prompts")


def _check_part(path: Path, part: PartFile, manifest: Manifest, keys: set[str]) -> None:
    """Check one part and add its keys to `keys`."""
    file = _open_part(path, part, manifest)
    for group in range(file.num_row_groups):
        with reading(path):
            rows = file.read_row_group(group).to_pylist()
        for row in rows:
            try:
                _check_row(row, manifest)
            except DamageError as error:
                raise DamageError(f"{path}, sample {row['sample_id']}: {error}") from None
            _add_key(keys, row, path)


def _check_rejected(path: Path, part: PartFile, manifest: Manifest, keys: set[str]) -> None:
    """Check one part of rejected samples and add their keys to `keys`."""
    file = _open_part(path, part, manifest, REJECTED_COLUMNS)
    with reading(path):
        rows = file.read().to_pylist()
    for row in rows:
        if not row["reason"]:
            raise DamageError(f"{path}, sample {row['sample_id']}: no reason for its rejection")
        _add_key(keys, row, path)


def _add_key(keys: set[str], row: dict, path: Path) -> None:
    if row["key"] in keys:
        raise DamageError(f"{path}, sample {row['sample_id']}: its key occurs twice")
    keys.add(row["key"])


def _open_part(path: Path, part: PartFile, manifest: Manifest, columns: pa.Schema = COLUMNS) -> pq.ParquetFile:
    if sha256_file(path) != part.sha256:
        raise DamageError(f"{path}: its sha256 is not the manifest's; the file was changed or damaged; {REMEDY}")
    file = open_part(path, columns)
    differences = header_differences(asdict(manifest), header_of(file.schema_arrow, path))
    if differences:
        shown = first_few(differences, separator="; ")
        raise DamageError(f"{path.parent / MANIFEST}: is not what {path.name} was written for ({shown})")
    if file.metadata.num_rows != part.rows:
        raise DamageError(f"{path}: {file.metadata.num_rows} rows where the manifest says {part.rows}")
    return file


def _check_row(row: dict, manifest: Manifest) -> None:
    if any(value is None for name, value in row.items() if name != "source_id"):
        raise DamageError("a value is missing")
    T = len(row["input_ids"])
    experts_TLK = decode_experts(row["experts"], manifest.num_layers, manifest.top_k, manifest.num_experts)
    if len(experts_TLK) != T:
        raise DamageError(f"expert ids of {len(experts_TLK)} tokens beside {T} tokens")
    require_sound_ids(experts_TLK, manifest.num_experts)
    if not 1 <= row["prompt_len"] <= T:
        raise DamageError(f"prompt_len {row['prompt_len']} of {T} tokens")
    dataset, source_row, turn = _sample_id_parts(row["sample_id"])
    if (dataset, turn) != (row["dataset"], str(row["turn"])) or split_of(dataset, source_row) != row["split"]:
        raise DamageError("dataset, turn or split do not fit the sample id")


def _sample_id_parts(sample_id: str) -> tuple[str, int, str]:
    """Data set (which may itself hold slashes), row and turn."""
    parts = sample_id.rsplit("/", 2)
    if len(parts) < 3 or not parts[1].isdecimal():
        raise DamageError("the sample id is not dataset/row/turn")
    return parts[0], int(parts[1]), parts[2]
