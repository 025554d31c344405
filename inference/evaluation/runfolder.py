"""The shell of `ecospec-decode eval`: load, compare, and write a run folder."""

from pathlib import Path

import torch

from ecospec.data.prompts import Prompt, read_prompts
from ecospec.data.traces import read_traces
from ecospec.errors import InputError, first_few
from ecospec.files import read_json, replace_folder, write_json
from ecospec.inference.assemble import MethodPlan, plan_methods
from ecospec.inference.config import DecodingConfig, EvalConfig
from ecospec.inference.evaluation.evaluate import Outcome, evaluate
from ecospec.inference.evaluation.results import folder_name, summarise, write_steps
from ecospec.inference.evaluation.turns import require_room
from ecospec.inference.metrics.metric import RESULTS
from ecospec.inference.preflight import preflight
from ecospec.inference.report.document import markdown_table, read_runs, write_report
from ecospec.provenance import Provenance
from ecospec.tracing.target.loading import load_target, load_target_config, load_tokenizer


def run_eval(config: EvalConfig, output: Path) -> str:
    """Compare the methods of `config`, write the run folder `output`, and return its table as Markdown.

    Raises InputError for input that does not fit, before the target's weights load where that can be known.
    """
    plans = plan_methods(config, config.selection, config.methods)
    if not any(plan.baseline == "none" for plan in plans):
        raise InputError("methods: one must be plain (drafter: none); speed and losslessness are measured against it")
    prompts = prompts_in_context(config)
    preflight(config, plans, config.batch_size)
    context = RunContext(config, plans)
    target = load_target(config.target)
    outcomes, differences = evaluate(config, target, plans, prompts)
    runs = summarise(config, target, plans, outcomes, differences, context.seen, context.overlaps)
    rows = [run.to_json(RESULTS) for run in runs]
    results = {"runs": rows, "ladder": context.ladder, "notice": config.notice}
    replace_folder(output, lambda folder: _write(folder, output.name, config, results, outcomes))
    return markdown_table(read_runs([output]))


def prompts_in_context(config: DecodingConfig) -> list[Prompt]:
    """The prompts. Raises InputError naming the first that does not fit the target's context with its new tokens."""
    prompts, model_config = read_prompts(config), load_target_config(config.target)
    tokenizer = load_tokenizer(config.target, model_config.get_text_config().vocab_size)
    require_room(prompts, tokenizer, model_config, config)
    return prompts


class RunContext:
    """What the run folder says beside the measurements: overlaps of the predictors, and which data sets were seen.

    `metrics`: those of each trained model, by (footprints, name of its folder).
    """

    def __init__(self, config: EvalConfig, plans: list[MethodPlan]) -> None:
        trained = sorted((p for p in plans if p.kind and p.kind.trained), key=lambda plan: plan.predictor.path or "")
        folders = {plan.trained_folder for plan in trained}
        named = {(plan.footprints, folder_name(plan.predictor.path)): plan.trained_folder for plan in trained}
        if len(named) < len(folders):
            shown = first_few(sorted(map(str, folders)))
            raise InputError(f"--predictor.path: the folders {shown} need different names")
        self.metrics = {key: read_json(folder / "metrics.json") for key, folder in named.items()}
        heads = [plan.drafter_kind.learnt_from(plan.drafter) for plan in plans if plan.baseline is None]
        folders |= {head for head in heads if head is not None}
        self.seen = {name for folder in folders for name in _trained_on(folder)}
        if any(plan.kind and plan.kind.counted for plan in plans) and config.traces:
            self.seen |= {source.dataset for source in read_traces(config.traces).manifest.prompts}

    @property
    def ladder(self) -> dict[str, dict]:
        """Held-out overlap of every trained model used, and of the simple ones on the first one's traces."""
        ladder = dict(next((numbers["ladder"] for numbers in self.metrics.values() if "ladder" in numbers), {}))
        kinds = [source for source, _ in self.metrics]
        for (source, name), numbers in self.metrics.items():
            ladder[source if kinds.count(source) == 1 else f"{source} ({name})"] = numbers
        return {name: {"overlap": numbers["overlap"]} for name, numbers in ladder.items()}

    @property
    def overlaps(self) -> dict[tuple[str, str], float]:
        """Held-out overlap of each trained model; tables have none, they are counted from other traces."""
        return {key: numbers["overlap"] for key, numbers in self.metrics.items()}


def _trained_on(folder: Path) -> list[str]:
    """Data sets that a drafter or predictor of ours was trained on; published heads do not say."""
    path = folder / "provenance.json"
    return read_json(path).get("datasets", []) if path.is_file() else []


def _write(folder: Path, name: str, config: EvalConfig, results: dict, outcomes: list[Outcome]) -> None:
    write_json(folder / RESULTS, results)
    write_steps(folder / "steps.parquet", outcomes)
    Provenance.of(config, threads=torch.get_num_threads(), caches=_caches()).write(folder)
    write_report([folder], folder, name)


def _caches() -> dict[str, str]:
    """Sizes of the first processor's caches, where the system tells them."""
    caches = {}
    for size in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        level, kind = (size.with_name(name).read_text().strip() for name in ("level", "type"))
        caches[f"L{level} {kind}"] = size.read_text().strip()
    return caches
