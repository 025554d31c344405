"""The tables of a report as HTML, Markdown and CSV.

A field that is null is an en dash. Knows nothing of files; the numbers come ready from `numbers`.
"""

import csv
import html
import io
import json
from collections.abc import Sequence

from ecospec.inference.metrics.table import shown_metrics, time_metrics
from ecospec.inference.report.numbers import Group, ReportRow, by_setting, distinct, make_groups, pool_methods
from ecospec.report.table import Column, Table, html_row, html_table, markdown_text

GAMMA = Column("gamma", "γ", str)


def result_columns(runs: Sequence[ReportRow]) -> list[Column]:
    """γ and the metrics with a column, some of them only where some run has a value."""
    shown = [one for one in shown_metrics() if one.always or any(run[one.key] is not None for run in runs)]
    return [GAMMA, *(metric.column() for metric in shown)]


def setting_title(row: ReportRow, several_folders: bool) -> str:
    """What a row shares with all others of its setting."""
    parts = [row.run_folder] if several_folders else []
    parts.append(f"T = {row.temperature:g}")
    if row.batch_size is not None:
        parts.append(f"batch size {row.batch_size}")
    return ", ".join(parts)


def group_title(group: Group) -> str:
    return group.dataset if group.dataset is not None else f"All data sets ({group.datasets})"


def row_title(row: ReportRow, group: Group) -> str:
    """The method's name, with what keeps the row from being compared with its neighbours."""
    if group.dataset is None and len(row.datasets) < group.datasets:
        return f"{row.name} ({len(row.datasets)} of {group.datasets} sets)"
    return f"{row.name} (seen in training)" if row.seen else row.name


def html_results(runs: Sequence[ReportRow]) -> str:
    """The result tables of named runs, each in a container of its own that scrolls."""
    columns, several = result_columns(runs), several_folders(runs)
    return "\n".join(_html_results_table(rows, columns, several) for rows in by_setting(runs))


def several_folders(runs: Sequence[ReportRow]) -> bool:
    return len({run.run_folder for run in runs}) > 1


def _html_results_table(rows: Sequence[ReportRow], columns: Sequence[Column], several: bool) -> str:
    bodies = [_html_group(group, columns) for group in make_groups(rows)]
    notice = any(row.notice for row in rows)
    return html_table(setting_title(rows[0], several), "method", columns, bodies, marked=notice)


def _html_group(group: Group, columns: Sequence[Column]) -> str:
    title = f'<th class="group" colspan="{len(columns) + 1}" scope="rowgroup">{html.escape(group_title(group))}</th>'
    rows = [html_row(row.cells, row_title(row, group), columns, row.is_ecospec) for row in group.rows]
    return "\n".join(["<tbody>", f"<tr>{title}</tr>", *rows, "</tbody>"])


def markdown_results(runs: Sequence[ReportRow]) -> str:
    """The result tables of named runs in Markdown, pooled rows first."""
    columns, several = result_columns(runs), several_folders(runs)
    return "\n\n".join(_markdown_results_table(rows, columns, several) for rows in by_setting(runs)) + "\n"


def _markdown_results_table(rows: Sequence[ReportRow], columns: Sequence[Column], several: bool) -> str:
    cells = [
        ([group_title(group), row_title(row, group)], row.cells) for group in make_groups(rows) for row in group.rows
    ]
    table = Table.of(["data set", "method"], columns, cells).markdown()
    return f"### {markdown_text(setting_title(rows[0], several))}\n\n{table}"


def csv_text(runs: Sequence[ReportRow]) -> str:
    """A row for each run with all keys that its file has; text as it is, null empty, anything else as JSON. No pooled
    rows."""
    rows = [{"run_folder": run.run_folder, "notice": run.notice, **run.raw} for run in runs]
    keys = distinct(key for row in rows for key in row)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([_csv_cell(row.get(key)) for key in keys] for row in rows)
    return buffer.getvalue()


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary(runs: Sequence[ReportRow]) -> str:
    """One sentence: what was decoded with what."""
    methods, datasets = distinct(run.label for run in runs), distinct(run.dataset for run in runs)
    temperatures = " and ".join(f"{value:g}" for value in sorted(distinct(run.temperature for run in runs)))
    tokens = sum(run["tokens"] for run in runs)
    return (
        f"{_listing(methods, 'decoding method')} on {_listing(datasets, 'data set')}, "
        f"at temperature {temperatures}: {tokens:,} tokens emitted in {_count(runs, 'run')}."
    )


def _count(values: Sequence, noun: str) -> str:
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def _listing(values: Sequence[str], noun: str) -> str:
    return f"{_count(values, noun)} ({', '.join(values)})"


def html_step_times(runs: Sequence[ReportRow]) -> str:
    """Milliseconds per step and part, pooled over data sets, of named runs; folded away."""
    columns = [metric.column(metric.key) for metric in time_metrics()]
    several, tables = several_folders(runs), []
    for rows in by_setting(pool_methods(runs)):
        lines = [html_row(row.cells, step_title(row), columns, row.is_ecospec) for row in rows]
        body = "\n".join(["<tbody>", *lines, "</tbody>"])
        tables.append(html_table(f"{setting_title(rows[0], several)}, ms per step", "method", columns, [body]))
    summary_line = "<summary>Times per step as a table</summary>"
    return "\n".join(["<details>", summary_line, *tables, "</details>"]) if tables else ""


def step_title(row: ReportRow) -> str:
    return row.name if row.gamma is None else f"{row.name}, γ\u00a0=\u00a0{row.gamma}"
