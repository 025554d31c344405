"""The metrics. A column is one entry of `METRICS`: rows of files, pooled rows, tables and glossary follow from it.

Measurements, by name, from which they are made (live decoding knows all, replay some): `samples` prompts; `tokens`;
for each batch of prompts `tokens_P` after prefill's and their `seconds_P`, plain decoding's `plain_tokens_P` and
`plain_seconds_P`, and `prefill_P` seconds; `steps`; for each step and text the tokens `emitted_R` and the nodes
`verified_R`; whatever else steps measure, by the key of its metric; `lossless`; `overlap`; `top_k`; `source_share`; and
what replay compares.

Letters: P batches of prompts, R texts of all steps, S steps, L MoE layers, K experts per token.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ecospec.bootstrap import estimate, ratio, resampled_sums
from ecospec.inference.metrics.metric import REPLAY, RESULTS, Metric, given, mean
from ecospec.inference.metrics.modelled_speed import FIXED_SHARE, modelled_speedups
from ecospec.inference.metrics.phases import OTHER, PHASES, STEP_KEY, Phase
from ecospec.inference.metrics.pooling import speedup, throughput, total, verdict
from ecospec.report.table import DASH, decimals, percent, signed

if TYPE_CHECKING:
    from ecospec.inference.decoding.statistics import Step


def milliseconds(seconds: float) -> str:
    """As milliseconds, with two decimals below 10 and one above."""
    value = 1000 * seconds
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f}{DASH}{ends[1]:.2f}"


def _verdict(value: object) -> str:
    """`exact` and its like as they are; for a list of differences, how many."""
    if isinstance(value, list):
        return f"{len(value)} difference{'s' * (len(value) != 1)}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _by_target(speedups: dict[str, float]) -> str:
    return ", ".join(f"{value:.2f}" for value in speedups.values())


def _rate(tokens_P: np.ndarray, seconds_P: np.ndarray) -> float | None:
    """Tokens per second; None where prefill gave every text's only token."""
    return float(tokens_P.sum() / seconds_P.sum()) if tokens_P.sum() > 0 else None


def _speedup(tokens_P: np.ndarray, seconds_P: np.ndarray, *plain: np.ndarray) -> float | None:
    rate, plain_rate = _rate(tokens_P, seconds_P), _rate(*plain)
    return rate / plain_rate if rate and plain_rate else None


def _speedup_interval(
    tokens_P: np.ndarray, seconds_P: np.ndarray, plain_tokens_P: np.ndarray, plain_seconds_P: np.ndarray
) -> list[float] | None:
    """Over the prompts; None for a single batch of them."""
    if len(tokens_P) < 2 or not tokens_P.sum() > 0:
        return None
    sums = resampled_sums(np.stack([tokens_P, seconds_P, plain_tokens_P, plain_seconds_P], -1)).T
    return estimate(ratio(sums[0] / sums[1], sums[2] / sums[3]))[1]


def _by_depth(emitted_R: np.ndarray) -> list[float]:
    """Share of steps in which a draft of each depth was accepted."""
    return [float((emitted_R > depth).mean()) for depth in range(1, int(emitted_R.max()))]


def _rest(*seconds_S: np.ndarray) -> float:
    """Seconds of the step, which come last, that no phase accounts for."""
    *phases, whole = (mean(one_S) for one_S in seconds_S)
    return whole - sum(phases)


def _modelled(emitted_R: np.ndarray, active_SL: np.ndarray, top_k: int, share: float = 0.0) -> dict[str, float]:
    return modelled_speedups(mean(emitted_R), mean(active_SL), top_k, share)


def _seconds_of(phase: Phase) -> "Callable[[Step], float | None]":
    return lambda step: step.clock and step.clock.seconds()[phase.name]


def _time(phase: Phase, **others: object) -> Metric:
    """Seconds of a phase a step."""
    shown = {"write": milliseconds, "timed": True, "terms": {phase.key: phase.definition}}
    return Metric(phase.key, "times", **shown, **others)


def _compared(key: str, group: str, heading: str, form: Callable[[object], str]) -> list[Metric]:
    """A number that replay compares, and its interval."""
    replayed = {"of": given, "files": (REPLAY,), "pool": None}
    shown = Metric(key, group, replay_heading=heading, replay_write=form, **replayed)
    return [shown, Metric(f"{key}_interval", group, **replayed)]


_RATES = ("tokens_P", "seconds_P")
_BOTH_RATES = (*_RATES, "plain_tokens_P", "plain_seconds_P")
_MODEL = ("emitted_R", "active_experts", "top_k")

