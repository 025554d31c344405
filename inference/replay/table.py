"""Replayed runs as a Markdown table."""

from collections.abc import Sequence

from ecospec.inference.metrics.metric import Metric
from ecospec.inference.metrics.rows import RunRow
from ecospec.inference.metrics.table import METRICS
from ecospec.report.table import DASH, Table


def replay_table(runs: Sequence[RunRow]) -> str:
    """A row a run, with 95 % intervals; a dash for what does not apply."""
    shown = [metric for metric in METRICS if metric.replay_heading]
    headings = ["γ", "selection", *(metric.replay_heading for metric in shown)]
    numeric = [heading != "selection" for heading in headings]
    rows = [[str(run.gamma), run.label, *(_cell(run, metric) for metric in shown)] for run in runs]
    return Table(headings, numeric, rows).markdown()


def _cell(run: RunRow, metric: Metric) -> str:
    value, interval = run[metric.key], run[f"{metric.key}_interval"]
    if value is None:
        return DASH
    ends = f" ({' to '.join(map(metric.replay_write, interval))})" if interval else ""
    return metric.replay_write(value) + ends
