"""`report.html` of `ecospec-train generalise`: pure functions of what its `metrics.json` holds."""

from collections.abc import Mapping

from ecospec.predictor.evaluation.metrics import GeneralisationMetrics
from ecospec.predictor.kinds import yardstick
from ecospec.report.page import (
    Column,
    definitions,
    figure,
    html_row,
    html_table,
    legend,
    provenance_of,
    render_page,
    section,
)
from ecospec.report.svg import Axis, Series, line_chart, nice_axis, style, swatch

TITLE = "EcoSpec predictor: how far it carries"
TOKENS = 1000  # tokens are drawn in thousands


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


BESIDE = yardstick().name
COLUMNS = (
    Column("seen", "trained on it", _percent),
    Column("unseen", "not trained on it", _percent),
    Column(f"{BESIDE}_seen", f"{BESIDE}, counted on it", _percent),
    Column(f"{BESIDE}_unseen", f"{BESIDE}, not counted on it", _percent),
)
GLOSSARY = {
    "overlap": "share of the target's experts that are among the K predicted ones, over layers and answer positions of "
    "held-out samples",
    "trained on it": "samples of this data set were among those trained on (others of it are measured)",
    "not trained on it": "trained on all other data sets, from the same start and under the same limits",
    BESIDE: "the table of the experts most often chosen for a token id: it costs nothing",
}
NAMES = {"overlap": "predictor", BESIDE: f"{BESIDE} table"}


def render_generalisation(metrics: GeneralisationMetrics, provenance: Mapping) -> str:
    """The page."""
    parts = [
        section("Data sets it has not seen", _table(metrics.by_dataset)),
        _learning_curve(metrics.learning_curve),
        section("What the words mean", definitions(GLOSSARY)),
        section("How it was made", provenance_of("ecospec-train generalise", provenance)),
    ]
    return render_page(TITLE, summary(metrics), parts)


def summary(metrics: GeneralisationMetrics) -> str:
    """Means over data sets, in a sentence."""
    rows = metrics.by_dataset.values()
    seen, unseen = (sum(row[key] for row in rows) / len(rows) for key in ("seen", "unseen"))
    return (
        f"Overlap on held-out samples, mean of {len(rows)} data sets: {_percent(seen)} where it was trained on, "
        f"{_percent(unseen)} where it was left out."
    )


def _table(rows: Mapping[str, Mapping]) -> str:
    bodies = [html_row(row, name, COLUMNS) for name, row in rows.items()]
    return html_table("Overlap on held-out samples", "data set", COLUMNS, bodies)


def _learning_curve(points: list[Mapping]) -> str:
    series = [
        Series(
            name,
            style(index),
            [(point["tokens"] / TOKENS, 100 * point[key]) for point in points],
            [f"{point['tokens']:,} tokens: {_percent(point[key])}" for point in points],
        )
        for index, (key, name) in enumerate(NAMES.items())
    ]
    drawn = line_chart("Overlap against tokens trained on", *_axes(points), series)
    entries = legend([(swatch(one.style.css, one.style.marker), one.name) for one in series])
    caption = "Overlap on held-out samples after the same training on growing parts of the training samples."
    return figure("How many traced tokens it takes", caption, entries, [("", drawn)])


def _axes(points: list[Mapping]) -> tuple[Axis, Axis]:
    shares = [100 * point[key] for point in points for key in NAMES]
    return (
        nice_axis("thousand tokens trained on", [point["tokens"] / TOKENS for point in points], from_zero=True),
        nice_axis("overlap, %", shares),
    )
