"""The shells of `ecospec-decode record` and `replay`: trees in a folder once, then any selection without the target."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ecospec.configs.errors import InputError
from ecospec.configs.files import provenance, replace_folder, write_json
from ecospec.configs.progress import progress
from ecospec.data.prompts import Prompt
from ecospec.inference.assemble import MethodPlan, Workshop, open_traces, plan_methods
from ecospec.inference.config import DecodeConfig, only_one
from ecospec.inference.evaluate import sample_seed, sampling_options
from ecospec.inference.preflight import preflight
from ecospec.inference.record import TreeRecorder
from ecospec.inference.replay import Tables, combinations
from ecospec.inference.replay_results import replay
from ecospec.inference.runfolder import prompts_in_context
from ecospec.inference.treefile import Identity, Position, TreeSet, read_trees, write_trees
from ecospec.inference.turns import Turns
from ecospec.predictor.simple import fit_tables
from ecospec.tracing.recorder import RoutingRecorder
from ecospec.tracing.requests import prompt_ids
from ecospec.tracing.target import Target, lab_folder, load_target

TREES, REPLAY = "trees.parquet", "replay.json"
REPLAYED = ("confidence", "marginal", "global")
GAMMAS = range(1, 8)


def run_record(config: DecodeConfig, output: Path) -> str:
    """Record the pools along the prompts' texts at the first temperature; returns one line on what was written."""
    config = replace(config, methods=[])
    only_one(config, "record")
    prompts = prompts_in_context(config)
    preflight(config)
    target, (plan,) = load_target(config.target), plan_methods(config)
    identity = _identity(config, target, plan, prompts)

    written = 0

    def write(folder: Path) -> None:
        nonlocal written
        written = write_trees(folder / TREES, identity, _positions(config, target, plan, prompts))
        write_json(folder / "provenance.json", provenance() | {"config": dataclasses.asdict(config)})

    replace_folder(output, write)
    return f"{output / TREES}: {written} positions of {len(prompts)} prompts"


def run_replay(config: DecodeConfig, output: Path) -> str:
    """Replay every policy × footprint source × γ and write `replay.json`, its runs with the keys of `results.json`.

    Returns a table of the last data set (all of them together where there are several) as Markdown.
    """
    trees = _read(config)
    tables = _tables(config, trees)
    recorded = trees.positions[0].experts_pred_NLK is not None if trees.positions else False
    sources = ["oracle", *(["predictor"] if recorded else []), *tables]
    runs = replay(trees, combinations(REPLAYED, sources, GAMMAS), tables)

    def write(folder: Path) -> None:
        write_json(folder / REPLAY, {"runs": runs})
        write_json(folder / "provenance.json", provenance() | {"config": dataclasses.asdict(config)})

    replace_folder(output, write)
    last = runs[-1]["dataset"] if runs else None
    return _markdown([run for run in runs if run["dataset"] == last])


def _identity(config: DecodeConfig, target: Target, plan: MethodPlan, prompts: list[Prompt]) -> Identity:
    return Identity(
        target=target.name,
        target_config_sha256=target.config_sha256,
        drafter=plan.drafter.kind,
        predictor=plan.predictor.path if plan.needs_footprints else None,
        temperature=config.temperature[0],
        seed=config.seed,
        num_layers=len(target.shape.layers),
        num_experts=target.shape.num_experts,
        top_k=target.shape.top_k,
        steps=plan.drafter.steps,
        topk=plan.drafter.topk,
        datasets={prompt.sample_id: prompt.dataset for prompt in prompts},
    )


def _positions(config: DecodeConfig, target: Target, plan: MethodPlan, prompts: list[Prompt]) -> Iterator[Position]:
    method = Workshop(target, config.traces).method(plan)
    options = {"max_new_tokens": config.max_new_tokens, **sampling_options(config.temperature[0])}
    with RoutingRecorder(target.model) as recorder:
        trees = TreeRecorder(target.model, recorder, method.drafter, plan.drafter.steps, method.footprints)
        turns = Turns(config, target)
        for prompt in map(turns.complete, progress(prompts, "prompts recorded")):
            ids = torch.tensor([prompt_ids(prompt, target.tokenizer, config.chat_template)], device=target.model.device)
            seed = sample_seed(config.seed, prompt.sample_id)
            generator = torch.Generator(target.model.device).manual_seed(seed)
            yield from trees.record(prompt.sample_id, ids, generator, **options)
            turns.note([prompt], [trees.last_answer])


def _read(config: DecodeConfig) -> TreeSet:
    if config.trees is None:
        raise InputError("--trees: not given; say which folder or file ecospec-decode record wrote")
    path = lab_folder("trees") if config.trees == "lab" else Path(config.trees)
    return read_trees(path / TREES if path.is_dir() else path)


def _tables(config: DecodeConfig, trees: TreeSet) -> Tables:
    """`frequency` and `token`, counted from `traces` where they are given. Raises InputError for another target's."""
    if config.traces is None:
        return {}
    traces = open_traces(config.traces, trees.identity.counts, trees.identity.target_config_sha256)
    seen = [max([p.root, *p.tokens_M]) for p in trees.positions] + [item.input_ids.max() for item in traces]
    return fit_tables(traces, 1 + int(max(seen)))


def _markdown(runs: list[dict]) -> str:
    rows = [
        "| γ | selection | α | 𝓔 | α beyond EAGLE's | 𝓔 beyond EAGLE's |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        shown = [run["acceptance_length"], run["active_experts"]]
        against = [_difference(run, name) for name in ("acceptance_length", "active_experts")]
        values = ["–" if value is None else f"{value:.2f}" for value in shown]
        rows.append(f"| {' | '.join([str(run['gamma']), run['label'], *values, *against])} |")
    return "\n".join(rows)


def _difference(run: dict, name: str) -> str:
    value, interval = run[f"{name}_difference"], run[f"{name}_difference_interval"]
    if value is None:
        return "–"
    return f"{value:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")
