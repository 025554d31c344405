"""`stats.html`, and the short table that `ecospec-trace stats` prints: pure functions of what `stats.json` holds."""

from collections.abc import Mapping

import numpy as np

from ecospec.report.page import definitions, provenance_of, render_page, section
from ecospec.report.table import DASH, Column, Table, cell, decimals, html_row, html_table, percent
from ecospec.tracing.stats.agreement import MEASURES
from ecospec.tracing.stats.plots import (
    ALL,
    LAYER_TOKENS,
    agreement_figure,
    evenness_figure,
    groups,
    load_figure,
    load_figures_by_dataset,
    locality_figure,
)

TITLE = "EcoSpec routing statistics"


def _percent_range(ends: list[float]) -> str:
    return f"{100 * ends[0]:.1f}{DASH}{100 * ends[1]:.1f} %"


LOAD = (
    Column("samples", "samples", decimals(0)),
    Column("tokens", "tokens", decimals(0)),
    Column("entropy_bits", "entropy, bits", decimals(2)),
    Column("entropy_share", "of log₂ E", percent),
    Column("experts_used", "experts used", decimals(1)),
    Column("experts_for_half", "for half the load", decimals(1)),
    Column("max_over_mean", "max/mean", decimals(2)),
)
LOCALITY = (
    Column("union", f"union of {LAYER_TOKENS}", decimals(2)),
    Column("union_interval", "95 % interval", lambda ends: f"{ends[0]:.2f}{DASH}{ends[1]:.2f}"),
    Column("union_chance", "chance", decimals(2)),
    Column("union_loads", "of these loads", decimals(2)),
    Column("reuse", "reuse", percent),
    Column("reuse_interval", "95 % interval", _percent_range),
    Column("reuse_chance", "chance", percent),
    Column("reuse_loads", "of these loads", percent),
)
PRINTED = ("tokens", "entropy_share", "experts_for_half", "max_over_mean", "union", "union_chance", "reuse")
AGREEMENT = (
    Column("overlap", "overlap", percent),
    Column("overlap_interval", "95 % interval", _percent_range),
    Column("overlap_all", "with prompts", percent),
    Column("overlap_all_interval", "95 % interval", _percent_range),
    Column("same_sets", "same sets", percent),
    Column("changed_tokens", "changed tokens", percent),
)
GLOSSARY = {
    "all columns": "means over layers",
    "entropy": "of a layer's load over its E experts; log₂ E bits where all are used equally",
    "experts used": "experts of a layer that at least one token uses",
    "for half the load": "the fewest experts of a layer that carry half of its load",
    "max/mean": "the most used expert's load over the mean one's",
    f"union of {LAYER_TOKENS}": f"unique experts per layer that {LAYER_TOKENS} consecutive tokens of a sample use",
    "reuse": "share of a token's experts that the token before it used in the same layer",
    "chance": "the same for tokens that draw K of E experts uniformly and independently; limiting each draw to a few "
    "groups of experts, as DeepSeek-V3 does, leaves this mean as it is",
    "of these loads": "the same for independent tokens that use experts as unevenly as the data set does; what remains "
    "between this and the measured value is locality in time",
    "95 % interval": "bootstrap over samples",
}
AGREEMENT_GLOSSARY = {
    "overlap": "share of the chosen experts that both traces name, from the end of the prompt on",
    "with prompts": "the same over all tokens",
    "same sets": "share of tokens' layers in which all K experts are the same",
    "changed tokens": "share of tokens with another expert in at least one layer",
}


def render_stats(stats: dict, loads: Mapping[str, np.ndarray]) -> str:
    """The page; `loads`: data set → counts [L, E]."""
    glossary = GLOSSARY | (AGREEMENT_GLOSSARY if "agreement" in stats else {})
    parts = [
        section(
            "Results", _table("Expert load", LOAD, _rows(stats)) + _table("Locality in time", LOCALITY, _rows(stats))
        ),
        _agreement(stats),
        load_figure(loads, stats),
        load_figures_by_dataset(loads, stats),
        evenness_figure(loads, stats),
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
    columns = [column for column in (*LOAD, *LOCALITY) if column.key in PRINTED]
    table = Table.of(["data set"], columns, [([name], row) for name, row in _rows(stats).items()]).text()
    if "agreement" not in stats:
        return table
    found = _flat(stats["agreement"]["overall"])
    shown = [f"{column.heading} {cell(found, column)}" for column in AGREEMENT if column.key in MEASURES]
    return f"{table}\nagreement with {_name(stats['agreement']['with'])}: {', '.join(shown)}"


def _agreement(stats: dict) -> str:
    """The table of agreement and what it leaves out; nothing where there was no second trace."""
    if "agreement" not in stats:
        return ""
    found = stats["agreement"]
    rows = {name: _flat(group) for name, group in groups(found).items()}
    left_out = (
        f"{found['only_here']} samples only here, {found['only_there']} only there, {found['other_text']} of other text"
    )
    caption = f"Against {_name(found['with'])}; left out: {left_out}"
    return section("Agreement with the second trace", _table(caption, (*LOAD[:2], *AGREEMENT), rows))


def _table(caption: str, columns: tuple[Column, ...], rows: Mapping[str, dict]) -> str:
    body = "\n".join(html_row(row, name, columns, highlight=name == ALL) for name, row in rows.items())
    return html_table(caption, "data set", columns, [f"<tbody>{body}</tbody>"])


def _rows(stats: dict) -> dict[str, dict]:
    """The table's row of each group: its scalars, its union of LAYER_TOKENS and its reuse by the next token."""
    return {
        name: group | _prefixed("union", group["union"][LAYER_TOKENS - 1]) | _prefixed("reuse", group["reuse"][0])
        for name, group in groups(stats).items()
    }


def _prefixed(name: str, row: dict) -> dict:
    loads = row["chance_of_loads"]
    values = {"": row["mean"], "_interval": row["interval"], "_chance": row["chance"], "_loads": loads}
    return {name + ending: value for ending, value in values.items()}


def _flat(agreement: dict) -> dict:
    means = {name: agreement[name]["mean"] for name in MEASURES}
    return agreement | means | {f"{name}_interval": agreement[name]["interval"] for name in MEASURES}


def _name(trace: dict) -> str:
    """Target, type and engine."""
    target, engine = trace["target"], trace["engine"] or {}
    parts = [target["name"], target.get("dtype"), " ".join(str(value) for value in engine.values())]
    return ", ".join(part for part in parts if part)
