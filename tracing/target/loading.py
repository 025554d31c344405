"""Load a MoE target: refuse what cannot work before any weight is read, widen where asked."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError, brief, first_few
from ecospec.files import sha256_file, sha256_json
from ecospec.hub import hub_or_cache
from ecospec.tracing.target.checkpoint import Checkpoint
from ecospec.tracing.target.fp8 import by_blocks, quantization_of
from ecospec.tracing.target.names import resolve_target
from ecospec.tracing.target.replicas import model_parallel_size, split_options
from ecospec.tracing.target.routers import find_sites, top_k_of
from ecospec.tracing.target.widening import widen_experts

PLACEMENTS = r"auto|balanced|balanced_low_0|sequential|cpu|mps|(cuda|xpu|npu|hpu)(:\d+)?"
HASHED_BYTES = 2**30  # larger weights are known by their files' names and sizes


@dataclass(frozen=True)
class MoeShape:
    """What of a target the whole pipeline must agree on: `layers` are the L MoE layers' own numbers.

    `num_layers` counts all decoder layers, dense ones included.
    """

    family: str
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    vocab_size: int
    hidden_size: int
    num_layers: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """(L, E, K)."""
        return len(self.layers), self.num_experts, self.top_k


@dataclass(frozen=True)
class Target:
    """A loaded target. `name` is what the user called it, `path` where it came from."""

    name: str
    path: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    shape: MoeShape
    config_sha256: str


def load_target_config(config: TargetConfig) -> PreTrainedConfig:
    """The model's own configuration. Raises InputError for a folder or hub id that has none."""
    path = resolve_target(config.name)
    try:
        with hub_or_cache(path):
            return AutoConfig.from_pretrained(
                path, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--target.name {config.name}: cannot read a model configuration ({brief(error)})") from None


def shape_of(model_config: PreTrainedConfig, trust_remote_code: bool = False) -> MoeShape:
    """The MoE shape from a configuration alone, on the meta device.

    Raises InputError for a dense model, and for one that is no causal language model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        where = model_config.name_or_path or model_config.model_type
        raise InputError(f"{where}: not a causal language model that Transformers can build ({brief(error)})") from None
    sites = find_sites(model)
    text = model_config.get_text_config()
    return MoeShape(
        family=text.model_type,
        layers=tuple(site.layer for site in sites),
        num_experts=sites[0].num_experts,
        top_k=top_k_of(model_config),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
    )


def context_of(model_config: PreTrainedConfig) -> int | None:
    """The most tokens that a target of this configuration can read, where it says so."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)


def load_target(config: TargetConfig) -> Target:
    """Load model and tokenizer. Raises InputError for a dense, unsupported, weightless or mismatched target."""
    path = resolve_target(config.name)
    model_config = load_target_config(config)
    shape = shape_of(model_config, config.trust_remote_code)
    if Path(path).is_dir():
        checkpoint_of(config).files()
    tokenizer = load_tokenizer(config, shape.vocab_size)
    model = load_model(
        path,
        f"--target.name {config.name}",
        model_config,
        revision=config.revision,
        dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        experts_implementation=config.experts_implementation,
        trust_remote_code=config.trust_remote_code,
        **loading_options(config, model_config),
    )
    if config.expert_mib is not None:
        widen_experts(model, config.expert_mib)
    if config.device_map is None and model_parallel_size(config) == 1:
        model.to(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    return Target(config.name, path, model, tokenizer, shape, config_hash(model_config))


def load_model(
    path: str | Path, where: str, config: PreTrainedConfig, revision: str | None = None, **options: object
) -> nn.Module:
    """A causal language model of this configuration with all its weights.

    Raises InputError, naming `where`, for absent or broken weights, and for FP8 ones that do not fit their scales.
    """
    Checkpoint(path, revision, where).require_blocks()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, config=by_blocks(config), revision=revision, output_loading_info=True, **options
        )
    except SafetensorError as error:
        raise InputError(f"{where}: its weights cannot be read ({error}); fetch the checkpoint again") from None
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise InputError(f"{where}: the checkpoint lacks weights that its config.json promises ({first_few(absent)})")
    return model.eval()


def loading_options(config: TargetConfig, model_config: PreTrainedConfig) -> dict:
    """Options of `from_pretrained` for placing and dequantizing weights.

    Raises InputError for a placement that Transformers does not know, a split that the running processes cannot make,
    and where nothing can be dequantized.
    """
    split = split_options(config, model_config)
    if split and (config.device_map is not None or config.expert_mib is not None):
        raise InputError("--target.tp_size and ep_size place the weights: leave out device_map and expert_mib")
    if config.device_map is not None and not re.fullmatch(PLACEMENTS, config.device_map):
        raise InputError(
            f"--target.device_map {config.device_map}: give auto, balanced, sequential, or a device (cuda:0)"
        )
    if (config.device_map or "").startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"--target.device_map {config.device_map}: PyTorch finds no such device here; leave it out")
    placement = {"device_map": config.device_map} | split
    if not config.dequantize:
        return placement
    method = quantization_of(model_config).get("quant_method")
    kinds = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    if method not in kinds:
        raise InputError(
            f"--target.dequantize: {config.name} holds {method or 'plain weights'}, not FP8 or MXFP4; leave it out"
        )
    return placement | {"quantization_config": kinds[method](dequantize=True)}


def config_hash(model_config: PreTrainedConfig) -> str:
    """sha256 of the model's configuration without what depends on library versions or on where it lies."""
    values = model_config.to_dict()
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        values.pop(key, None)
    return sha256_json(values)


def weights_hash(config: TargetConfig) -> str | None:
    """sha256 over names and contents of a folder's weight files, of names and sizes above 1 GiB; None for a hub id.

    Raises InputError when the folder has no weights.
    """
    checkpoint = checkpoint_of(config)
    if not Path(checkpoint.source).is_dir():
        return None
    files = checkpoint.files()
    sizes = {file.name: file.stat().st_size for file in files}
    small = sum(sizes.values()) <= HASHED_BYTES
    return sha256_json({file.name: sha256_file(file) for file in files} if small else sizes)


def load_tokenizer(config: TargetConfig, vocab_size: int) -> PreTrainedTokenizerBase:
    """Raises InputError when there is none, an empty one, or one with ids that the model does not know."""
    path = resolve_target(config.name)
    try:
        with hub_or_cache(path):
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise InputError(f"--target.name {config.name}: no usable tokenizer ({brief(error)})") from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise InputError(f"--target.name {config.name}: its tokenizer has no vocabulary; add the tokenizer's files")
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"--target.name {config.name}: its tokenizer has {len(tokenizer)} tokens but the model only {vocab_size}; "
            "the folder holds a tokenizer of another model"
        )
    return tokenizer


def checkpoint_of(config: TargetConfig) -> Checkpoint:
    """The weights of a target, wherever they are."""
    return Checkpoint(resolve_target(config.name), config.revision, f"--target.name {config.name}")


def check_moe(what: str, found: tuple[int, int, int], expected: tuple[int, int, int]) -> None:
    """Raises InputError unless (L, E, K) are the target's."""
    if found != expected:
        raise InputError(
            f"{what}: made for a target with {found[0]} MoE layers of {found[1]} experts, top-{found[2]}; "
            f"this target has {expected[0]} of {expected[1]}, top-{expected[2]}"
        )
