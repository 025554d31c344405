"""The figures of `stats.html`: which numbers go into which drawing, and what each drawing shows.

Letters: L MoE layers, E experts, w consecutive tokens. Knows nothing of files; drawing is `configs.svg`'s.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ecospec.report import svg
from ecospec.report.page import figure, legend
from ecospec.tracing.stats.heatmap import DOUBLINGS, index_of, load_indices, palette, png

ALL = "all data sets"
LAYER_TOKENS = 4  # length of the windows whose unions are drawn layer by layer
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def groups(found: dict) -> dict[str, dict]:
    """What was found for each data set, and before them for all together where there are several."""
    datasets = found["datasets"]
    return {ALL: found["overall"], **datasets} if len(datasets) > 1 else dict(datasets)


def load_figure(loads: Mapping[str, np.ndarray], stats: dict) -> str:
    counts_LE, layers = sum(loads.values()), stats["trace"]["moe_layers"]
    panels = [
        ("Load of each expert", heatmap(counts_LE, layers, "expert")),
        ("The same, each layer's experts sorted by load", heatmap(-np.sort(-counts_LE, -1), layers, "rank")),
    ]
    return figure("Expert load", _LOAD, _scale(), panels)


def evenness_figure(loads: Mapping[str, np.ndarray], stats: dict) -> str:
    """Spread, entropy and coverage of the load."""
    entropy = {n: [100 * share for share in g["by_layer"]["entropy_share"]] for n, g in groups(stats).items()}
    half = {name: group["by_layer"]["experts_for_half"] for name, group in groups(stats).items()}
    total_LE, E = sum(loads.values()), stats["trace"]["num_experts"]
    by_group = groups({"overall": total_LE, "datasets": loads})
    panels = [
        ("Spread of the load within each layer, all data sets", load_spread(total_LE, stats["trace"]["moe_layers"])),
        ("Load that the most used experts carry", coverage(by_group, stats)),
        ("Entropy of the load, by layer", _over_layers(stats, "% of log₂ E", entropy, 100.0)),
        ("Experts that carry half of the load, by layer", _over_layers(stats, "experts", half, E / 2)),
    ]
    return figure("How even the load is", _EVENNESS, _group_legend(stats), panels)


def coverage(counts: Mapping[str, np.ndarray], stats: dict) -> str:
    """Share of a layer's load over the number of its most used experts, mean over layers, for each group."""
    E = stats["trace"]["num_experts"]
    places = np.unique(np.linspace(0, E, min(E, 64) + 1).astype(int))
    x, y = svg.Axis("most used experts", 0, E, _even_ticks(E)), svg.Axis("% of the load", 0, 103, range(0, 101, 25))
    series = []
    for name, counts_LE in counts.items():
        carried_LE = np.pad(-np.sort(-counts_LE, -1), ((0, 0), (1, 0))).cumsum(-1) / counts_LE.sum(-1, keepdims=True)
        points = list(zip(places.tolist(), (100 * carried_LE.mean(0)[places]).tolist(), strict=True))
        series.append(svg.Series(name, _styles(stats)[name], points, [f"{a}: {b:.0f} %" for a, b in points]))
    even = svg.polyline(x, y, [(0, 0), (E, 100)], "guide", "1 3")
    return svg.line_chart("Load that the most used experts carry", x, y, series, [even])


def load_figures_by_dataset(loads: Mapping[str, np.ndarray], stats: dict) -> str:
    """The heatmap of each data set, folded away; nothing where there is but one."""
    if len(loads) < 2:
        return ""
    layers = stats["trace"]["moe_layers"]
    panels = [(name, heatmap(counts_LE, layers, "expert")) for name, counts_LE in loads.items()]
    content = figure("Expert load by data set", "Drawn as above.", _scale(), panels)
    return f"<details>\n<summary>Expert load by data set</summary>\n{content}\n</details>"


