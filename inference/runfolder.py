"""The shell of `ecospec-decode eval`: load, compare, and write a run folder."""

import dataclasses
from pathlib import Path

import torch

from ecospec.configs.files import provenance, read_json, replace_folder, write_json
from ecospec.data.prompts import read_prompts
from ecospec.inference.assemble import MethodPlan, part_folder, plan_methods
from ecospec.inference.config import DecodeConfig
from ecospec.inference.evaluate import Outcome, evaluate, first_differences
from ecospec.inference.report import read_runs, write_report
from ecospec.inference.report_tables import markdown_table
from ecospec.inference.results import summarise, write_steps
from ecospec.tracing.target import load_target


def run_eval(config: DecodeConfig, output: Path) -> str:
    """Compare the methods of `config`, write the run folder `output`, and return its table as Markdown.

    Raises InputError for input that does not fit, before the target's weights load where that can be known.
    """
    plans, prompts = plan_methods(config), read_prompts(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = load_target(config.target)
    outcomes = evaluate(config, target, plans, prompts)
    runs = summarise(config, target, outcomes, first_differences(target, outcomes), _training_datasets(plans))
    metrics = {name: read_json(folder / "metrics.json") for name, folder in _predictor_folders(plans).items()}
    for run in runs:
        if run["predictor"]:
            run["overlap"] = metrics[run["predictor"]]["overlap"]
    results = {"runs": runs, "ladder": _ladder(metrics), "notice": config.notice}
    replace_folder(output, lambda folder: _write(folder, config, results, outcomes))
    return markdown_table(read_runs([output]))


def _write(folder: Path, config: DecodeConfig, results: dict, outcomes: list[Outcome]) -> None:
    write_json(folder / "results.json", results)
    write_steps(folder / "steps.parquet", outcomes)
    machine = {"threads": torch.get_num_threads(), "caches": _caches()}
    write_json(folder / "provenance.json", provenance() | machine | {"config": dataclasses.asdict(config)})
    write_report([folder], folder)


def _predictor_folders(plans: list[MethodPlan]) -> dict[str, Path]:
    used = [p for p in plans if p.needs_footprints and p.selection.footprints == "predictor"]
    return {Path(p.predictor.path).name: part_folder(p.predictor.path, "predictor") for p in used}


def _ladder(metrics: dict[str, dict]) -> dict[str, dict]:
    """Held-out overlap of every predictor used, and of the simple ones on the first predictor's traces."""
    simple = next((numbers["ladder"] for numbers in metrics.values()), {})
    named = {f"predictor ({name})" if len(metrics) > 1 else "predictor": numbers for name, numbers in metrics.items()}
    return {name: {"overlap": numbers["overlap"]} for name, numbers in (simple | named).items()}


def _training_datasets(plans: list[MethodPlan]) -> set[str]:
    """Names of the data sets that any predictor or drafter in use was trained on."""
    folders = set(_predictor_folders(plans).values())
    folders |= {part_folder(p.drafter.path, "drafter") for p in plans if p.baseline is None}
    return {name for folder in folders for name in read_json(folder / "provenance.json").get("datasets", [])}


def _caches() -> dict[str, str]:
    """Sizes of the first processor's caches, as the system tells them."""
    index = Path("/sys/devices/system/cpu/cpu0/cache")
    levels = sorted(index.glob("index*")) if index.is_dir() else []
    return {
        f"L{(level / 'level').read_text().strip()} {(level / 'type').read_text().strip()}": (level / "size")
        .read_text()
        .strip()
        for level in levels
    }
