"""`ecospec-decode check`: does everything fit together? Reads configurations and headers, no target weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ecospec.configs.errors import InputError
from ecospec.configs.files import read_json
from ecospec.inference.assemble import check_moe, part_folder, plan_methods
from ecospec.inference.config import DecodeConfig
from ecospec.inference.drafters.eagle3 import default_feature_layers
from ecospec.inference.verification import check_tree_support
from ecospec.tracing.target import MoeShape, load_target_config, load_tokenizer, shape_of
from ecospec.tracing.widening import widened_width

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the pre-flight: what was looked at, and what it is."""

    what: str
    value: str


def preflight(config: DecodeConfig) -> list[Finding]:
    """All findings. Raises InputError at the first part that does not fit, naming it and the remedy."""
    model_config = load_target_config(config.target)
    shape = shape_of(model_config, config.target.trust_remote_code)
    tokenizer = load_tokenizer(config.target, shape.vocab_size)
    findings = [
        Finding("target", f"{config.target.name} ({shape.family})"),
        Finding("MoE layers", f"{len(shape.layers)} of {shape.num_experts} experts, top-{shape.top_k}"),
        Finding("tokenizer", f"{len(tokenizer)} tokens for {shape.vocab_size} embeddings"),
        Finding("weights", _memory(config, model_config, shape)),
    ]
    for plan in plan_methods(config):
        if plan.baseline is None:
            findings.append(Finding(f"{plan.label}: drafter", _check_drafter(plan.drafter.path, model_config, shape)))
        if plan.needs_footprints and plan.selection.footprints == "predictor":
            findings.append(Finding(f"{plan.label}: predictor", _check_predictor(plan.predictor.path, shape)))
    return findings


def _memory(config: DecodeConfig, model_config: PreTrainedConfig, shape: MoeShape) -> str:
    """Parameters and memory of the target, widening included. Raises InputError where a tree cannot be verified."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.target.trust_remote_code)
    check_tree_support(model)
    dtype = config.target.dtype if config.target.dtype != "auto" else str(model.dtype).removeprefix("torch.")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.target.expert_mib is not None:
        width = widened_width(shape.hidden_size, config.target.expert_mib, BYTES[dtype])
        experts = len(shape.layers) * shape.num_experts * 3 * shape.hidden_size
        parameters += experts * (width - model_config.get_text_config().moe_intermediate_size)
    return f"{parameters / 1e6:.1f} M parameters, {parameters * BYTES[dtype] / GIB:.2f} GiB in {dtype}"


def _check_drafter(path: str | None, model_config: PreTrainedConfig, shape: MoeShape) -> str:
    folder = part_folder(path, "drafter")
    values = read_json(folder / "config.json")
    layers = default_feature_layers(model_config.get_text_config().num_hidden_layers)
    if values.get("vocab_size") != shape.vocab_size:
        raise InputError(
            f"--drafter.path {path}: made for {values.get('vocab_size')} tokens, this target has {shape.vocab_size}"
        )
    fc = _shapes(folder / "model.safetensors").get("fc.weight")
    if fc is None or fc[1] != 3 * shape.hidden_size:
        raise InputError(
            f"--drafter.path {path}: its fc takes {fc and fc[1]} features, this target gives {3 * shape.hidden_size}"
        )
    return f"{folder}, draft vocabulary {values['draft_vocab_size']}, hidden states {list(layers)}"


def _check_predictor(path: str | None, shape: MoeShape) -> str:
    folder = part_folder(path, "predictor")
    values = read_json(folder / "config.json")
    found = (values.get("num_layers"), values.get("num_experts"), values.get("num_experts_per_tok"))
    check_moe(f"--predictor.path {path}", found, shape)
    if (values["vocab_size"], values["embedding_size"]) != (shape.vocab_size, shape.hidden_size):
        raise InputError(f"--predictor.path {path}: its embedding table has another shape than this target's")
    weights = sum(torch.Size(size).numel() for size in _shapes(folder / "model.safetensors").values())
    return f"{folder}, {weights / 1e6:.2f} M weights, trained for {values['target']}"


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes from the header of a safetensors file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
