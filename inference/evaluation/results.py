"""From outcomes to the run folder: the keys of `results.json`, and `steps.parquet` with a row a step."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ecospec.files import replace_file
from ecospec.inference.assemble import MethodPlan
from ecospec.inference.config import EvalConfig
from ecospec.inference.decoding.statistics import PHASES, Step
from ecospec.inference.evaluation.evaluate import Outcome
from ecospec.inference.evaluation.lossless import Difference
from ecospec.tracing.target.loading import Target
from ecospec.tracing.target.requests import in_chat_template

RESAMPLES = 1000
_TIMES = (*(f"t_{phase}" for phase in PHASES), "t_other", "t_step")


def summarise(
    config: EvalConfig,
    target: Target,
    plans: list[MethodPlan],
    outcomes: list[Outcome],
    differences: dict[tuple, list[Difference]],
    seen: set[str],
) -> list[dict]:
    """One run (contract: `results.json`) per batch size, temperature, data set and method, in that order.

    `seen` holds the data sets that anything in use was trained or fitted on.
    """
    groups: dict[tuple, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    labels = [plan.label for plan in plans]
    plain = next(plan.label for plan in plans if plan.baseline == "none")
    runs = []
    for key in sorted(groups, key=lambda key: (*key[:3], labels.index(key[3]))):
        size, temperature, dataset, _ = key
        group, reference = groups[key], groups[*key[:3], plain]
        runs.append(
            _identity(config, target, group[0].plan)
            | {"dataset": dataset, "seen": dataset in seen, "temperature": temperature, "batch_size": size}
            | {"chat_template": in_chat_template(group[0].prompts[0], target.tokenizer, config.chat_template)}
            | _speed(group, reference)
            | _steps([step for outcome in group for step in outcome.run.steps])
            | {"lossless": _lossless(group[0].plan, differences.get(key, []))}
        )
    return runs


def write_steps(path: Path, outcomes: list[Outcome]) -> None:
    """`steps.parquet`: a row for each text of each step: what was decoded, then what the step measured."""
    table = pa.Table.from_pylist([row for outcome in outcomes for row in _step_rows(outcome)])
    replace_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def _step_rows(outcome: Outcome) -> Iterator[dict]:
    for number, step in enumerate(outcome.run.steps):
        times = step.clock.seconds() if step.clock else dict.fromkeys(PHASES)
        shared = {
            "active_experts": step.active_by_layer(),
            **{f"t_{phase}": seconds for phase, seconds in times.items()},
            "t_step": step.clock and step.clock.total(),
        }
        for row, emitted, verified in zip(step.rows, step.emitted, step.verified, strict=True):
            yield {
                "label": outcome.plan.label,
                "dataset": outcome.dataset,
                "temperature": outcome.temperature,
                "batch_size": outcome.batch_size,
                "prompt": outcome.prompts[row].sample_id,
                "row": row,
                "step": number,
                "emitted": emitted,
                "verified": verified,
            } | shared


def _identity(config: EvalConfig, target: Target, plan: MethodPlan) -> dict:
    """What was run: the keys that do not depend on a measurement."""
    chosen = dict.fromkeys(("selection", "gamma", "epsilon")) if plan.baseline else plan.selection.build().describe()
    return {
        "label": plan.label,
        "drafter": plan.baseline or plan.drafter.kind,
        "selection": chosen["selection"],
        "footprints": plan.footprints,
        "predictor": folder_name(plan.predictor.path) if plan.kind and plan.kind.trained else None,
        "gamma": chosen["gamma"],
        "epsilon": chosen.get("epsilon"),
        "tree": plan.tree,
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "expert_mib": config.target.expert_mib,
        "threads": torch.get_num_threads(),
        "target": target.name,
        "num_experts": target.shape.num_experts,
        "top_k": target.shape.top_k,
        "moe_layers": list(target.shape.layers),
    }


def folder_name(path: str) -> str:
    """What results call a predictor: its folder's own name."""
    return Path(path).name


def _speed(group: list[Outcome], reference: list[Outcome]) -> dict:
    """Tokens per second after prefill, and its ratio to plain decoding with a 95 % bootstrap interval over prompts."""
    tokens, seconds = _tokens_and_seconds(group)
    plain_tokens, plain_seconds = _tokens_and_seconds(reference)
    picks = np.random.default_rng(0).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    rates, plain_rates = (
        t[picks].sum(1) / s[picks].sum(1) for t, s in ((tokens, seconds), (plain_tokens, plain_seconds))
    )
    ratios_R = rates[plain_rates > 0] / plain_rates[plain_rates > 0]
    rate, plain_rate = tokens.sum() / seconds.sum(), plain_tokens.sum() / plain_seconds.sum()
    measured = tokens.sum() > 0  # not where prefill gave every text's only token
    return {
        "samples": sum(len(outcome.prompts) for outcome in group),
        "tokens": sum(outcome.run.new_tokens for outcome in group),
        "tokens_per_second": float(rate) if measured else None,
        "speedup_vs_ar": float(rate / plain_rate) if measured else None,
        "interval": _interval(ratios_R) if measured and len(group) > 1 else None,
        "decode_seconds": float(seconds.sum()),
        "prefill_seconds": float(np.mean([outcome.run.prefill_seconds for outcome in group])),
    }


def _interval(ratios_R: np.ndarray) -> list[float]:
    return [float(edge) for edge in np.percentile(ratios_R, [2.5, 97.5])]


def _tokens_and_seconds(group: list[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Decoded tokens (prefill's own not counted) and seconds of each batch; texts of one token count for nothing."""
    tokens = np.array([outcome.run.new_tokens - len(outcome.prompts) for outcome in group], float)
    seconds = np.array([outcome.run.decode_seconds for outcome in group])
    return tokens, np.maximum(seconds, 1e-9)


def _steps(steps: list[Step]) -> dict:
    """Means over steps; null where every text ended with the token that prefill gave."""
    if not steps:
        names = ["acceptance_length", "acceptance_by_depth", "active_experts", "active_experts_by_layer"]
        names += ["verified_tokens_per_step", *_TIMES]
        return {"steps": 0} | dict.fromkeys(names)
    active_NL = np.array([step.active_by_layer() for step in steps])
    emitted = np.array([count for step in steps for count in step.emitted])
    return {
        "steps": len(steps),
        "acceptance_length": float(emitted.mean()),
        "acceptance_by_depth": [float((emitted > depth).mean()) for depth in range(1, int(emitted.max()))],
        "active_experts": float(active_NL.mean()),
        "active_experts_by_layer": active_NL.mean(0).tolist(),
        "verified_tokens_per_step": float(np.mean([count for step in steps for count in step.verified])),
        **_times(steps),
    }


def _times(steps: list[Step]) -> dict:
    """Mean seconds per step by phase; null for a loop that is not ours."""
    if steps[0].clock is None:
        return dict.fromkeys(_TIMES)
    seconds = [step.clock.seconds() for step in steps]
    phases = {f"t_{phase}": float(np.mean([times[phase] for times in seconds])) for phase in PHASES}
    total = float(np.mean([step.clock.total() for step in steps]))
    return {**phases, "t_other": total - sum(phases.values()), "t_step": total}


def _lossless(plan: MethodPlan, found: list[Difference]) -> object:
    if plan.baseline == "none":
        return "reference"
    return [dataclasses.asdict(difference) for difference in found] or "exact"
