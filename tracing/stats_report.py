"""`stats.html`, and the short table that `ecospec-trace stats` prints: pure functions of what `stats.json` holds."""

from collections.abc import Mapping

import numpy as np

from ecospec.configs.page import (
    DASH,
    Column,
    cell,
    decimals,
    definitions,
    html_row,
    html_table,
    provenance_of,
    render_page,
    section,
)
from ecospec.tracing.agreement import MEASURES
from ecospec.tracing.stats_plots import (
    ALL,
    LAYER_TOKENS,
    agreement_figure,
    entropy_figure,
    groups,
    load_figure,
    load_figures_by_dataset,
    locality_figure,
)

TITLE = "EcoSpec routing statistics"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _percent_range(ends: list[float]) -> str:
    return f"{100 * ends[0]:.1f}{DASH}{100 * ends[1]:.1f} %"


COLUMNS = (
    Column("samples", "samples", decimals(0)),
    Column("tokens", "tokens", decimals(0)),
    Column("entropy_bits", "entropy, bits", decimals(2)),
    Column("entropy_share", "of log₂ E", _percent),
    Column("experts_used", "experts used", decimals(1)),
    Column("experts_for_half", "for half the load", decimals(1)),
    Column("max_over_mean", "max/mean", decimals(2)),
    Column("union", f"union of {LAYER_TOKENS}", decimals(2)),
    Column("union_interval", "95 % interval", lambda ends: f"{ends[0]:.2f}{DASH}{ends[1]:.2f}"),
    Column("union_chance", "chance", decimals(2)),
    Column("reuse", "reuse", _percent),
    Column("reuse_interval", "95 % interval", _percent_range),
    Column("reuse_chance", "chance", _percent),
)
PRINTED = ("tokens", "entropy_share", "experts_for_half", "max_over_mean", "union", "union_chance", "reuse")
AGREEMENT = tuple(
    column
    for name, heading in zip(MEASURES, ("overlap", "overlap, prompts too", "same sets", "changed tokens"), strict=True)
    for column in (Column(name, heading, _percent), Column(f"{name}_interval", "95 % interval", _percent_range))
)
GLOSSARY = {
    "entropy": "of a layer's load over its E experts; log₂ E bits where all are used equally; mean over layers",
    "experts used": "experts of a layer that at least one token uses; mean over layers",
    "for half the load": "the fewest experts of a layer that carry half of its load; mean over layers",
    "max/mean": "the most used expert's load over the mean one's; mean over layers",
    f"union of {LAYER_TOKENS}": f"unique experts per layer that {LAYER_TOKENS} consecutive tokens of a sample use",
    "reuse": "share of a token's experts that the token before it used in the same layer",
    "chance": "the same for tokens that draw K of E experts uniformly and independently; limiting each draw to a few "
    "groups of experts, as DeepSeek-V3 does, leaves this mean as it is",
    "95 % interval": "bootstrap over samples",
}
AGREEMENT_GLOSSARY = {
    "overlap": "share of the chosen experts that both traces name, from the end of the prompt on",
    "same sets": "share of tokens' layers in which all K experts are the same",
    "changed tokens": "share of tokens with another expert in at least one layer",
}


def render_stats(stats: dict, loads: Mapping[str, np.ndarray]) -> str:
    """The page; `loads`: data set → counts [L, E]."""
    glossary = GLOSSARY | (AGREEMENT_GLOSSARY if "agreement" in stats else {})
    parts = [
        section("Results", _table("Means over layers", COLUMNS, _rows(stats))),
        _agreement(stats),
        load_figure(loads, stats),
        load_figures_by_dataset(loads, stats),
        entropy_figure(stats),
        locality_figure(stats),
        agreement_figure(stats),
        section("What the columns mean", definitions(glossary)),
        section("How it was made", provenance_of("ecospec-trace stats", stats["provenance"])),
    ]
    return render_page(TITLE, summary(stats), parts)


def summary(stats: dict) -> str:
    """What was traced, and how many windows were counted."""
    trace, overall, windows = stats["trace"], stats["overall"], stats["windows"]
    counted = f"all {windows['counted']:,}" if windows["one_in"] == 1 else f"{windows['counted']:,} drawn"
    return (
        f"{_name(trace)}: {len(trace['moe_layers'])} MoE layers, {trace['top_k']} of {trace['num_experts']} experts a "
        f"token. {overall['samples']:,} samples, {overall['tokens']:,} tokens; unions and reuse from {counted} windows."
    )


def text_table(stats: dict) -> str:
    """A line for all data sets together, then for each; and the agreement where there is one."""
    columns = [column for column in COLUMNS if column.key in PRINTED]
    lines = [["data set", *(column.heading for column in columns)]]
    lines += [[name, *(cell(row, column) for column in columns)] for name, row in _rows(stats).items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
    if "agreement" not in stats:
        return table
    found = _flat(stats["agreement"]["overall"])
    return f"{table}\nagreement with {_name(stats['agreement']['with'])}: " + ", ".join(
        f"{column.heading} {cell(found, column)}" for column in AGREEMENT[::2]
    )


def _agreement(stats: dict) -> str:
    """The table of agreement and what it leaves out; nothing where there was no second trace."""
    if "agreement" not in stats:
        return ""
    found = stats["agreement"]
    several = len(found["datasets"]) > 1
    rows = {ALL: found["overall"]} if several else {}
    rows |= found["datasets"]
    left_out = (
        f"{found['only_here']} samples only here, {found['only_there']} only there, {found['other_text']} of other text"
    )
    caption = f"Against {_name(found['with'])}; left out: {left_out}"
    columns = (COLUMNS[0], COLUMNS[1], *AGREEMENT)
    table = _table(caption, columns, {name: _flat(row) for name, row in rows.items()})
    return section("Agreement with the second trace", table)


def _table(caption: str, columns: tuple[Column, ...], rows: Mapping[str, dict]) -> str:
    body = "\n".join(html_row(row, name, columns, highlight=name == ALL) for name, row in rows.items())
    return html_table(caption, "data set", columns, [f"<tbody>{body}</tbody>"])


def _rows(stats: dict) -> dict[str, dict]:
    """The table's row of each group: its scalars, its union of LAYER_TOKENS and its reuse by the next token."""
    rows = {}
    for name, group in groups(stats).items():
        union, reuse = group["union"][LAYER_TOKENS - 1], group["reuse"][0]
        chosen = {"union": union["mean"], "union_interval": union["interval"], "union_chance": union["chance"]}
        chosen |= {"reuse": reuse["mean"], "reuse_interval": reuse["interval"], "reuse_chance": reuse["chance"]}
        rows[name] = group | chosen
    return rows


def _flat(agreement: dict) -> dict:
    means = {name: agreement[name]["mean"] for name in MEASURES}
    return agreement | means | {f"{name}_interval": agreement[name]["interval"] for name in MEASURES}


def _name(trace: dict) -> str:
    """Target, type and engine."""
    target, engine = trace["target"], trace["engine"] or {}
    parts = [target["name"], target.get("dtype"), " ".join(str(value) for value in engine.values())]
    return ", ".join(part for part in parts if part)
