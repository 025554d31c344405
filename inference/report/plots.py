"""The figures of a report: which numbers of the pooled rows go into which drawing, and what each drawing shows.

Symbols: alpha tokens emitted per step, gamma tokens verified per step, E experts and K experts per token of a layer.
Every figure takes named runs and shows rows pooled over the data sets that nothing was trained or fitted on.
Knows nothing of files; drawing is `ecospec.report.svg`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ecospec.inference.metrics.phases import OTHER, PHASES, STEP_KEY
from ecospec.inference.metrics.table import milliseconds
from ecospec.inference.report.numbers import ReportRow, by_setting, distinct, group_by, pool_methods
from ecospec.inference.report.tables import setting_title, several_folders
from ecospec.report import svg
from ecospec.report.page import figure, legend
from ecospec.report.table import DASH, percent
from ecospec.tracing.stats.counts import chance_experts

PARTS = (*PHASES, OTHER)
Styles = Mapping[str, svg.Style]


def method_styles(runs: Sequence[ReportRow]) -> dict[str, svg.Style]:
    """A style for each method's name, the same in every figure; plain decoding has its own."""
    plain, names = {run.name for run in runs if run.is_reference}, distinct(run.name for run in runs)
    indices = {name: index for index, name in enumerate(name for name in names if name not in plain)}
    return {name: svg.style(indices.get(name)) for name in names}


def figures(runs: Sequence[ReportRow]) -> str:
    """All figures of the runs that have something to show."""
    rows, styles = pool_methods(runs), method_styles(runs)
    several, settings = several_folders(runs), by_setting(rows)
    by_gamma = [chosen for members in settings for chosen in _by_gamma(members)]
    points = _having(settings, "acceptance_length", "active_experts")
    layers, depths = _having(by_gamma, "active_experts_by_layer"), _having(by_gamma, "acceptance_by_depth")
    drawn = (
        _figure("Tokens per step against experts per step", _SCATTER, points, several, styles, tradeoff),
        _figure("Where a step's time goes", _TIMES, by_gamma, several, None, step_times),
        _figure("Active experts by layer", _LAYERS, layers, several, styles, experts_by_layer),
        _figure("Acceptance by depth", _DEPTH, depths, several, styles, acceptance_by_depth),
    )
    return "\n".join(one for one in drawn if one)


def tradeoff(rows: Sequence[ReportRow], title: str, styles: Styles) -> str:
    """Alpha over active experts with what chance routing would cost, for the rows of one setting."""
    x_values, y_values = [row["active_experts"] for row in rows], [row["acceptance_length"] for row in rows]
    gammas, shape = distinct(row.gamma for row in rows), _expert_counts(rows)
    chances = {gamma: chance_experts(gamma, *shape) for gamma in gammas} if shape else {}
    x = svg.nice_axis("active experts 𝓔 per layer and step", [*x_values, *chances.values()], from_zero=True)
    y = svg.nice_axis("tokens per step α", [1.0, *y_values])
    series = []
    for name, members in group_by(rows, lambda row: row.name).items():
        members = sorted(members, key=lambda row: row.gamma or 0)
        points = [(row["active_experts"], row["acceptance_length"]) for row in members]
        series.append(svg.Series(name, styles[name], points, [_tradeoff_note(row) for row in members]))
    under = _chance_curve(x, y, *shape) if shape else []
    under += [svg.guide_up(x, value, f"γ = {gamma}") for gamma, value in chances.items()]
    return svg.scatter(title, x, y, series, under)


def _tradeoff_note(row: ReportRow) -> str:
    gamma = "" if row.gamma is None else f"γ = {row.gamma}, "
    return f"{gamma}α = {row['acceptance_length']:.2f}, 𝓔 = {row['active_experts']:.1f}"


def _chance_curve(x: svg.Axis, y: svg.Axis, num_experts: int, top_k: int) -> list[str]:
    """n tokens at the height n and at the experts that they would touch by chance, as far as the plot reaches."""
    counts = [1 + (y.high - 1) * step / 40 for step in range(41)]
    points = [(chance_experts(count, num_experts, top_k), count) for count in counts]
    points = [(across, up) for across, up in points if across <= x.high]
    return [svg.polyline(x, y, points, "chance", "6 4")]


def step_times(rows: Sequence[ReportRow], title: str) -> str:
    """A stacked bar for each row; a row without times keeps its name and a dash."""
    bars = []
    for row in rows:
        parts = [(p.key, row[p.key], f"{p.label} {milliseconds(row[p.key])} ms") for p in PARTS if row[p.key]]
        timed = row[STEP_KEY] is not None
        value = f"{milliseconds(row[STEP_KEY])} ms" if timed else DASH
        bars.append(svg.Bar(row.name, value, parts if timed else ()))
    return svg.bar_chart(title, bars, max((row[STEP_KEY] or 0.0 for row in rows), default=0.0))


