"""What a metric is: a number of a run that files, tables and glossary show alike.

Letters: S steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ecospec.inference.metrics.pooling import mean_over_steps
from ecospec.report.table import Column, decimals

if TYPE_CHECKING:
    from ecospec.inference.decoding.statistics import Step
    from ecospec.inference.metrics.rows import RunRow

RESULTS, REPLAY = "results.json", "replay.json"
TWO_DECIMALS = decimals(2)
Pool = Callable[[str, "Sequence[RunRow]", "Sequence[RunRow | None]"], object]


def given(value: object) -> object:
    """A measurement that is reported as it is."""
    return value


def mean(values_S: np.ndarray) -> float:
    """Over all elements."""
    return float(values_S.mean())


@dataclass(frozen=True)
class Metric:
    """One key of a run's row.

    It is `of` the measurements that it `needs` (by default the one of its own name), and null where one was not made.
    `group` puts it among the others, in an order that each file and table has for itself. `files`: where it is a key.
    `pool` makes one value of those of several data sets, given key, rows and plain decoding's rows; None leaves null.
    `step`: its column of `steps.parquet`, and a measurement [S, ...] of its name.

    `heading`: of its column in reports, where it has one; shown only where some run has a value, or `always`. `write`
    turns a value that is not null into text, `timed` ones rest on the clock. `terms`: what the glossary explains.
    `replay_heading` and `replay_write` are those of the table that `replay` prints.
    """

    key: str
    group: str
    of: Callable[..., object] = mean
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = (RESULTS, REPLAY)
    pool: Pool | None = mean_over_steps
    step: "Callable[[Step], object] | None" = None
    heading: str | None = None
    write: Callable[[object], str] = TWO_DECIMALS
    always: bool = False
    timed: bool = False
    numeric: bool = True
    terms: Mapping[str, str] = field(default_factory=dict)
    replay_heading: str | None = None
    replay_write: Callable[[object], str] = TWO_DECIMALS

    def value(self, measurements: Mapping[str, object]) -> object:
        """Its value for a run, None where that was not measured."""
        found = [measurements.get(name) for name in self.needs or (self.key,)]
        return None if any(one is None for one in found) else self.of(*found)

    def column(self, heading: str | None = None) -> Column:
        """Its column in a report, under another heading where one is given."""
        return Column(self.key, heading or self.heading or self.key, self.write, self.timed, self.numeric)
