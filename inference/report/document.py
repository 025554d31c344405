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
from ecospec.inference.report.numbers import distinct, name_methods
from ecospec.inference.report.plots import figures, ladder_figure
from ecospec.inference.report.tables import (
    csv_text,
    html_results,
    html_step_times,
    markdown_table,
    markdown_text,
    step_title,
    summary,
)
from ecospec.report.page import command_line, definitions, provenance_of, render_page, section

TITLE = "EcoSpec decoding report"
REQUIRED = ("label", "dataset", "temperature", "tokens", "steps")
GLOSSARY = {
    "step": "one pass of the target model over the tokens to be verified; plain decoding verifies one token per step",
    "α, acceptance length": "tokens emitted per step, the bonus token included; 1.00 for plain decoding",
    "𝓔, active experts": "unique routed experts per MoE layer that one step touches; each must be read from memory",
    "γ": "tokens verified per step, the tree's root included; γ = 4 lets three drafted tokens be tried",
    "verified": "tokens verified per step as counted",
    "tokens/s": "tokens emitted per second of decoding, prefill not counted",
    "speedup": "tokens/s over that of plain decoding on the same prompts at the same batch size",
    "95 % interval": "of the speedup, over prompts",
    "lossless": "exact: the same tokens as plain decoding (the reference), one by one; otherwise what differs",
    "overlap": "share of the target's experts that the footprints used for selection name correctly",
    "seen in training": "something was trained or fitted on these prompts; pooled rows and plots leave such rows out",
    "t_draft": "seconds per step to grow the draft tree",
    "t_predict": "seconds per step to predict the experts of its tokens",
    "t_select": "seconds per step to choose which of its tokens to verify",
    "t_verify": "seconds per step of the target's own pass",
    "t_accept": "seconds per step to accept tokens and compact the cache",
    "t_other": "what remains of the measured step",
    "t_step, step": "the whole step",
    "pooled rows": "means over all steps of all data sets; speed is total tokens over total seconds",
}


def read_runs(folders: Sequence[Path]) -> list[dict]:
    """The runs of all folders in order; each also has `run_folder` and its folder's `notice`.

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


def render_html(runs: Sequence[dict], provenance: Mapping[str, dict], ladder: Mapping[str, dict] | None = None) -> str:
    """The page, which refers to no other file or host.

    `provenance`: run folder's name → its `provenance.json`; `ladder`: predictor's name → metrics with `overlap`.
    """
    named = name_methods(runs)
    notices = [f'<p class="notice">† {html.escape(notice)}</p>' for notice in distinct(runs, "notice")]
    parts = [
        *notices,
        section("Results", html_results(named)),
        _html_differences(named),
        figures(named),
        ladder_figure(ladder) if ladder else "",
        html_step_times(named),
        section("What the columns mean", definitions(GLOSSARY)),
        section("How it was made", "\n".join(provenance_of(name, value) for name, value in provenance.items())),
    ]
    return render_page(TITLE, summary(runs), parts)


def render_markdown(
    runs: Sequence[dict], provenance: Mapping[str, dict], ladder: Mapping[str, dict] | None = None
) -> str:
    """The same report without its figures."""
    lines = [f"# {TITLE}", "", markdown_text(summary(runs)), ""]
    for notice in distinct(runs, "notice"):
        lines += [f"> {markdown_text(notice)}", ""]
    lines += [markdown_table(runs)]
    if ladder:
        lines += ["### Overlap of expert predictors", "", "| predictor | overlap |", "| --- | ---: |"]
        lines += [f"| {markdown_text(name)} | {100 * value['overlap']:.1f} % |" for name, value in ladder.items()] + [
            ""
        ]
    lines += ["### Columns", "", *(f"- **{term}**: {meaning}" for term, meaning in GLOSSARY.items()), ""]
    lines += ["### Made by", ""]
    for name, value in provenance.items():
        lines += [f"- {markdown_text(name)}: `{command_line(value)}`"]
    return "\n".join(lines) + "\n"


def _read_results(folder: Path) -> dict:
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"{folder}: no run folder (no results.json in it); give the --output of ecospec-decode eval")
    results = read_json(path)
    if not isinstance(results, dict) or not isinstance(results.get("runs"), list) or not results["runs"]:
        raise InputError(f'{path}: expected {{"runs": [...]}} with at least one run')
    return results


def _runs_of(folder: Path, name: str) -> list[dict]:
    results = _read_results(folder)
    for index, run in enumerate(results["runs"]):
        missing = [key for key in REQUIRED if run.get(key) is None]
        if missing:
            raise InputError(f"{folder / 'results.json'}: run {index} lacks {first_few(missing)}")
    return [{"run_folder": name, "notice": results.get("notice"), **run} for run in results["runs"]]


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


def _html_differences(runs: Sequence[dict]) -> str:
    """Where a run was not lossless: its differences in full."""
    blocks = []
    for run in runs:
        if isinstance(run.get("lossless"), list):
            title = f"{step_title(run)}, {run['dataset']}, T = {run['temperature']:g}"
            items = "".join(f"<li><code>{html.escape(json.dumps(item))}</code></li>" for item in run["lossless"])
            blocks.append(f"<h3>{html.escape(title)}</h3>\n<ul>{items}</ul>")
    return section("Differences from plain decoding", "\n".join(blocks)) if blocks else ""
