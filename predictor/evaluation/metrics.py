"""The `metrics.json` of predictors, as dataclasses."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ecospec.files import write_json
from ecospec.predictor.objective.metrics import PredictorNumbers

METRICS = "metrics.json"


@dataclass(frozen=True)
class PredictorMetrics:
    """What a predictor of a kind is worth, and under `ladder` what stands beside it, by kind."""

    kind: str
    numbers: PredictorNumbers
    ladder: dict[str, PredictorNumbers]

    @property
    def by_kind(self) -> dict[str, PredictorNumbers]:
        """All numbers, its own first."""
        return {self.kind: self.numbers, **self.ladder}

    def to_json(self) -> dict:
        """The content of the file."""
        ladder = {name: asdict(numbers) for name, numbers in self.ladder.items()}
        return {"kind": self.kind, **asdict(self.numbers), "ladder": ladder}

    def write(self, folder: Path) -> None:
        """Write the file into `folder`."""
        write_json(folder / METRICS, self.to_json())


@dataclass(frozen=True)
class GeneralisationMetrics:
    """How far a predictor carries; `whole` is of the model that saw everything.

    `by_dataset`: overlaps on each data set's held-out samples, `seen` and `unseen` in training, and those of the
    yardstick. `learning_curve`: `tokens` trained on, `overlap` and the yardstick's, a point each.
    """

    whole: PredictorMetrics
    by_dataset: Mapping[str, Mapping[str, float]]
    learning_curve: list[Mapping[str, float]]

    def to_json(self) -> dict:
        """The content of the file."""
        more = {"generalisation": dict(self.by_dataset), "learning_curve": self.learning_curve}
        return self.whole.to_json() | more

    def write(self, folder: Path) -> None:
        """Write the file into `folder`."""
        write_json(folder / METRICS, self.to_json())
