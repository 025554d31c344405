"""The numbers of a report: runs grouped into tables, and one row per method pooled over data sets.

A run is an entry of `results.json`, to which reading added `run_folder`. Symbols as in the report: alpha tokens emitted
per step, gamma tokens verified per step, E experts and K experts per token of a layer, L MoE layers.
Knows nothing of files, HTML or SVG.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

SETTING = ("run_folder", "temperature", "batch_size")
DETAILS = ("drafter", "selection", "footprints", "predictor", "epsilon", "tree", "dtype", "expert_mib", "threads")
METHOD = (*SETTING, "label", "gamma", *DETAILS)
SAME_MACHINE_WORK = (*SETTING, "dtype", "expert_mib", "threads")
TIMES = ("t_draft", "t_predict", "t_select", "t_verify", "t_accept", "t_other")
STEP_MEANS = (*TIMES, "t_step", "acceptance_length", "active_experts", "verified_tokens_per_step", "overlap")
STEP_MEAN_LISTS = ("active_experts_by_layer", "acceptance_by_depth")
SHAPE = ("num_experts", "top_k", "moe_layers")


@dataclass(frozen=True)
class Group:
    """Rows of one data set, or (dataset None) the rows pooled over `datasets` of them."""

    dataset: str | None
    datasets: int
    rows: list[dict]


@dataclass(frozen=True)
class Table:
    """All rows of one setting: the same run folder, temperature and batch size."""

    setting: dict
    groups: list[Group]


def name_methods(runs: Sequence[dict]) -> list[dict]:
    """The runs with `name`: the label, and in brackets each detail in which runs of that label differ."""
    by_label = group_by(runs, lambda run: run["label"])
    varying = {label: [d for d in DETAILS if len(group_by(rows, _key(d))) > 1] for label, rows in by_label.items()}
    return [run | {"name": _name(run, varying[run["label"]])} for run in runs]


def make_tables(runs: Sequence[dict]) -> list[Table]:
    """A table for each setting: the pooled rows first where there are several data sets, then each data set's."""
    tables = []
    for rows in group_by(runs, _key(*SETTING)).values():
        groups = [Group(name, 1, members) for name, members in group_by(rows, lambda run: run["dataset"]).items()]
        if len(groups) > 1 and (pooled := pool_methods(rows)):
            groups.insert(0, Group(None, len(unseen_datasets(rows)), pooled))
        tables.append(Table({key: rows[0].get(key) for key in SETTING}, groups))
    return tables


def pool_methods(runs: Sequence[dict]) -> list[dict]:
    """A row for each method of each setting, pooled over the data sets that nothing was trained or fitted on."""
    unseen = [run for run in runs if not run.get("seen")]
    return [pool(rows, [_reference(row, runs) for row in rows]) for rows in group_by(unseen, _key(*METHOD)).values()]


def pool(runs: Sequence[dict], references: Sequence[dict | None]) -> dict:
    """One row for one method's runs on several data sets; `references` are plain decoding's runs on the same sets.

    Means over steps are weighted by steps; throughput is total tokens / total seconds of decoding, and speedup the
    ratio of two throughputs. A field that is null in one run is null in the row.
    """
    steps = [run["steps"] for run in runs]
    row = {key: runs[0].get(key) for key in (*METHOD, *SHAPE, "name", "notice")}
    row |= {key: _mean([run.get(key) for run in runs], steps) for key in STEP_MEANS}
    row |= {key: _mean_list([run.get(key) for run in runs], steps) for key in STEP_MEAN_LISTS}
    throughput, plain = _throughput(runs), _throughput(references)
    return row | {
        "datasets": [run["dataset"] for run in runs],
        "samples": sum(run.get("samples") or 0 for run in runs),
        "tokens": sum(run["tokens"] for run in runs),
        "steps": sum(steps),
        "tokens_per_second": throughput,
        "speedup_vs_ar": throughput / plain if throughput and plain else None,
        "lossless": _pool_verdicts([run.get("lossless") for run in runs]),
    }


def unseen_datasets(runs: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(run["dataset"] for run in runs if not run.get("seen")))


def is_reference(run: dict) -> bool:
    """Whether this is plain decoding by the verifier's own loop, which every speedup and verdict is relative to."""
    return run.get("lossless") == "reference"


def is_ecospec(run: dict) -> bool:
    return run.get("selection") == "marginal"


def distinct(runs: Iterable[dict], key: str) -> list:
    """Values of `key` that are not null, each once, in order of appearance."""
    return list(dict.fromkeys(run[key] for run in runs if run.get(key) is not None))


def group_by(runs: Iterable[dict], key: Callable[[dict], Hashable]) -> dict[Hashable, list[dict]]:
    groups = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _key(*names: str) -> Callable[[dict], str]:
    return lambda run: json.dumps([run.get(name) for name in names], sort_keys=True)


def _name(run: dict, details: list[str]) -> str:
    shown = [f"{d} {v if isinstance(v, str) else json.dumps(v)}" for d in details if (v := run.get(d)) is not None]
    return f"{run['label']} ({', '.join(shown)})" if shown else run["label"]


def _reference(run: dict, runs: Sequence[dict]) -> dict | None:
    same = _key("dataset", *SAME_MACHINE_WORK)
    return next((other for other in runs if is_reference(other) and same(other) == same(run)), None)


def _throughput(runs: Sequence[dict | None]) -> float | None:
    """Tokens per second over all runs; prefill and the token it gives are not counted."""
    if not all(run and run.get("tokens_per_second") for run in runs):
        return None
    tokens = sum(run["tokens_per_second"] * run["decode_seconds"] for run in runs)
    return tokens / sum(run["decode_seconds"] for run in runs)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    if any(value is None for value in values) or not sum(weights):
        return None
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _mean_list(lists: Sequence[list | None], weights: Sequence[float]) -> list | None:
    """Position by position; a position that some list lacks is null."""
    if not all(lists) or not sum(weights):
        return None
    longest = max(map(len, lists))
    padded = [[*values, *[None] * (longest - len(values))] for values in lists]
    return [_mean(column, weights) for column in zip(*padded, strict=True)]


def _pool_verdicts(verdicts: Sequence[object]) -> object:
    """The common verdict, all differences in one list where there are some, or the verdicts side by side."""
    differences = [item for verdict in verdicts if isinstance(verdict, list) for item in verdict]
    if differences:
        return differences
    return ", ".join(dict.fromkeys(str(verdict) for verdict in verdicts if verdict is not None)) or None
