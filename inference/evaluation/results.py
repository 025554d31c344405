"""From outcomes to the run folder: the rows of `results.json`, and `steps.parquet` with a row a step.

Letters: P batches of prompts, R texts of all steps.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ecospec.files import replace_file
from ecospec.inference.assemble import MethodPlan
from ecospec.inference.config import EvalConfig
from ecospec.inference.decoding.statistics import Step
from ecospec.inference.evaluation.evaluate import Outcome
from ecospec.inference.evaluation.lossless import Difference
from ecospec.inference.metrics.rows import RunRow
from ecospec.inference.metrics.table import step_metrics
from ecospec.tracing.target.loading import Target
from ecospec.tracing.target.requests import in_chat_template


def summarise(
    config: EvalConfig,
    target: Target,
    plans: list[MethodPlan],
    outcomes: list[Outcome],
    differences: Mapping[tuple, list[Difference]],
    seen: set[str],
    overlaps: Mapping[tuple[str, str], float],
) -> list[RunRow]:
    """One run (contract: `results.json`) per batch size, temperature, data set and method, in that order.

    `seen` holds the data sets that anything in use was trained or fitted on, `overlaps` the held-out overlap of each
    trained model by its kind and its folder's name.
    """
    groups: dict[tuple, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    labels = [plan.label for plan in plans]
    plain = next(plan.label for plan in plans if plan.baseline == "none")
    runs = []
    for key in sorted(groups, key=lambda key: (*key[:3], labels.index(key[3]))):
        group = groups[key]
        row = _described(config, target, group[0], seen)
        verdict = _lossless(group[0].plan, differences.get(key, []))
        others = {"lossless": verdict, "overlap": overlaps.get((row.footprints, row.predictor))}
        runs.append(row.measured(_measurements(group, groups[*key[:3], plain]) | others))
    return runs


def write_steps(path: Path, outcomes: list[Outcome]) -> None:
    """`steps.parquet`: a row for each text of each step: what was decoded, then what the step measured."""
    table = pa.Table.from_pylist([row for outcome in outcomes for row in _step_rows(outcome)])
    fields = [pa.field("source_id", pa.string()) if one.name == "source_id" else one for one in table.schema]
    table = table.cast(pa.schema(fields))  # a column of text even where no prompt has an id
    replace_file(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def _step_rows(outcome: Outcome) -> Iterator[dict]:
    for number, step in enumerate(outcome.run.steps):
        shared = {metric.key: metric.step(step) for metric in step_metrics()}
        for row, emitted, verified in zip(step.rows, step.emitted, step.verified, strict=True):
            yield {
                "label": outcome.plan.label,
                "dataset": outcome.dataset,
                "temperature": outcome.temperature,
                "batch_size": outcome.batch_size,
                "prompt": outcome.prompts[row].sample_id,
                "source_id": outcome.prompts[row].source_id,
                "row": row,
                "step": number,
                "emitted": emitted,
                "verified": verified,
            } | shared


def _described(config: EvalConfig, target: Target, outcome: Outcome, seen: set[str]) -> RunRow:
    """What was run: what does not depend on a measurement."""
    plan = outcome.plan
    speculative = plan.baseline is None
    return RunRow(
        label=plan.label,
        drafter=plan.baseline or plan.drafter.kind,
        **(plan.selection.build().describe() if speculative else {}),
        footprints=plan.footprints,
        predictor=folder_name(plan.predictor.path) if plan.kind and plan.kind.trained else None,
        tree=plan.tree,
        dtype=str(target.model.dtype).removeprefix("torch."),
        expert_mib=config.target.expert_mib,
        threads=torch.get_num_threads(),
        target=target.name,
        num_experts=target.shape.num_experts,
        top_k=target.shape.top_k,
        moe_layers=list(target.shape.layers),
        dataset=outcome.dataset,
        seen=outcome.dataset in seen,
        temperature=outcome.temperature,
        batch_size=outcome.batch_size,
        chat_template=in_chat_template(outcome.prompts[0], target.tokenizer, config.chat_template),
    )


def folder_name(path: str) -> str:
    """What results call a predictor: its folder's own name."""
    return Path(path).name


def _measurements(group: list[Outcome], reference: list[Outcome]) -> dict:
    """What the metrics are made of; `reference`: plain decoding of the same prompts."""
    tokens_P, seconds_P = _tokens_and_seconds(group)
    plain_tokens_P, plain_seconds_P = _tokens_and_seconds(reference)
    return {
        "samples": sum(len(outcome.prompts) for outcome in group),
        "tokens": sum(outcome.run.new_tokens for outcome in group),
        "tokens_P": tokens_P,
        "seconds_P": seconds_P,
        "plain_tokens_P": plain_tokens_P,
        "plain_seconds_P": plain_seconds_P,
        "prefill_P": np.array([outcome.run.prefill_seconds for outcome in group]),
        **_of_steps([step for outcome in group for step in outcome.run.steps]),
    }


def _tokens_and_seconds(group: list[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Decoded tokens (prefill's own not counted) and seconds of each batch; texts of one token count for nothing."""
    tokens_P = np.array([outcome.run.new_tokens - len(outcome.prompts) for outcome in group], float)
    seconds_P = np.array([outcome.run.decode_seconds for outcome in group])
    return tokens_P, np.maximum(seconds_P, 1e-9)


def _of_steps(steps: Sequence[Step]) -> dict:
    """What the steps measured: none where every text ended with the token that prefill gave, no times where the loop is
    not ours."""
    if not steps:
        return {"steps": 0}
    told = {metric.key: [metric.step(step) for step in steps] for metric in step_metrics()}
    found = {key: [value for value in values if value is not None] for key, values in told.items()}
    return {
        "steps": len(steps),
        "emitted_R": np.array([count for step in steps for count in step.emitted]),
        "verified_R": np.array([count for step in steps for count in step.verified]),
        **{key: np.array(values) for key, values in found.items() if values},
    }


def _lossless(plan: MethodPlan, found: list[Difference]) -> object:
    if plan.baseline == "none":
        return "reference"
    return [dataclasses.asdict(difference) for difference in found] or "exact"
