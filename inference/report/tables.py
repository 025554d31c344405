"""The tables of a report as HTML, Markdown and CSV, and how each number is written.

Symbols: alpha tokens emitted per step, gamma tokens verified per step, E active experts (the curly E of the headings).
A field that is null is an en dash. Knows nothing of files; the numbers come ready from `report_numbers`.
"""

import csv
import html
import io
import json
from collections.abc import Sequence

from ecospec.inference.report.numbers import (
    SETTING,
    TIMES,
    Group,
    Table,
    distinct,
    group_by,
    is_ecospec,
    make_tables,
    name_methods,
    pool_methods,
)
from ecospec.report.page import DASH, Column, cell, decimals, html_row, html_table


def milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _verdict(value: object) -> str:
    """`exact` and its like as they are; for a list of differences, how many."""
    if isinstance(value, list):
        return f"{len(value)} difference{'s' * (len(value) != 1)}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


RESULTS = (
    Column("gamma", "γ", str),
    Column("acceptance_length", "α", decimals(2)),
    Column("active_experts", "𝓔", decimals(1)),
    Column("verified_tokens_per_step", "verified", decimals(2)),
    Column("tokens_per_second", "tokens/s", decimals(1), timed=True),
    Column("speedup_vs_ar", "speedup", decimals(2, "×"), timed=True),
    Column("interval", "95 % interval", lambda pair: f"{pair[0]:.2f}{DASH}{pair[1]:.2f}", timed=True),
    Column("t_step", "step, ms", milliseconds, timed=True),
    Column("overlap", "overlap", lambda share: f"{100 * share:.1f} %"),
    Column("lossless", "lossless", _verdict, numeric=False),
    Column("tokens", "tokens", decimals(0)),
)
STEP_TIMES = tuple(Column(key, key, milliseconds, timed=True) for key in (*TIMES, "t_step"))


def result_columns(runs: Sequence[dict]) -> tuple[Column, ...]:
    """All result columns, `overlap` only where some run has it."""
    return tuple(column for column in RESULTS if column.key != "overlap" or distinct(runs, "overlap"))


def setting_title(setting: dict, several_folders: bool) -> str:
    parts = [setting["run_folder"]] if several_folders else []
    parts.append(f"T = {setting['temperature']:g}")
    if setting["batch_size"] is not None:
        parts.append(f"batch size {setting['batch_size']}")
    return ", ".join(parts)


def group_title(group: Group) -> str:
    return group.dataset if group.dataset is not None else f"All data sets ({group.datasets})"


def row_title(row: dict, group: Group) -> str:
    """The method's name, with what keeps the row from being compared with its neighbours."""
    if group.dataset is None and len(row["datasets"]) < group.datasets:
        return f"{row['name']} ({len(row['datasets'])} of {group.datasets} sets)"
    return f"{row['name']} (seen in training)" if row.get("seen") else row["name"]


def html_results(runs: Sequence[dict]) -> str:
    """The result tables of named runs, each in a container of its own that scrolls."""
    columns, several = result_columns(runs), len(distinct(runs, "run_folder")) > 1
    return "\n".join(_html_results_table(table, columns, several) for table in make_tables(runs))


def _html_results_table(table: Table, columns: Sequence[Column], several_folders: bool) -> str:
    notice = any(row.get("notice") for group in table.groups for row in group.rows)
    bodies = [_html_group(group, columns) for group in table.groups]
    return html_table(setting_title(table.setting, several_folders), "method", columns, bodies, marked=notice)


def _html_group(group: Group, columns: Sequence[Column]) -> str:
    title = f'<th class="group" colspan="{len(columns) + 1}" scope="rowgroup">{html.escape(group_title(group))}</th>'
    rows = [html_row(row, row_title(row, group), columns, is_ecospec(row)) for row in group.rows]
    return "\n".join(["<tbody>", f"<tr>{title}</tr>", *rows, "</tbody>"])


def markdown_table(runs: Sequence[dict]) -> str:
    """The result tables in Markdown, one per run folder, temperature and batch size, pooled rows first."""
    runs = name_methods(runs)
    columns, several = result_columns(runs), len(distinct(runs, "run_folder")) > 1
    return "\n\n".join(_markdown_results_table(table, columns, several) for table in make_tables(runs)) + "\n"


def _markdown_results_table(table: Table, columns: Sequence[Column], several_folders: bool) -> str:
    rows = [["data set", "method", *(column.heading for column in columns)]]
    rows.append(["---", "---", *("---:" if column.numeric else "---" for column in columns)])
    for group in table.groups:
        for row in group.rows:
            rows.append([group_title(group), row_title(row, group), *(cell(row, column) for column in columns)])
    lines = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
    return "\n".join([f"### {markdown_text(setting_title(table.setting, several_folders))}", "", *lines])


def markdown_text(text: str) -> str:
    """`text` as it is shown: no tags, no column breaks, one line."""
    return " ".join(html.escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|").split())


def csv_text(runs: Sequence[dict]) -> str:
    """A row for each run with all its keys; text as it is, null empty, anything else as JSON. No pooled rows."""
    keys = list(dict.fromkeys(key for run in runs for key in run))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([_csv_cell(run.get(key)) for key in keys] for run in runs)
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary(runs: Sequence[dict]) -> str:
    """One sentence: what was decoded with what."""
    methods, datasets = distinct(runs, "label"), distinct(runs, "dataset")
    temperatures = " and ".join(f"{value:g}" for value in sorted(distinct(runs, "temperature")))
    tokens = sum(run["tokens"] for run in runs)
    return (
        f"{_listing(methods, 'decoding method')} on {_listing(datasets, 'data set')}, "
        f"at temperature {temperatures}: {tokens:,} tokens emitted in {_count(runs, 'run')}."
    )


def _count(values: Sequence, noun: str) -> str:
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def _listing(values: Sequence[str], noun: str) -> str:
    return f"{_count(values, noun)} ({', '.join(values)})"


def html_step_times(runs: Sequence[dict]) -> str:
    """Milliseconds per step and part, pooled over data sets, of named runs; folded away."""
    several, tables = len(distinct(runs, "run_folder")) > 1, []
    for rows in group_by(pool_methods(runs), lambda row: tuple(row[key] for key in SETTING)).values():
        body = "\n".join(
            ["<tbody>", *(html_row(row, step_title(row), STEP_TIMES, is_ecospec(row)) for row in rows), "</tbody>"]
        )
        tables.append(html_table(f"{setting_title(rows[0], several)}, ms per step", "method", STEP_TIMES, [body]))
    summary_line = "<summary>Times per step as a table</summary>"
    return "\n".join(["<details>", summary_line, *tables, "</details>"]) if tables else ""


def step_title(row: dict) -> str:
    return row["name"] if row.get("gamma") is None else f"{row['name']}, γ\u00a0=\u00a0{row['gamma']}"