def experts_by_layer(rows: Sequence[ReportRow], title: str, styles: Styles) -> str:
    """Active experts over the model's own layer numbers."""
    layers = [_layers(row) for row in rows]
    counts = [value for row in rows for value in row["active_experts_by_layer"]]
    gammas, shape = distinct(row.gamma for row in rows), _expert_counts(rows)
    chance = chance_experts(gammas[0], *shape) if shape and len(gammas) == 1 else None
    x = svg.whole_axis("layer", [number for numbers in layers for number in numbers])
    y = svg.nice_axis("active experts", [*counts, *([chance] if chance else [])], from_zero=True)
    under = [svg.guide_across(y, chance)] if chance else []
    series = [_over(row, numbers, "active_experts_by_layer", styles) for row, numbers in zip(rows, layers, strict=True)]
    return svg.line_chart(title, x, y, series, under)


def acceptance_by_depth(rows: Sequence[ReportRow], title: str, styles: Styles) -> str:
    """Acceptance over depth below the root."""
    x = svg.whole_axis("depth in the draft tree", [depth for row in rows for depth in _depths(row)])
    y = svg.Axis("accepted", 0.0, 1.02, (0.0, 0.25, 0.5, 0.75, 1.0))
    series = [_over(row, _depths(row), "acceptance_by_depth", styles) for row in rows]
    return svg.line_chart(title, x, y, series)


def ladder_figure(ladder: Mapping[str, dict]) -> str:
    """Overlap of the predictor and of the simple predictors that it must beat, best first."""
    ordered = sorted(ladder.items(), key=lambda item: item[1]["overlap"], reverse=True)
    bars = []
    for name, metrics in ordered:
        value = percent(metrics["overlap"])
        bars.append(
            svg.Bar(name, value, [("learned" if name.startswith("predictor") else "simple", metrics["overlap"], value)])
        )
    drawing = svg.bar_chart("Overlap of expert predictors", bars, 1.0)
    return figure("How well experts are predicted", _LADDER, "", [("", drawing)])


def _figure(
    heading: str,
    caption: str,
    panels: Sequence[Sequence[ReportRow]],
    several_folders: bool,
    styles: Styles | None,
    draw: Callable[..., str],
) -> str:
    """One figure with a panel for each group of rows; empty when there is no panel."""
    if not panels:
        return ""
    draw = draw if styles is None else partial(draw, styles=styles)
    titles = [_panel_title(rows, several_folders) for rows in panels]
    drawn = [(title, draw(rows, f"{heading}: {title}")) for title, rows in zip(titles, panels, strict=True)]
    shown = {row.name for rows in panels for row in rows}
    entries = _part_legend() if styles is None else _method_legend({n: s for n, s in styles.items() if n in shown})
    return figure(heading, caption, entries, drawn)


def _method_legend(styles: Styles) -> str:
    return legend([(svg.swatch(style.css, style.marker), name) for name, style in styles.items()])


def _part_legend() -> str:
    return legend([(svg.swatch(part.key), f"{part.label} ({part.key})") for part in PARTS])


def _by_gamma(rows: Sequence[ReportRow]) -> list[list[ReportRow]]:
    """The rows of each gamma, those without one (plain decoding) in every list."""
    gammas = distinct(row.gamma for row in rows)
    return [[row for row in rows if row.gamma in (None, gamma)] for gamma in gammas] or [list(rows)]


def _having(panels: Sequence[Sequence[ReportRow]], *keys: str) -> list[list[ReportRow]]:
    """The panels with the rows of which no `keys` are null or empty, without panels that have none."""
    kept = [[row for row in rows if all(row[key] for key in keys)] for rows in panels]
    return [rows for rows in kept if rows]


def _panel_title(rows: Sequence[ReportRow], several_folders: bool) -> str:
    gammas = distinct(row.gamma for row in rows)
    written = f", γ = {gammas[0]}" if len(gammas) == 1 else ""
    return setting_title(rows[0], several_folders) + written


def _expert_counts(rows: Sequence[ReportRow]) -> tuple[int, int] | None:
    """(E, K) where all rows have the same."""
    counts = {(row.num_experts, row.top_k) for row in rows}
    return next(iter(counts)) if len(counts) == 1 and None not in next(iter(counts)) else None


def _layers(row: ReportRow) -> list[int]:
    return row.moe_layers or list(range(len(row["active_experts_by_layer"])))


def _depths(row: ReportRow) -> list[int]:
    return list(range(1, len(row["acceptance_by_depth"]) + 1))


def _over(row: ReportRow, numbers: Sequence[int], key: str, styles: Styles) -> svg.Series:
    points = [(number, value) for number, value in zip(numbers, row[key], strict=True) if value is not None]
    return svg.Series(row.name, styles[row.name], points, [f"{a}: {b:.3g}" for a, b in points])


_SCATTER = (
    "Up is more tokens for each pass of the target, left is fewer experts read for it. The dashed curve is <i>n</i> "
    "tokens, all of them emitted, whose experts are drawn uniformly and independently; plain decoding lies on it. "
    "Dotted: what γ such tokens would touch. Points of one method at several γ are joined."
)
_TIMES = (
    "Mean milliseconds of one step, all data sets together. A dash: times that would include a pass no decoder makes."
)
_LAYERS = (
    "Unique experts that one verification pass touches in each MoE layer, mean over steps. "
    "Dotted: what γ tokens would touch if their experts were drawn uniformly and independently."
)
_DEPTH = "Share of steps in which a drafted token of this depth was accepted."
_LADDER = (
    "Overlap: the share of the target's top-K experts that are among the predictor's K, over held-out text. "
    "<i>frequency</i> always names the layer's most used experts, <i>token</i> those most used for the token."
)
