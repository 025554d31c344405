"""The numbers of a report: runs grouped into tables, and one row per method pooled over data sets.

Knows nothing of files, HTML or SVG.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ecospec.inference.metrics.rows import RunRow
from ecospec.inference.metrics.table import METRICS

SETTING = ("run_folder", "temperature", "batch_size")
DETAILS = (
    "drafter",
    "selection",
    "footprints",
    "predictor",
    "epsilon",
    "options",
    "tree",
    "dtype",
    "expert_mib",
    "threads",
)
METHOD = (*SETTING, "label", "gamma", *DETAILS)
SAME_MACHINE_WORK = (*SETTING, "dtype", "expert_mib", "threads")


@dataclass(frozen=True)
class ReportRow(RunRow):
    """A run as reports show it: with its run folder and that folder's notice, and the method's `name` in the tables.

    `datasets`: of a pooled row, those that it is pooled over. `raw`: the run as the file has it.
    """

    run_folder: str = ""
    notice: str | None = None
    name: str = ""
    datasets: tuple[str, ...] = ()
    raw: Mapping[str, object] = field(default_factory=dict)

    @property
    def cells(self) -> dict:
        """What columns of tables show."""
        return {"gamma": self.gamma, **self.values}


@dataclass(frozen=True)
class Group:
    """Rows of one data set, or (dataset None) the rows pooled over `datasets` of them."""

    dataset: str | None
    datasets: int
    rows: list[ReportRow]


def name_methods(runs: Sequence[ReportRow]) -> list[ReportRow]:
    """The runs with `name`: the label, and in brackets each detail in which runs of that label differ."""
    by_label = group_by(runs, lambda run: run.label)
    varying = {label: [d for d in DETAILS if len(group_by(rows, _key(d))) > 1] for label, rows in by_label.items()}
    return [replace(run, name=_name(run, varying[run.label])) for run in runs]


def by_setting(runs: Iterable[ReportRow]) -> list[list[ReportRow]]:
    """The runs that share run folder, temperature and batch size."""
    return list(group_by(runs, _key(*SETTING)).values())


def make_groups(runs: Sequence[ReportRow]) -> list[Group]:
    """Of the runs of one setting: the pooled rows first where there are several data sets, then each data set's."""
    groups = [Group(name, 1, members) for name, members in group_by(runs, lambda run: run.dataset).items()]
    if len(groups) > 1 and (pooled := pool_methods(runs)):
        groups.insert(0, Group(None, len(unseen_datasets(runs)), pooled))
    return groups


def pool_methods(runs: Sequence[ReportRow]) -> list[ReportRow]:
    """A row for each method of each setting, pooled over the data sets that nothing was trained or fitted on."""
    unseen = [run for run in runs if not run.seen]
    return [pool(rows, [_reference(row, runs) for row in rows]) for rows in group_by(unseen, _key(*METHOD)).values()]


def pool(runs: Sequence[ReportRow], references: Sequence[ReportRow | None]) -> ReportRow:
    """One row for one method's runs on several data sets; `references` are plain decoding's runs on the same sets."""
    values = {metric.key: metric.pool and metric.pool(metric.key, runs, references) for metric in METRICS}
    return replace(runs[0], dataset=None, datasets=tuple(run.dataset for run in runs), values=values, raw={})


def unseen_datasets(runs: Iterable[ReportRow]) -> list[str]:
    return distinct(run.dataset for run in runs if not run.seen)


def distinct(values: Iterable[Hashable]) -> list:
    """The values that are not null, each once, in order of appearance."""
    return list(dict.fromkeys(value for value in values if value is not None))


def group_by(runs: Iterable[ReportRow], key: Callable[[ReportRow], Hashable]) -> dict[Hashable, list[ReportRow]]:
    """The runs by what `key` says of them, in order of appearance."""
    groups = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _key(*names: str) -> Callable[[ReportRow], str]:
    return lambda run: json.dumps([getattr(run, name) for name in names], sort_keys=True)


def _name(run: ReportRow, details: list[str]) -> str:
    values = {detail: getattr(run, detail) for detail in details}
    shown = [f"{d} {v if isinstance(v, str) else json.dumps(v)}" for d, v in values.items() if v is not None]
    return f"{run.label} ({', '.join(shown)})" if shown else run.label


def _reference(run: ReportRow, runs: Sequence[ReportRow]) -> ReportRow | None:
    same = _key("dataset", *SAME_MACHINE_WORK)
    return next((other for other in runs if other.is_reference and same(other) == same(run)), None)
