"""Benchmark: the shell around the target on the widened lab, from a run folder of `ecospec-decode eval`.

    ecospec-decode eval --config lab/decode --output RUN
    python tests/benchmarks/widened_decoding.py RUN

Prints two things against their limits: `t_select + t_accept + t_other` as a share of `t_step`, and the speed of our
plain loop over Transformers' own `generate` (median over data sets and temperatures; prompts ran interleaved).
"""

import json
import statistics
import sys
from pathlib import Path

SHELL_LIMIT = 0.05
PLAIN_LIMIT = 0.97


def shell_share(run: dict) -> float:
    return (run["t_select"] + run["t_accept"] + run["t_other"]) / run["t_step"]


def main(folder: str) -> int:
    runs = json.loads((Path(folder) / "results.json").read_text())["runs"]
    failed = 0
    for run in runs:
        if run["t_step"] is not None:
            share = shell_share(run)
            failed += share > SHELL_LIMIT
            where = f"{run['label']:<28} {run['dataset']:<12} T={run['temperature']:<4}"
            print(f"{where} shell {100 * share:5.2f} % of a step")
    speeds = {(r["dataset"], r["temperature"], r["drafter"]): r["tokens_per_second"] for r in runs}
    ratios = [speed / speeds[d, t, "hf_greedy"] for (d, t, drafter), speed in speeds.items() if drafter == "none"]
    ratio = statistics.median(ratios)
    failed += ratio < PLAIN_LIMIT
    print(f"our plain loop over stock generate: median {ratio:.3f} of {[round(r, 3) for r in ratios]}")
    print("within the limits" if not failed else f"{failed} outside the limits ({SHELL_LIMIT:.0%}, {PLAIN_LIMIT})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