METRICS = [
    Metric("samples", "counts", given, pool=total),
    Metric(
        "tokens",
        "counts",
        given,
        files=(RESULTS,),
        pool=total,
        heading="tokens",
        write=decimals(0),
        always=True,
    ),
    Metric(
        "tokens_per_second",
        "speed",
        _rate,
        _RATES,
        pool=throughput,
        heading="tokens/s",
        write=decimals(1),
        always=True,
        timed=True,
        terms={"tokens/s": "tokens emitted per second of decoding, prefill not counted"},
    ),
    Metric(
        "speedup_vs_ar",
        "speed",
        _speedup,
        _BOTH_RATES,
        pool=speedup,
        heading="speedup",
        write=decimals(2, "×"),
        always=True,
        timed=True,
        terms={"speedup": "tokens/s over that of plain decoding on the same prompts at the same batch size"},
    ),
    Metric(
        "interval",
        "speed",
        _speedup_interval,
        _BOTH_RATES,
        pool=None,
        heading="95 % interval",
        write=_range,
        always=True,
        timed=True,
        terms={"95 % interval": "of the speedup, over prompts"},
    ),
    Metric("decode_seconds", "seconds", lambda s_P: float(s_P.sum()), ("seconds_P",), files=(RESULTS,), pool=total),
    Metric("prefill_seconds", "seconds", mean, ("prefill_P",), pool=None),
    Metric(
        "steps",
        "steps",
        given,
        pool=total,
        terms={
            "step": "one pass of the target model over the tokens to be verified; plain decoding verifies one token "
            "per step"
        },
    ),
    Metric(
        "acceptance_length",
        "steps",
        mean,
        ("emitted_R",),
        heading="α",
        always=True,
        terms={"α, acceptance length": "tokens emitted per step, the bonus token included; 1.00 for plain decoding"},
        replay_heading="α",
    ),
    Metric("acceptance_by_depth", "steps", _by_depth, ("emitted_R",)),
    Metric(
        "emitted_histogram",
        "steps",
        lambda emitted_R: np.bincount(emitted_R)[1:].tolist(),
        ("emitted_R",),
        files=(REPLAY,),
        pool=None,
    ),
    Metric(
        "active_experts",
        "steps",
        step=lambda step: step.active_by_layer(),
        heading="𝓔",
        write=decimals(1),
        always=True,
        terms={
            "𝓔, active experts": "unique routed experts per MoE layer that one step touches; each must be read from "
            "memory"
        },
        replay_heading="𝓔",
    ),
    Metric("active_experts_by_layer", "steps", lambda active_SL: active_SL.mean(0).tolist(), ("active_experts",)),
    Metric(
        "verified_tokens_per_step",
        "steps",
        mean,
        ("verified_R",),
        heading="verified",
        always=True,
        terms={
            "γ": "tokens verified per step, the tree's root included; γ = 4 lets three drafted tokens be tried",
            "verified": "tokens verified per step as counted",
        },
    ),
    *(_time(phase, step=_seconds_of(phase)) for phase in PHASES),
    _time(OTHER, of=_rest, needs=(*(phase.key for phase in PHASES), STEP_KEY)),
    Metric(
        STEP_KEY,
        "times",
        step=lambda step: step.clock and step.clock.total(),
        heading="step, ms",
        write=milliseconds,
        always=True,
        timed=True,
        terms={f"{STEP_KEY}, step": "the whole step"},
    ),
    Metric(
        "lossless",
        "verdict",
        given,
        pool=verdict,
        heading="lossless",
        write=_verdict,
        always=True,
        numeric=False,
        terms={
            "lossless": "exact: the same tokens as plain decoding (the reference), one by one; otherwise what differs"
        },
    ),
    Metric(
        "overlap",
        "overlap",
        given,
        files=(RESULTS,),
        heading="overlap",
        write=percent,
        terms={"overlap": "share of the target's experts that the footprints used for selection name correctly"},
    ),
    *_compared("acceptance_length_difference", "alpha", "α beyond EAGLE's", signed(2)),
    *_compared("active_experts_difference", "experts", "𝓔 beyond EAGLE's", signed(2)),
    *_compared("acceptance_length_regret", "alpha", "α beyond oracle's", signed(2)),
    *_compared("active_experts_regret", "experts", "𝓔 beyond oracle's", signed(2)),
    *_compared("saving_kept", "saving", "saving kept", decimals(2)),
    Metric("source_share", "modelled", given, files=(REPLAY,), pool=None),
    Metric(
        "modelled_speedup",
        "modelled",
        _modelled,
        _MODEL,
        files=(REPLAY,),
        pool=None,
        replay_heading=f"modelled speed-up ({', '.join(FIXED_SHARE)})",
        replay_write=_by_target,
    ),
    Metric(
        "modelled_speedup_with_source", "modelled", _modelled, (*_MODEL, "source_share"), files=(REPLAY,), pool=None
    ),
]

# The files and the reports keep orders of their own
ORDERS = {
    RESULTS: ("counts", "speed", "seconds", "steps", "times", "verdict", "overlap"),
    REPLAY: ("counts", "speed", "times", "seconds", "verdict", "steps", "alpha", "experts", "saving", "modelled"),
}
_TABLE_ORDER = ("steps", "speed", "times", "overlap", "verdict", "counts")
_TERMS_ORDER = ("steps", "speed", "verdict", "overlap", "times", "counts")


def metrics_of(file: str) -> list[Metric]:
    """The metrics that are keys of a file's rows, in its order."""
    return _ordered((metric for metric in METRICS if file in metric.files), ORDERS[file])


def shown_metrics() -> list[Metric]:
    """Those with a column in the tables of results, in their order."""
    return _ordered((metric for metric in METRICS if metric.heading), _TABLE_ORDER)


def explained_metrics() -> list[Metric]:
    """Those of which the glossary says something, in its order."""
    return _ordered((metric for metric in METRICS if metric.terms), _TERMS_ORDER)


def time_metrics() -> list[Metric]:
    """The seconds of a step by phase, and of the whole step at last."""
    return [metric for metric in METRICS if metric.group == "times"]


def step_metrics() -> list[Metric]:
    """Those that each step measures."""
    return [metric for metric in METRICS if metric.step]


def _ordered(metrics: Iterable[Metric], groups: Sequence[str]) -> list[Metric]:
    return sorted(metrics, key=lambda metric: groups.index(metric.group))