def heatmap(counts_LE: np.ndarray, layers: Sequence[int], across: str) -> str:
    """Layers downwards, experts (by number or by rank) from left to right."""
    x, y = _expert_axis(across, counts_LE.shape[1]), svg.whole_axis("layer", layers)
    y = svg.Axis(y.title, y.high, y.low, y.ticks)
    note = f"{counts_LE.shape[0]} layers of {counts_LE.shape[1]} experts"
    image = svg.picture(x, y, png(load_indices(counts_LE, list(layers))), note)
    return svg.drawing(f"Expert load by layer and {across}", svg.HEIGHT, [image])


def load_spread(counts_LE: np.ndarray, layers: Sequence[int]) -> str:
    """Quantiles over a layer's experts of load over even share."""
    relative_QL = np.quantile(counts_LE / counts_LE.mean(-1, keepdims=True), QUANTILES, axis=-1)
    low_L, quarter_L, median_L, three_quarters_L, high_L = relative_QL.tolist()
    x, y = svg.whole_axis("layer", layers), svg.nice_axis("load, 1 = even share", [0.0, *high_L], from_zero=True)
    under = [
        svg.band(x, y, layers, low_L, high_L, "wide"),
        svg.band(x, y, layers, quarter_L, three_quarters_L, "narrow"),
        svg.guide_across(y, 1.0),
    ]
    points = list(zip(layers, median_L, strict=True))
    median = svg.Series("median", svg.style(1), points, [f"layer {a}: {b:.2f}" for a, b in points])
    return svg.line_chart("Spread of expert load within each layer", x, y, [median], under)


def locality_figure(stats: dict) -> str:
    """Unions and reuse of each data set, with what chance gives."""
    reuse, union = "% of a token's experts", "unique experts per layer"
    panels = [
        ("Union of w consecutive tokens", _curves(stats, "union", "tokens", "consecutive tokens w", union, 1)),
        (
            "Experts that the w tokens before have used",
            _curves(stats, "reuse", "previous", "tokens before w", reuse, 100),
        ),
    ]
    place = LAYER_TOKENS - 1
    if stats["overall"]["union"][place]["by_layer"]:
        curves = {name: group["union"][place]["by_layer"] for name, group in groups(stats).items()}
        drawing = _over_layers(stats, union, curves, stats["overall"]["union"][place]["chance"])
        panels.append((f"Union of {LAYER_TOKENS} consecutive tokens, by layer", drawing))
    return figure("Locality in time", _LOCALITY, _group_legend(stats), panels)


def _styles(stats: dict) -> dict[str, svg.Style]:
    """A style for each group, the same in every drawing."""
    names = list(groups(stats))
    return {name: svg.style(None if name == ALL else index) for index, name in enumerate(names, -(ALL in names))}


def _group_legend(stats: dict) -> str:
    return legend([(svg.swatch(style.css, style.marker), name) for name, style in _styles(stats).items()])


def _curves(stats: dict, key: str, along: str, x_title: str, y_title: str, unit: float) -> str:
    """A curve with intervals for each data set over the number of tokens `along`, chance beneath."""
    overall, styles = stats["overall"][key], _styles(stats)
    values = [unit * row[name] for row in overall for name in ("chance", "chance_of_loads")]
    values += [unit * row["mean"] for group in groups(stats).values() for row in group[key] if row["mean"] is not None]
    x, y = svg.whole_axis(x_title, [row[along] for row in overall]), svg.nice_axis(y_title, values, from_zero=True)
    under = [
        svg.polyline(x, y, [(row[along], unit * row[name]) for row in overall], "chance", dash)
        for name, dash in (("chance", "6 4"), ("chance_of_loads", "1 3"))
    ]
    series = []
    for name, group in groups(stats).items():
        rows = [row for row in group[key] if row["mean"] is not None]
        under += [
            svg.whiskers(x, y, row[along], [unit * end for end in row["interval"]], styles[name].css)
            for row in rows
            if row["interval"]
        ]
        points = [(row[along], unit * row["mean"]) for row in rows]
        notes = [f"{a}: {b:.2f}, chance {unit * row['chance']:.2f}" for (a, b), row in zip(points, rows, strict=True)]
        series.append(svg.Series(name, styles[name], points, notes))
    return svg.line_chart(f"{y_title} over {x_title}", x, y, series, under)


