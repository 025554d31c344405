"""What `manifest.json` says, as objects: a job before any sample is traced, and its finished folder.

Letters: L MoE layers, E experts, K experts per token.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Self, TypeVar

from ecospec.errors import DamageError, InputError, first_few
from ecospec.files import read_json, write_json
from ecospec.tracing.store.layout import MANIFEST, PARTS

SCHEMA_VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TracedTarget:
    """The model whose routing was recorded; `weights_sha256` is None for a hub id and for an engine elsewhere."""

    name: str
    revision: str | None = None
    dtype: str | None = None
    config_sha256: str
    weights_sha256: str | None = None
    experts_implementation: str | None = None
    expert_mib: float | None = None


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """A data set: how many samples it gives, and a hash of their texts."""

    dataset: str
    samples: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Header:
    """What is known of a job before any sample is traced; a folder is resumed under the same header only.

    `moe_layers`: the L MoE layers' own numbers in the model; `engine` and `generation`: settings by name.
    """

    schema: int = SCHEMA_VERSION
    target: TracedTarget
    engine: dict | None = None
    family: str | None = None
    vocab_size: int | None = None
    moe_layers: list[int]
    num_experts: int
    top_k: int
    id_dtype: str
    byte_order: str = "little"
    column: str = "experts"
    layout: str = "T,L,K"
    order: str = "C, ids ascending"
    tokenizer_sha256: str | None = None
    prompts: list[PromptSource]
    generation: dict | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.moe_layers)


@dataclass(frozen=True)
class SampleCounts:
    """How many samples a folder holds, and how many were refused with a reason."""

    written: int
    rejected: int


@dataclass(frozen=True)
class PartFile:
    """A file of the folder by its name, with its number of rows."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest(Header):
    """A finished trace folder."""

    samples: SampleCounts
    parts: list[PartFile]
    rejected_parts: list[PartFile] = field(default_factory=list)
    provenance: dict = field(default_factory=dict)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Raises InputError when `folder` is no finished trace folder of this version, DamageError for a broken one."""
        path = _manifest_path(Path(folder))
        values = read_json(path)
        missing = _required(cls) - set(values) if isinstance(values, dict) else _required(cls)
        if missing:
            raise InputError(f"{path}: is no trace manifest (without {first_few(sorted(missing))})")
        if values["schema"] != SCHEMA_VERSION:
            raise InputError(f"{path}: has trace schema {values['schema']}, this version reads {SCHEMA_VERSION}")
        for key, kind in {"target": TracedTarget, "samples": SampleCounts}.items():
            values[key] = _parsed(kind, values[key], key, path)
        for key, kind in {"prompts": PromptSource, "parts": PartFile, "rejected_parts": PartFile}.items():
            items = values.get(key, [])
            values[key] = [_parsed(kind, item, key, path) for item in (items if isinstance(items, list) else [items])]
        manifest = _of_known(cls, values)
        _require_sense(manifest, path)
        return manifest

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self))


def _manifest_path(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not (folder / MANIFEST).exists():
        unfinished = any(folder.glob(PARTS))
        remedy = "unfinished: run the same ecospec-trace command again" if unfinished else f"it has no {MANIFEST}"
        raise InputError(f"{folder}: is not a complete trace folder ({remedy})")
    return folder / MANIFEST


def _required(kind: type) -> set[str]:
    return {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}


def _parsed(kind: type[T], values: object, key: str, path: Path) -> T:
    missing = _required(kind) - set(values) if isinstance(values, dict) else _required(kind)
    if missing:
        raise _damaged(path, f"{key} without {first_few(sorted(missing))}")
    return _of_known(kind, values)


def _of_known(kind: type[T], values: dict) -> T:
    return kind(**{item.name: values[item.name] for item in fields(kind) if item.name in values})


def _require_sense(manifest: Manifest, path: Path) -> None:
    layers, counts = manifest.moe_layers, [manifest.num_experts, manifest.top_k]
    if not (isinstance(layers, list) and layers and all(isinstance(layer, int) for layer in layers)):
        raise _damaged(path, "moe_layers is no list of numbers")
    if not all(isinstance(count, int) and count > 0 for count in counts) or counts[1] > counts[0]:
        raise _damaged(path, "num_experts and top_k make no sense")
    files = [part.file for part in (*manifest.parts, *manifest.rejected_parts)]
    if not all(isinstance(file, str) for file in files) or len(set(files)) < len(files):
        raise _damaged(path, "parts are listed twice or without a name")


def _damaged(path: Path, why: str) -> DamageError:
    return DamageError(f"{path}: damaged ({why}); delete it and run the same ecospec-trace command again")
