"""Replayed runs as a Markdown table."""

from ecospec.inference.replay.modelled_speed import FIXED_SHARE

_HEADINGS = (
    "γ",
    "selection",
    "α",
    "𝓔",
    "α beyond EAGLE's",
    "𝓔 beyond EAGLE's",
    "α beyond oracle's",
    "𝓔 beyond oracle's",
    "saving kept",
    f"modelled speed-up ({', '.join(FIXED_SHARE)})",
)
_DIFFERENCES = tuple(
    f"{name}_{kind}" for kind in ("difference", "regret") for name in ("acceptance_length", "active_experts")
)


def replay_table(runs: list[dict]) -> str:
    """A row a run, with 95 % intervals; a dash for what does not apply."""
    rows = [_HEADINGS, ["---" if heading == "selection" else "---:" for heading in _HEADINGS]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (*rows, *map(_cells, runs)))


def _cells(run: dict) -> list[str]:
    speedups = run["modelled_speedup"]
    return [
        str(run["gamma"]),
        run["label"],
        *(_estimate(run, name, ".2f") for name in ("acceptance_length", "active_experts")),
        *(_estimate(run, name, "+.2f") for name in _DIFFERENCES),
        _estimate(run, "saving_kept", ".2f"),
        "–" if speedups is None else ", ".join(f"{value:.2f}" for value in speedups.values()),
    ]


def _estimate(run: dict, name: str, form: str) -> str:
    value, interval = run[name], run.get(f"{name}_interval")
    if value is None:
        return "–"
    return f"{value:{form}}" + (f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else "")
