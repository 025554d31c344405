"""`ecospec-decode check`: does everything fit together? Reads configurations and headers, no target weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ecospec.errors import InputError
from ecospec.inference.assemble import MethodPlan
from ecospec.inference.config import DecodingConfig
from ecospec.inference.drafters.kind import Facts
from ecospec.inference.target.support import check_batch, check_tree_support
from ecospec.predictor.kinds.base import FootprintOptions
from ecospec.tracing.target.loading import (
    MoeShape,
    config_hash,
    load_target_config,
    load_tokenizer,
    loading_options,
    shape_of,
)
from ecospec.tracing.target.widening import widen_experts

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the pre-flight: what was looked at, and what it is."""

    what: str
    value: str


def preflight(config: DecodingConfig, plans: Sequence[MethodPlan], batch_sizes: Sequence[int] = (1,)) -> list[Finding]:
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
    _check_batches(batch_sizes, plans, model_config)
    for plan in plans:
        if plan.baseline is None:
            findings += _findings(config, plan, model_config, shape)
    return findings


def _findings(
    config: DecodingConfig, plan: MethodPlan, model_config: PreTrainedConfig, shape: MoeShape
) -> list[Finding]:
    """What is known of a method's parts. Raises InputError when they do not fit the target or each other."""
    facts = plan.drafter_kind.inspect(plan.drafter, config.target, model_config)
    findings = [*_check_drafter(plan, facts), Finding(f"{plan.label}: selection", _rule(plan))]
    if plan.kind:
        options = FootprintOptions(plan.predictor.path, config.traces)
        value = plan.kind.inspect(options, shape, config_hash(model_config), facts.hidden)
        findings.append(Finding(f"{plan.label}: footprints", value))
    return findings


def _rule(plan: MethodPlan) -> str:
    """The selection rule in a line, as results describe it."""
    described = dict(plan.selection.build().describe())
    settings = {"γ": described["gamma"], "ε": described.get("epsilon"), **described.get("options", {})}
    shown = [f"{name} {value}" for name, value in settings.items() if value is not None]
    return ", ".join([described["selection"], *shown])


def _check_batches(sizes: Sequence[int], plans: Sequence[MethodPlan], model_config: PreTrainedConfig) -> None:
    if max(sizes) == 1:
        return
    check_batch(model_config)
    if any(plan.baseline == "hf_greedy" for plan in plans):
        raise InputError("--batch_size: Transformers' own loop (hf_greedy) runs at batch size 1 only; leave it out")


def _memory(config: DecodingConfig, model_config: PreTrainedConfig) -> str:
    """Parameters and memory of the target, widening included.

    Raises InputError where a tree cannot be verified, or the target cannot be loaded as it is asked to be.
    """
    loading_options(config.target, model_config)
    dtype = model_config.dtype if config.target.dtype == "auto" else getattr(torch, config.target.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config,
            dtype=dtype,
            experts_implementation=config.target.experts_implementation,
            trust_remote_code=config.target.trust_remote_code,
        )
        check_tree_support(model)
        if config.target.expert_mib is not None:
            widen_experts(model, config.target.expert_mib)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = parameters * model.dtype.itemsize / GIB
    return f"{parameters / 1e6:.1f} M parameters, {size:.2f} GiB in {str(model.dtype).removeprefix('torch.')}"


def _check_drafter(plan: MethodPlan, facts: Facts) -> list[Finding]:
    """What the drafter is, and what to know about it. Raises InputError when it cannot grow such trees."""
    plan.drafter_kind.check(plan.drafter, facts)
    what, shape = f"{plan.label}: drafter", ", ".join(f"{name} {value}" for name, value in plan.tree.items())
    return [Finding(what, f"{facts.value}; trees of {shape}"), *(Finding(what, note) for note in facts.notes)]
