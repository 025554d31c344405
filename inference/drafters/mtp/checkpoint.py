"""The tensors of a multi-token-prediction (MTP) layer in a checkpoint: where, whether all are there, their values.

Only headers are read until a value is asked for, and only of the shards that hold the layer. Names are those below
`model.layers.{number}.`. FP8 weights come with one scale per block and are read as weight × scale. Knows nothing about
what is computed with them.

Letters: R rows and C columns of a weight, r and c the rows and columns of its blocks (the last ones may be partial).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from ecospec.errors import InputError
from ecospec.files import read_json
from ecospec.inference.drafters.headers import key_faults

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FP8, SCALE = "F8_E4M3", "_scale_inv"  # the dtype's name in a header, the ending of a weight's scales
BLOCK = (128, 128)


class MtpTensors:
    """The tensors of layer `number` of the checkpoint at `source`, a folder or a hub id.

    `shapes` and `dtypes` (as safetensors names them) come from the headers. Raises InputError when there is no
    checkpoint, when it has no such layer, and when a shard cannot be read.
    """

    def __init__(self, source: str | Path, number: int, revision: str | None = None, block: tuple = BLOCK) -> None:
        self.source, self.block = source, block
        self.prefix = f"model.layers.{number}."
        self._revision = revision
        self._shards: dict[Path, safe_open] = {}
        self._files = self._locate()
        if not self._files:
            raise InputError(
                f"{source}: holds no key {self.prefix}*; this checkpoint comes without its multi-token-prediction layer"
            )
        headers = {key: self._shard(file).get_slice(self.prefix + key) for key, file in self._files.items()}
        self.shapes = {key: torch.Size(header.get_shape()) for key, header in headers.items()}
        self.dtypes = {key: header.get_dtype() for key, header in headers.items()}

    def require(self, needed: Mapping[str, torch.Size], optional: Mapping[str, torch.Size]) -> None:
        """Raises one InputError naming every key that is missing, unused or of another shape."""
        expected = {**needed, **{key: shape for key, shape in optional.items() if key in self.shapes}}
        for key in [key for key in expected if self.dtypes.get(key) == FP8]:
            expected[key + SCALE] = self._blocks(expected[key])
        faults = key_faults(expected, self.shapes)
        if faults:
            raise InputError(f"{self.source}: {self.prefix}* is not this model's prediction layer; {faults}")

    def read(self, key: str) -> Tensor:
        """The value of `key` on the CPU, float32 where it is stored in FP8, else in the stored dtype."""
        tensor = self._shard(self._files[key]).get_tensor(self.prefix + key)
        if self.dtypes[key] != FP8:
            return tensor
        scale_rc = self._shard(self._files[key + SCALE]).get_tensor(self.prefix + key + SCALE)
        return dequantise(tensor, scale_rc, self.block)

    def _blocks(self, shape: torch.Size) -> torch.Size:
        return torch.Size(-(-size // block) for size, block in zip(shape, self.block, strict=True))

    def _locate(self) -> dict[str, Path]:
        """The layer's keys, without their prefix, and the file of each."""
        index = self._find(INDEX)
        if index is not None:
            names = read_json(index).get("weight_map", {})
            shards = {name: self._find(name) for key, name in names.items() if key.startswith(self.prefix)}
            absent = sorted(name for name, path in shards.items() if path is None)
            if absent:
                raise InputError(f"{self.source}: its index names {', '.join(absent)}, which cannot be found")
            files = {key: shards[name] for key, name in names.items() if name in shards}
        else:
            single = self._find(SINGLE)
            if single is None:
                raise InputError(f"{self.source}: no checkpoint there (neither {INDEX} nor {SINGLE})")
            files = dict.fromkeys(self._shard(single).keys(), single)
        return {key.removeprefix(self.prefix): file for key, file in files.items() if key.startswith(self.prefix)}

    def _find(self, name: str) -> Path | None:
        folder = Path(self.source)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        try:
            return Path(cached_file(str(self.source), name, revision=self._revision))
        except OSError:  # what it raises for an unknown hub id and for one without this file
            return None

    def _shard(self, path: Path) -> safe_open:
        if path not in self._shards:
            try:
                self._shards[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: cannot be read ({error})") from None
        return self._shards[path]


def dequantise(weight_RC: Tensor, scale_rc: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Each weight times the scale of its block, float32 [R, C]."""
    R, C = weight_RC.shape
    scale_RC = scale_rc.float().repeat_interleave(block[0], 0)[:R].repeat_interleave(block[1], 1)[:, :C]
    return weight_RC.float() * scale_RC


def block_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Rows and columns of an FP8 block, as the model's configuration says, else 128 × 128."""
    quantisation = getattr(config, "quantization_config", None) or {}
    values = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    return tuple(values.get("weight_block_size") or BLOCK)
