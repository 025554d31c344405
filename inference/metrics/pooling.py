"""One value for a method from those of its runs on several data sets.

Every function takes a metric's key, the runs, and plain decoding's runs on the same data sets (None where there is
none). What is null in one run is null for all.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecospec.inference.metrics.rows import RunRow


def mean_over_steps(key: str, runs: "Sequence[RunRow]", references: "Sequence[RunRow | None]") -> object:
    """Mean weighted by steps; of lists position by position, null where one of them has no such position."""
    values, steps = [run[key] for run in runs], [run["steps"] for run in runs]
    if not all(isinstance(value, list) for value in values):
        return _mean(values, steps)
    if not all(values) or not sum(steps):
        return None
    longest = max(map(len, values))
    padded = [[*value, *[None] * (longest - len(value))] for value in values]
    return [_mean(column, steps) for column in zip(*padded, strict=True)]


def total(key: str, runs: "Sequence[RunRow]", references: "Sequence[RunRow | None]") -> object:
    """Sum; a run that does not say counts for nothing."""
    return sum(run[key] or 0 for run in runs)


def throughput(key: str, runs: "Sequence[RunRow]", references: "Sequence[RunRow | None]") -> float | None:
    """Total tokens over total seconds of decoding; prefill and the token it gives are not counted."""
    return _throughput(runs)


def speedup(key: str, runs: "Sequence[RunRow]", references: "Sequence[RunRow | None]") -> float | None:
    """Ratio of two throughputs."""
    rate, plain = _throughput(runs), _throughput(references)
    return rate / plain if rate and plain else None


def verdict(key: str, runs: "Sequence[RunRow]", references: "Sequence[RunRow | None]") -> object:
    """The common verdict, all differences in one list where there are some, or the verdicts side by side."""
    verdicts = [run[key] for run in runs]
    differences = [item for one in verdicts if isinstance(one, list) for item in one]
    if differences:
        return differences
    return ", ".join(dict.fromkeys(str(one) for one in verdicts if one is not None)) or None


def _throughput(runs: "Sequence[RunRow | None]") -> float | None:
    if not all(run and run["tokens_per_second"] for run in runs):
        return None
    tokens = sum(run["tokens_per_second"] * run["decode_seconds"] for run in runs)
    return tokens / sum(run["decode_seconds"] for run in runs)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    if any(value is None for value in values) or not sum(weights):
        return None
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
