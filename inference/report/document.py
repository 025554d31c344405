"""Reports: run folders in; one self-contained HTML page, Markdown and CSV out.

Reads `results.json` and `provenance.json` only: every mean shown is already in `results.json`, so `steps.parquet` stays
closed. Knows nothing of models or decoding, and does not judge the numbers.
"""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ecospec.errors import InputError, first_few
from ecospec.files import read_json, write_text
from ecospec.inference.metrics.metric import RESULTS
from ecospec.inference.metrics.phases import style_sheet
from ecospec.inference.metrics.table import explained_metrics, time_metrics
from ecospec.inference.report.numbers import ReportRow, distinct, name_methods
from ecospec.inference.report.plots import figures, ladder_figure
from ecospec.inference.report.tables import (
    csv_text,
    html_results,
    html_step_times,
    markdown_results,
    step_title,
    summary,
)
from ecospec.report.page import command_line, definitions, provenance_of, render_page, section
from ecospec.report.table import Table, markdown_text, percent

TITLE = "EcoSpec decoding report"
REQUIRED = ("label", "dataset", "temperature", "tokens", "steps")
SEEN = {
    "seen in training": "something was trained or fitted on these prompts; pooled rows and plots leave such rows out"
}
POOLED = {"pooled rows": "means over all steps of all data sets; speed is total tokens over total seconds"}


def read_runs(folders: Sequence[Path]) -> list[ReportRow]:
    """The runs of all folders in order.

    Raises InputError naming the folder or file when one is no run folder or lacks a key that every table needs.
    """
    names = _short_names(folders)
    return [run for folder in folders for run in _runs_of(folder, names[folder])]


def write_report(folders: Sequence[Path], output: Path, name: str | None = None) -> list[Path]:
    """Write `report.html`, `report.md` and `report.csv` into the folder `output`, each atomically; returns their paths.

    `name` is what the report calls a single folder, by default its own name. Raises InputError as `read_runs` does, and
    for a folder without `provenance.json`.
    """
    names = {folders[0]: name} if name else _short_names(folders)
    runs = [run for folder in folders for run in _runs_of(folder, names[folder])]
    provenance = {names[folder]: read_json(folder / "provenance.json") for folder in folders}
    ladder = _merge_ladders({names[folder]: _read_results(folder).get("ladder") or {} for folder in folders})
    texts = {
        "report.html": render_html(runs, provenance, ladder),
        "report.md": render_markdown(runs, provenance, ladder),
        "report.csv": csv_text(runs),
    }
    for name, text in texts.items():
        write_text(output / name, text)
    return [output / name for name in texts]


def render_html(
    runs: Sequence[ReportRow], provenance: Mapping[str, dict], ladder: Mapping[str, dict] | None = None
) -> str:
    """The page, which refers to no other file or host.

    `provenance`: run folder's name → its `provenance.json`; `ladder`: predictor's name → metrics with `overlap`.
    """
    named = name_methods(runs)
    notices = [f'<p class="notice">† {html.escape(notice)}</p>' for notice in distinct(run.notice for run in runs)]
    parts = [
        *notices,
        section("Results", html_results(named)),
        _html_differences(named),
        figures(named),
        ladder_figure(ladder) if ladder else "",
        html_step_times(named),
        section("What the columns mean", definitions(glossary())),
        section("How it was made", "\n".join(provenance_of(name, value) for name, value in provenance.items())),
    ]
    return render_page(TITLE, summary(runs), parts, style_sheet())


def render_markdown(
    runs: Sequence[ReportRow], provenance: Mapping[str, dict], ladder: Mapping[str, dict] | None = None
) -> str:
    """The same report without its figures."""
    lines = [f"# {TITLE}", "", markdown_text(summary(runs)), ""]
    for notice in distinct(run.notice for run in runs):
        lines += [f"> {markdown_text(notice)}", ""]
    lines += [markdown_table(runs)]
    if ladder:
        rows = [[name, percent(metrics["overlap"])] for name, metrics in ladder.items()]
        table = Table(["predictor", "overlap"], [False, True], rows)
        lines += ["### Overlap of expert predictors", "", table.markdown(), ""]
    lines += ["### Columns", "", *(f"- **{term}**: {meaning}" for term, meaning in glossary().items()), ""]
    lines += ["### Made by", ""]
    for name, value in provenance.items():
        lines += [f"- {markdown_text(name)}: `{command_line(value)}`"]
    return "\n".join(lines) + "\n"


def markdown_table(runs: Sequence[ReportRow]) -> str:
    """The result tables in Markdown, one per run folder, temperature and batch size, pooled rows first."""
    return markdown_results(name_methods(runs))


def glossary() -> dict[str, str]:
    """What the columns mean, the seconds of a step by phase at last."""
    times = {metric.key for metric in time_metrics()}
    early, late = {}, {}
    for metric in explained_metrics():
        (late if metric.key in times else early).update(metric.terms)
    return early | SEEN | late | POOLED


def _read_results(folder: Path) -> dict:
    path = folder / RESULTS
    if not path.is_file():
        raise InputError(f"{folder}: no run folder (no results.json in it); give the --output of ecospec-decode eval")
    results = read_json(path)
    if not isinstance(results, dict) or not isinstance(results.get("runs"), list) or not results["runs"]:
        raise InputError(f'{path}: expected {{"runs": [...]}} with at least one run')
    return results


def _runs_of(folder: Path, name: str) -> list[ReportRow]:
    results = _read_results(folder)
    for index, run in enumerate(results["runs"]):
        missing = [key for key in REQUIRED if run.get(key) is None]
        if missing:
            raise InputError(f"{folder / RESULTS}: run {index} lacks {first_few(missing)}")
    beside = {"run_folder": name, "notice": results.get("notice")}
    return [ReportRow.from_json(run, **beside, raw=run) for run in results["runs"]]


def _merge_ladders(ladders: Mapping[str, dict]) -> dict:
    """The one ladder there is, or all of them with the folder's name behind each predictor's."""
    ladders = {name: ladder for name, ladder in ladders.items() if ladder}
    if len(ladders) == 1:
        return next(iter(ladders.values()))
    return {f"{rung}, {name}": metrics for name, ladder in ladders.items() for rung, metrics in ladder.items()}


def _short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Each folder's last name, or its path as given where two share one. Raises InputError for a folder given twice."""
    resolved = [folder.resolve() for folder in folders]
    if not folders or len(set(resolved)) < len(resolved):
        raise InputError("report DIR...: give one or more run folders, each once")
    last = [folder.name for folder in resolved]
    return {folder: name if last.count(name) == 1 else str(folder) for folder, name in zip(folders, last, strict=True)}


def _html_differences(runs: Sequence[ReportRow]) -> str:
    """Where a run was not lossless: its differences in full."""
    blocks = []
    for run in runs:
        if isinstance(run["lossless"], list):
            title = f"{step_title(run)}, {run.dataset}, T = {run.temperature:g}"
            items = "".join(f"<li><code>{html.escape(json.dumps(item))}</code></li>" for item in run["lossless"])
            blocks.append(f"<h3>{html.escape(title)}</h3>\n<ul>{items}</ul>")
    return section("Differences from plain decoding", "\n".join(blocks)) if blocks else ""
