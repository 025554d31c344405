"""The shells of `ecospec-decode record` and `replay`: trees in a folder once, then any selection without the target."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ecospec.data.lab import shipped
from ecospec.data.prompts import Prompt
from ecospec.errors import InputError
from ecospec.files import replace_folder, write_json
from ecospec.inference.assemble import MethodPlan, PartsLoader, plan_methods
from ecospec.inference.config import DrafterConfig, RecordConfig, ReplayConfig
from ecospec.inference.drafters.kind import drafter_kind
from ecospec.inference.evaluation.evaluate import sampling_options
from ecospec.inference.evaluation.results import folder_name
from ecospec.inference.evaluation.runfolder import prompts_in_context
from ecospec.inference.evaluation.turns import Turns
from ecospec.inference.metrics.metric import REPLAY
from ecospec.inference.preflight import preflight
from ecospec.inference.replay.record import TreeRecorder
from ecospec.inference.replay.results import replay
from ecospec.inference.replay.stepping import Sources, combinations, replay_sources
from ecospec.inference.replay.table import replay_table
from ecospec.inference.replay.treefile import Identity, Position, TreeSet, read_trees, write_trees
from ecospec.predictor.kinds.counting import open_traces
from ecospec.progress import progress
from ecospec.provenance import Provenance
from ecospec.seeds import sample_seed
from ecospec.tracing.target.loading import Target, load_target
from ecospec.tracing.target.requests import prompt_ids

TREES = "trees.parquet"


def run_record(config: RecordConfig, output: Path) -> str:
    """Record the pools along the prompts' texts; returns one line on what was written.

    The methods share the drafter; what each footprint source predicts is kept, and timed.
    """
    config.only_temperature("record")
    plans = plan_methods(config, config.selection.rule(), config.methods)
    drafter, sourced = recorded_sources(plans)
    prompts = prompts_in_context(config)
    preflight(config, plans)
    target = load_target(config.target)
    identity = _identity(config, target, drafter, sourced, prompts)
    parts, shape = PartsLoader(target, config.traces), drafter_kind(drafter.kind).shape(drafter)
    sources = {name: parts.footprints(plan) for name, plan in sourced.items()}

    written = 0

    def write(folder: Path) -> None:
        nonlocal written
        trees = TreeRecorder(target.model, parts.drafter(drafter), shape.depth, sources)
        written = write_trees(folder / TREES, identity, _positions(config, target, trees, prompts), trees.seconds)
        Provenance.of(config).write(folder)

    replace_folder(output, write)
    return f"{output / TREES}: {written} positions of {len(prompts)} prompts"


def recorded_sources(planned: Sequence[MethodPlan]) -> tuple[DrafterConfig, dict[str, MethodPlan]]:
    """The drafter, and a method for each footprint source by its name.

    Raises InputError when no method drafts, when they draft differently, or when one source has two folders.
    """
    plans = [plan for plan in planned if plan.baseline is None]
    if not plans or any(plan.drafter != plans[0].drafter for plan in plans):
        raise InputError("methods: record drafts each pool once; give all methods (baselines aside) one drafter")
    sources: dict[str, MethodPlan] = {}
    for plan in (plan for plan in plans if plan.kind):
        known = sources.setdefault(plan.footprints, plan)
        if plan.kind.trained and plan.predictor != known.predictor:
            paths = f"{known.predictor.path} and {plan.predictor.path}"
            raise InputError(f"methods: a tree file keeps one {plan.footprints}, not {paths}; record them one by one")
    return plans[0].drafter, sources


def run_replay(config: ReplayConfig, output: Path) -> str:
    """Replay every policy × footprint source × γ and write `replay.json`, its runs with the keys of `results.json`.

    Returns a table of the last data set (all of them together where there are several) as Markdown.
    """
    trees = _read(config)
    sources = _sources(config, trees)
    recorded = trees.positions[0].predicted if trees.positions else {}
    named = config.selection.footprints or ["oracle", *recorded, *sources]
    chosen = config.selection
    options = tuple(chosen.options.items())
    runs = replay(trees, combinations(chosen.policy, named, chosen.gamma, chosen.epsilon, options), sources)

    def write(folder: Path) -> None:
        write_json(folder / REPLAY, {"runs": [run.to_json(REPLAY) for run in runs]})
        Provenance.of(config).write(folder)

    replace_folder(output, write)
    last = runs[-1].dataset if runs else None
    return replay_table([run for run in runs if run.dataset == last])


def _identity(
    config: RecordConfig,
    target: Target,
    drafter: DrafterConfig,
    plans: dict[str, MethodPlan],
    prompts: list[Prompt],
) -> Identity:
    folders = {name: folder_name(plan.predictor.path) for name, plan in plans.items() if plan.kind.trained}
    return Identity(
        target=target.name,
        target_config_sha256=target.config_sha256,
        drafter=drafter.kind,
        predictor=folders.pop("predictor", None),
        temperature=config.temperature[0],
        seed=config.seed,
        num_layers=len(target.shape.layers),
        num_experts=target.shape.num_experts,
        top_k=target.shape.top_k,
        tree=drafter_kind(drafter.kind).shape(drafter).described,
        datasets={prompt.sample_id: prompt.dataset for prompt in prompts},
        rungs=folders,
    )


def _positions(config: RecordConfig, target: Target, trees: TreeRecorder, prompts: list[Prompt]) -> Iterator[Position]:
    options = {"max_new_tokens": config.max_new_tokens, **sampling_options(config.temperature[0])}
    turns = Turns(config, target)
    for prompt in map(turns.complete, progress(prompts, "prompts recorded")):
        ids = torch.tensor([prompt_ids(prompt, target.tokenizer, config.chat_template)], device=target.model.device)
        seed = sample_seed(config.seed, prompt.sample_id)
        generator = torch.Generator(target.model.device).manual_seed(seed)
        for position in trees.record(prompt.sample_id, ids, generator, **options):
            yield replace(position, source_id=prompt.source_id)
        turns.note([prompt], [trees.last_answer])


def _read(config: ReplayConfig) -> TreeSet:
    if config.trees is None:
        raise InputError("--trees: not given; say which folder or file ecospec-decode record wrote")
    path = shipped(config.trees, "trees") or Path(config.trees)
    return read_trees(path / TREES if path.is_dir() else path)


def _sources(config: ReplayConfig, trees: TreeSet) -> Sources:
    """The sources that need no record, counted from `traces` where given. Raises InputError for another target's."""
    traces = None
    if config.traces is not None:
        traces = open_traces(config.traces, trees.identity.counts, trees.identity.target_config_sha256)
    return replay_sources(trees, traces)
