"""`ecospec-decode check`: does everything fit together? Reads configurations and headers, no target weights."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ecospec.configs.errors import InputError
from ecospec.inference.assemble import (
    MethodPlan,
    check_moe,
    draft_model_source,
    mtp_source,
    open_traces,
    plan_methods,
)
from ecospec.inference.config import DecodeConfig, DrafterConfig
from ecospec.inference.drafters.eagle3_checkpoint import inspect_head
from ecospec.inference.drafters.headers import safetensors_shapes
from ecospec.inference.drafters.language_model import inspect_language_model
from ecospec.inference.drafters.mtp import inspect_mtp
from ecospec.inference.verification import check_batch, check_tree_support
from ecospec.predictor.loading import predictor_values
from ecospec.tracing.target import (
    MoeShape,
    config_hash,
    load_target_config,
    load_tokenizer,
    loading_options,
    part_folder,
    resolve_target,
    shape_of,
)
from ecospec.tracing.widening import widen_experts

GIB = 2**30


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
        Finding("weights", _memory(config, model_config)),
    ]
    plans = plan_methods(config)
    _check_batches(config, plans, model_config)
    for plan in plans:
        if plan.baseline is None:
            findings += _check_drafter(config, plan, model_config)
        if plan.needs_footprints:
            findings.append(Finding(f"{plan.label}: footprints", _check_footprints(config, plan, model_config, shape)))
    return findings


def _check_batches(config: DecodeConfig, plans: list[MethodPlan], model_config: PreTrainedConfig) -> None:
    if max(config.batch_size) == 1:
        return
    check_batch(model_config)
    if any(plan.baseline == "hf_greedy" for plan in plans):
        raise InputError("--batch_size: Transformers' own loop (hf_greedy) runs at batch size 1 only; leave it out")


def _memory(config: DecodeConfig, model_config: PreTrainedConfig) -> str:
    """Parameters and memory of the target, widening included.

    Raises InputError where a tree cannot be verified, or the target cannot be loaded as it is asked to be.
    """
    loading_options(config.target, model_config)
    dtype = model_config.dtype if config.target.dtype == "auto" else getattr(torch, config.target.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, trust_remote_code=config.target.trust_remote_code
        )
        check_tree_support(model)
        if config.target.expert_mib is not None:
            widen_experts(model, config.target.expert_mib)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = parameters * model.dtype.itemsize / GIB
    return f"{parameters / 1e6:.1f} M parameters, {size:.2f} GiB in {str(model.dtype).removeprefix('torch.')}"


def _check_drafter(config: DecodeConfig, plan: MethodPlan, model_config: PreTrainedConfig) -> list[Finding]:
    """What the drafter is, and what to know about it. Raises InputError when it does not fit the target."""
    value, vocabulary, notes = _DRAFTERS[plan.drafter.kind](config, plan.drafter, model_config)
    if vocabulary is not None and plan.drafter.topk > vocabulary:
        raise InputError(f"--drafter.topk {plan.drafter.topk}: the head has only {vocabulary} tokens")
    what = f"{plan.label}: drafter"
    return [Finding(what, value), *(Finding(what, note) for note in notes)]


def _inspect_eagle3(_config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> tuple:
    folder = part_folder(drafter.path, "drafter")
    spec = inspect_head(folder, target, drafter.feature_layers, drafter.rope_theta)
    D = spec.config.draft_vocab_size
    return f"{folder}, {spec.writer}, draft vocabulary {D}, layers {list(spec.feature_layers)}", D, spec.notes


def _inspect_mtp(config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> tuple:
    source = mtp_source(drafter, resolve_target(config.target.name))
    summary = inspect_mtp(source, target, config.target.revision)
    return f"MTP layer {summary.number} of {source}, {summary.weights / 1e6:.1f} M weights", target.vocab_size, []


def _inspect_draft_lm(config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> tuple:
    vocab_size = target.get_text_config().vocab_size
    tokenizer = load_tokenizer(config.target, vocab_size)
    draft, _ = inspect_language_model(draft_model_source(drafter), vocab_size, tokenizer)
    return f"{drafter.path} ({draft.model_type})", draft.get_text_config().vocab_size, []


def _inspect_lookup(_config: DecodeConfig, _drafter: DrafterConfig, _target: PreTrainedConfig) -> tuple:
    return "earlier occurrences in the text", None, []


_DRAFTERS = {
    "eagle3": _inspect_eagle3,
    "mtp": _inspect_mtp,
    "draft_lm": _inspect_draft_lm,
    "prompt_lookup": _inspect_lookup,
}


def _check_footprints(config: DecodeConfig, plan: MethodPlan, model_config: PreTrainedConfig, shape: MoeShape) -> str:
    if plan.selection.footprints != "predictor":
        traces = open_traces(config.traces, shape.counts, config_hash(model_config))
        return f"{plan.selection.footprints}, counted from {traces.folder}"
    path = plan.predictor.path
    folder = part_folder(path, "predictor")
    _, values = predictor_values(folder)
    found = tuple(values.get(key) for key in ("num_layers", "num_experts", "num_experts_per_tok"))
    check_moe(f"--predictor.path {path}", found, shape.counts)
    identity = {
        "target_config_sha256": config_hash(model_config),
        "moe_layers": list(shape.layers),
        "vocab_size": shape.vocab_size,
        "embedding_size": shape.hidden_size,
    }
    different = [key for key, value in identity.items() if values.get(key) != value]
    if different:
        raise InputError(f"--predictor.path {path}: trained for another target ({', '.join(different)} differ)")
    weights = sum(torch.Size(size).numel() for size in safetensors_shapes(folder / "model.safetensors").values())
    return f"{folder}, {weights / 1e6:.2f} M weights, trained for {values.get('target')}"
