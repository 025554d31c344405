"""One run as a row of `results.json` or `replay.json`: what was run, and the value of every metric."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ecospec.inference.metrics.metric import REPLAY, RESULTS
from ecospec.inference.metrics.table import METRICS, metrics_of


@dataclass(frozen=True)
class RunRow:
    """A method's run on a data set. `row[key]` is the value of a metric, None where it was not measured.

    `drafter`: its kind, or the name of a baseline; `selection`, `gamma`, `epsilon`, `options` (the others, in
    no file where it is null): what the selector says of itself;
    `predictor`: the name of the folder behind the footprints; `seen`: something in use was trained or fitted on the
    data set; `moe_layers`: the model's own numbers of its MoE layers.
    """

    label: str
    drafter: str | None = None
    selection: str | None = None
    footprints: str | None = None
    predictor: str | None = None
    gamma: int | None = None
    epsilon: float | None = None
    tree: dict | None = None
    dtype: str | None = None
    expert_mib: float | None = None
    threads: int | None = None
    target: str | None = None
    num_experts: int | None = None
    top_k: int | None = None
    moe_layers: list[int] | None = None
    dataset: str | None = None
    seen: bool | None = None
    temperature: float | None = None
    batch_size: int | None = None
    chat_template: bool | None = None
    options: dict | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    def __getitem__(self, key: str) -> object:
        return self.values.get(key)

    @property
    def is_reference(self) -> bool:
        """Whether this is plain decoding by the verifier's own loop, to which every speedup and verdict is relative."""
        return self["lossless"] == "reference"

    @property
    def is_ecospec(self) -> bool:
        """Whether the method is the one that this project is about; reports highlight it."""
        return self.selection == "marginal"

    def measured(self, measurements: Mapping[str, object]) -> "RunRow":
        """The row with the value of every metric. See `ecospec.inference.metrics.table` for the names."""
        return replace(self, values={metric.key: metric.value(measurements) for metric in METRICS})

    def to_json(self, file: str) -> dict:
        """The row as it stands in `file`, one of `results.json` and `replay.json`."""
        known = {name: getattr(self, name) for name in FIELDS[file]}
        known |= {} if self.options is None else {"options": self.options}
        return known | {metric.key: self[metric.key] for metric in metrics_of(file)}

    @classmethod
    def from_json(cls, row: Mapping[str, object], **others: object) -> "RunRow":
        """The row that `to_json`, or an older version, made `row` of; `others`: what a sub-class has beside.

        Keys that it lacks are null, those that no field and no metric has are left out.
        """
        known = {one.name: row[one.name] for one in fields(RunRow) if one.name in row and one.name != "values"}
        return cls(**known, values={metric.key: row.get(metric.key) for metric in METRICS}, **others)


FIELDS = {
    RESULTS: tuple(one.name for one in fields(RunRow) if one.name not in ("values", "options")),
    REPLAY: (
        "label",
        "target",
        "drafter",
        "selection",
        "footprints",
        "predictor",
        "temperature",
        "gamma",
        "epsilon",
        "tree",
        "batch_size",
        "num_experts",
        "top_k",
        "dataset",
    ),
}