def agreement_figure(stats: dict) -> str:
    """Overlap of the two traces by layer; nothing where there was no second one."""
    if "agreement" not in stats:
        return ""
    overlap = [100 * share for share in stats["agreement"]["overall"]["by_layer"]]
    x, y = _layer_axes(stats, "% of choices that both name", [*overlap, 100.0])
    drawing = svg.line_chart("Agreement by layer", x, y, [_over(stats, "overlap", svg.style(1), overlap)])
    return figure("Re-trace agreement by layer", _AGREEMENT, "", [("", drawing)])


def _over_layers(stats: dict, y_title: str, curves: Mapping[str, Sequence[float] | None], guide: float) -> str:
    """A curve over the layers for each group that has one, and a dotted line at `guide`."""
    curves, styles = {name: curve for name, curve in curves.items() if curve}, _styles(stats)
    x, y = _layer_axes(stats, y_title, [guide, *(value for curve in curves.values() for value in curve)])
    series = [_over(stats, name, styles[name], curve) for name, curve in curves.items()]
    return svg.line_chart(f"{y_title} by layer", x, y, series, [svg.guide_across(y, guide)])


def _over(stats: dict, name: str, style: svg.Style, curve: Sequence[float]) -> svg.Series:
    points = list(zip(stats["trace"]["moe_layers"], curve, strict=True))
    return svg.Series(name, style, points, [f"layer {a}: {b:.3g}" for a, b in points])


def _layer_axes(stats: dict, y_title: str, values: Sequence[float]) -> tuple[svg.Axis, svg.Axis]:
    return svg.whole_axis("layer", stats["trace"]["moe_layers"]), svg.nice_axis(y_title, values)


def _expert_axis(title: str, num_experts: int) -> svg.Axis:
    """Experts from 0, or ranks from 1, with the edges of the picture half a step outside."""
    first, ticks = int(title == "rank"), _even_ticks(num_experts)
    last = first + num_experts - 1
    return svg.Axis(title, first - 0.5, last + 0.5, [max(tick, first) for tick in ticks if tick <= last])


def _even_ticks(num_experts: int) -> range:
    return range(0, num_experts + 1, -(-num_experts // 8))


def _scale() -> str:
    """The palette as a legend of seven steps."""
    factors = [2.0**doubling for doubling in range(-DOUBLINGS, DOUBLINGS + 1)]
    names = [f"{factor:g}×" if factor >= 1 else f"1/{1 / factor:g}×" for factor in factors]
    return legend([(_step(factor), name) for factor, name in zip(factors, names, strict=True)])


def _step(factor: float) -> str:
    """A legend's sample of the palette, framed, as an even share is clear."""
    red, green, blue, opacity = palette()[index_of(np.array(factor))]
    fill, opaque = f"rgb({red} {green} {blue})", f"{opacity / 255:.2f}"
    box = svg.element("rect", x=-5, y=-5, width=10, height=10, fill=fill, fill_opacity=opaque, class_="tick")
    return svg.element("svg", box, viewBox="-8 -8 16 16", width=18, height=18, aria_hidden="true")


_LOAD = (
    "How often each expert is chosen, over its even share of the layer's choices: blue is less, orange more, clear is "
    "even. The ends of the scale hold what lies beyond them, experts that are never chosen too."
)
_EVENNESS = (
    "Spread, in even shares: from the least to the most used expert of a layer (light), the middle half (dark) and the "
    "median. Dotted lines: an even load, whose entropy is log₂ E and of which half of the experts carry "
    "half."
)
_LOCALITY = (
    "Mean over windows of consecutive tokens of one sample and over layers; upright: 95&nbsp;% intervals over samples. "
    "Dashed, and dotted by layer: tokens that draw their experts uniformly and independently. Dotted: independent "
    "tokens that use experts as unevenly as all data sets do; what lies between the dotted line and a curve is "
    "locality in time."
)
_AGREEMENT = (
    "Share of the chosen experts that both traces of the same text name. No predictor that is fitted on one trace "
    "can be expected to do better on the other."
)
