"""`ecospec-decode check`: does everything fit together? Reads configurations and headers, no target weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ecospec.errors import InputError
from ecospec.inference.assemble import (
    COUNTED,
    MethodPlan,
    draft_model_source,
    mtp_source,
    open_traces,
    plan_methods,
)
from ecospec.inference.config import DecodeConfig, DrafterConfig
from ecospec.inference.drafters.base import NO_HIDDEN
from ecospec.inference.drafters.draft_lm.head import inspect_language_model
from ecospec.inference.drafters.eagle3.checkpoint import inspect_head
from ecospec.inference.drafters.headers import safetensors_shapes
from ecospec.inference.drafters.mtp.head import inspect_mtp
from ecospec.inference.target.support import check_batch, check_tree_support
from ecospec.predictor.kinds.loading import predictor_values, require_target
from ecospec.tracing.target.loading import (
    MoeShape,
    config_hash,
    load_target_config,
    load_tokenizer,
    loading_options,
    shape_of,
)
from ecospec.tracing.target.names import part_folder, resolve_target
from ecospec.tracing.target.widening import widen_experts

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the pre-flight: what was looked at, and what it is."""

    what: str
    value: str


@dataclass(frozen=True)
class Drafter:
    """What a drafter is, tokens in its vocabulary, width of its hidden input (None where it has none), and notes."""

    value: str
    vocabulary: int | None = None
    hidden: int | None = None
    notes: Sequence[str] = ()


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
            drafter = _DRAFTERS[plan.drafter.kind](config, plan.drafter, model_config)
            findings += _check_drafter(plan, drafter)
            if plan.needs_footprints:
                value = _check_footprints(config, plan, model_config, shape, drafter)
                findings.append(Finding(f"{plan.label}: footprints", value))
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


def _check_drafter(plan: MethodPlan, drafter: Drafter) -> list[Finding]:
    """What the drafter is, and what to know about it. Raises InputError when it cannot grow such trees."""
    if drafter.vocabulary is not None and plan.drafter.topk > drafter.vocabulary:
        raise InputError(f"--drafter.topk {plan.drafter.topk}: the head has only {drafter.vocabulary} tokens")
    what = f"{plan.label}: drafter"
    return [Finding(what, drafter.value), *(Finding(what, note) for note in drafter.notes)]


def _inspect_eagle3(_config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> Drafter:
    folder = part_folder(drafter.path, "drafter")
    spec = inspect_head(folder, target, drafter.feature_layers, drafter.rope_theta)
    D = spec.config.draft_vocab_size
    value = f"{folder}, {spec.writer}, draft vocabulary {D}, layers {list(spec.feature_layers)}"
    return Drafter(value, D, spec.config.hidden_size, spec.notes)


def _inspect_mtp(config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> Drafter:
    source = mtp_source(drafter, resolve_target(config.target.name))
    summary = inspect_mtp(source, target, config.target.revision)
    value = f"MTP layer {summary.number} of {source}, {summary.weights / 1e6:.1f} M weights"
    return Drafter(value, target.vocab_size, target.hidden_size)


def _inspect_draft_lm(config: DecodeConfig, drafter: DrafterConfig, target: PreTrainedConfig) -> Drafter:
    vocab_size = target.get_text_config().vocab_size
    tokenizer = load_tokenizer(config.target, vocab_size)
    draft, _ = inspect_language_model(draft_model_source(drafter), vocab_size, tokenizer)
    return Drafter(f"{drafter.path} ({draft.model_type})", draft.get_text_config().vocab_size)


def _inspect_lookup(_config: DecodeConfig, _drafter: DrafterConfig, _target: PreTrainedConfig) -> Drafter:
    return Drafter("earlier occurrences in the text")


_DRAFTERS = {
    "eagle3": _inspect_eagle3,
    "mtp": _inspect_mtp,
    "draft_lm": _inspect_draft_lm,
    "prompt_lookup": _inspect_lookup,
}


def _check_footprints(
    config: DecodeConfig, plan: MethodPlan, model_config: PreTrainedConfig, shape: MoeShape, drafter: Drafter
) -> str:
    """What the footprint source is. Raises InputError when target or drafter are not those it is made for."""
    if plan.footprints == "last_step":
        return "last_step, the experts of the token before the root"
    if plan.footprints in COUNTED:
        traces = open_traces(config.traces, shape.counts, config_hash(model_config))
        return f"{plan.footprints}, counted from {traces.folder}"
    values = predictor_values(plan.trained_folder, plan.footprints)
    require_target(plan.predictor.path, values, shape, config_hash(model_config))
    fed = f", fed the drafter's hidden {_hidden(plan, values, drafter)}" if plan.footprints == "draft_mlp" else ""
    weights = safetensors_shapes(plan.trained_folder / "model.safetensors").values()
    count = sum(torch.Size(size).numel() for size in weights) / 1e6
    return f"{plan.trained_folder}, {count:.2f} M weights, trained for {values.get('target')}{fed}"


def _hidden(plan: MethodPlan, values: dict, drafter: Drafter) -> int:
    """Width of what the drafter is fed. Raises InputError where it is not what the model of `values` reads."""
    if drafter.hidden is None:
        raise InputError(NO_HIDDEN)
    if values.get("draft_size") != drafter.hidden:
        raise InputError(
            f"--predictor.path {plan.predictor.path}: reads {values.get('draft_size')} hidden values of a draft head, "
            f"this drafter has {drafter.hidden}; take the one that was trained on it"
        )
    return drafter.hidden
