"""The weights of a checkpoint, a folder's or the hub's: which files, which tensors in which shapes, their values.

Safetensors or PyTorch files (`.bin`, of which nothing but tensors is read), in one file or in shards with an index.
Values are read only when asked for, and of shards only those are opened (or fetched) that hold what is asked for. FP8
weights come with one scale per block and are read as weight × scale. Knows nothing about models.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, cached_files

from ecospec.errors import InputError, brief, first_few
from ecospec.files import read_json
from ecospec.hub import hub_or_cache
from ecospec.tracing.target import fp8

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # what the name of an index adds to that of the weights
FP8 = ("F8_E4M3", "F8_E5M2")  # as safetensors names types
NAMES = dict(zip(fp8.TYPES, FP8, strict=True)) | {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Shape = tuple[int, ...]


class Checkpoint:
    """The weights at `source`, a folder or a hub id, the latter at `revision`.

    `name` is what messages call it, `block` the size of FP8 blocks where its own config.json names none. Every method
    raises InputError where there are no weights, and naming the file where one is absent or cannot be read.
    """

    def __init__(
        self,
        source: str | Path,
        revision: str | None = None,
        name: str | None = None,
        block: fp8.Block | None = None,
    ) -> None:
        self.source = source
        self.name = name or str(source)
        self._revision = revision
        self._block = block
        self._shards: dict[str, _Shard] = {}
        self._refusal = ""  # what the hub said last

    def files(self) -> list[Path]:
        """The files of the weights: one, or the shards that an index names. None is opened."""
        return self._paths(sorted(set(self._index.values()))) if self._is_sharded else [self._main]

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def shapes(self, prefix: str = "") -> dict[str, Shape]:
        """Shape of each tensor whose key begins with `prefix`, by key."""
        return {key: shard.shape(key) for key, shard in self._holders(prefix).items()}

    def dtypes(self, prefix: str = "") -> dict[str, str]:
        """Stored type of each tensor whose key begins with `prefix`, by key, as safetensors names types."""
        return {key: shard.dtype(key) for key, shard in self._holders(prefix).items()}

    def read(self, key: str) -> Tensor:
        """A tensor on the CPU, float32 where it is stored in FP8, else in the stored type.

        Raises InputError for an absent key, and where an FP8 tensor has no scales, or none that fit it.
        """
        tensor = self._value(key)
        if tensor.dtype not in fp8.TYPES:
            return tensor
        try:
            return fp8.dequantize_blocks(tensor, self._value(key + fp8.SCALE), self.block)
        except ValueError as error:
            raise InputError(f"{self.name}: {key}: {error}; see weight_block_size in its config.json") from None

    def read_all(self) -> dict[str, Tensor]:
        """Every tensor by key, as `read` gives it; the scales of FP8 tensors are left out."""
        scales = {key + fp8.SCALE for key in self._places}
        return {key: self.read(key) for key in self._places if key not in scales}

    def require_blocks(self) -> None:
        """Raises InputError naming FP8 tensors whose scales are not one for each block of the size that is named."""
        if self.block is None:
            return
        shapes, dtypes = self.shapes(), self.dtypes()
        scales = {key: shapes[key + fp8.SCALE] for key in shapes if key + fp8.SCALE in shapes and dtypes[key] in FP8}
        wrong = [
            f"{key} {list(shapes[key])} with {list(grid)} scales"
            for key, grid in scales.items()
            if grid != fp8.grid_of(shapes[key], self.block)
        ]
        if wrong:
            raise InputError(
                f"{self.name}: FP8 weights have not one scale for each block of {list(self.block)} (weight_block_size "
                f"in config.json): {first_few(wrong)}"
            )

    @cached_property
    def block(self) -> fp8.Block | None:
        """Rows and columns of an FP8 block, as config.json says; None where nothing does."""
        config = self._find("config.json")
        values = read_json(config) if config else {}
        groups = [group for group in (values, values.get("text_config")) if isinstance(group, dict)]
        named = [fp8.block_of(group.get("quantization_config") or {}) for group in groups]
        return next(filter(None, named), self._block)

    @cached_property
    def _main(self) -> Path:
        """The one file of the weights, or the index of its shards."""
        for name in (name for weights in WEIGHTS for name in (weights, weights + INDEX)):
            path = self._find(name)
            if path is not None:
                return path
        why = "" if Path(self.source).is_dir() else f"; {self._refusal}"
        raise InputError(f"{self.name}: holds no weights ({' or '.join(WEIGHTS)}, or shards and their index{why})")

    @property
    def _is_sharded(self) -> bool:
        return self._main.name.endswith(INDEX)

    @cached_property
    def _index(self) -> dict[str, str]:
        """Key → name of the shard that holds it."""
        values = read_json(self._main)
        if not isinstance(values, dict) or not isinstance(values.get("weight_map"), dict):
            raise InputError(f"{self._main}: is no index of weights (no weight_map)")
        return values["weight_map"]

    @cached_property
    def _places(self) -> dict[str, str]:
        """Key → name of the file that holds it."""
        if self._is_sharded:
            return self._index
        name = self._main.name
        return dict.fromkeys(self._opened([name])[name].keys, name)

    def _holders(self, prefix: str) -> "dict[str, _Shard]":
        """The open file of each key that begins with `prefix`."""
        places = {key: name for key, name in self._places.items() if key.startswith(prefix)}
        shards = self._opened(sorted(set(places.values())))
        absent = [key for key, name in places.items() if key not in shards[name].keys]
        if absent:
            raise InputError(f"{self.name}: its index names tensors that its files do not hold: {first_few(absent)}")
        return {key: shards[name] for key, name in places.items()}

    def _value(self, key: str) -> Tensor:
        name = self._places.get(key)
        shard = self._opened([name])[name] if name else None
        if shard is None or key not in shard.keys:
            raise InputError(f"{shard.path if shard else self.name}: holds no tensor {key}")
        return shard.read(key)

    def _opened(self, names: list[str]) -> "dict[str, _Shard]":
        unopened = [name for name in names if name not in self._shards]
        for name, path in zip(unopened, self._paths(unopened), strict=True):
            with _readable(path):
                self._shards[name] = _Pickle(path) if path.suffix == ".bin" else _Safetensors(path)
        return {name: self._shards[name] for name in names}

    def _paths(self, names: list[str]) -> list[Path]:
        """Local paths, fetched in one go where the source is a hub id."""
        if not names:
            return []
        try:
            with hub_or_cache(self.source):
                return [Path(path) for path in cached_files(str(self.source), names, revision=self._revision)]
        except OSError:  # what it raises for a file that is absent, or that the hub does not give
            absent = [name for name in names if self._find(name) is None]
            raise InputError(f"{self.name}: its index names {first_few(absent)}, which cannot be found") from None

    def _find(self, name: str) -> Path | None:
        try:
            with hub_or_cache(self.source):
                path = cached_file(str(self.source), name, revision=self._revision)
        except OSError as error:  # what it raises for an unknown hub id and for one without this file
            self._refusal = brief(error)
            return None
        return Path(path) if path else None


class _Safetensors:
    """One safetensors file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = safe_open(path, framework="pt")
        self.keys = dict.fromkeys(self._file.keys())

    def shape(self, key: str) -> Shape:
        return tuple(self._file.get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        return self._file.get_slice(key).get_dtype()

    def read(self, key: str) -> Tensor:
        with _readable(self.path):
            return self._file.get_tensor(key)


class _Pickle:
    """One PyTorch file of tensors by name; its values are read all at once, when the first is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys = self._load("meta")

    def shape(self, key: str) -> Shape:
        return tuple(self.keys[key].shape)

    def dtype(self, key: str) -> str:
        return NAMES.get(self.keys[key].dtype, str(self.keys[key].dtype))

    def read(self, key: str) -> Tensor:
        return self._tensors[key]

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return self._load("cpu")

    def _load(self, device: str) -> dict[str, Tensor]:
        with _readable(self.path):
            content = torch.load(self.path, device, weights_only=True)
        if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
            raise InputError(f"{self.path}: does not hold tensors by name")
        return content


_Shard = _Safetensors | _Pickle


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what reading a file may raise into one InputError that names it."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}: cannot be read ({brief(error)})") from None


def key_faults(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """The keys that are missing, unused or of another shape, the first few of each; empty where all fits."""
    faults = {
        "missing keys": sorted(expected.keys() - found.keys()),
        "unused keys": sorted(found.keys() - expected.keys()),
        "wrong shapes": [
            f"{key} {list(found[key])} instead of {list(expected[key])}"
            for key in sorted(expected.keys() & found.keys())
            if tuple(found[key]) != tuple(expected[key])
        ],
    }
    return "; ".join(f"{what}: {first_few(keys)}" for what, keys in faults.items() if keys)
