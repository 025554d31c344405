"""Benchmark: decoding steps replayed per second, on a tree file or on random pools as wide as the lab's.

    python tests/benchmarks/replay_speed.py [trees.parquet]

Prints a line for each policy and footprint source at γ = 4 against the limit: thousands of steps a second.
"""

import sys
import time
from pathlib import Path

import numpy as np

from ecospec.inference.replay.stepping import Replay, combinations
from ecospec.inference.replay.treefile import Identity, Position, TreeSet, read_trees

LIMIT = 1000.0  # steps a second
E, K, L = 64, 8, 8
PARENTS = np.array([-1, -1, 0, 0, 1, 1, 2, 2, 3, 3], np.int16)  # three levels, two children of the two best
DEPTHS = np.array([1, 1, 2, 2, 2, 2, 3, 3, 3, 3], np.int16)
PROMPTS, PLACES = 40, 64


def random_trees() -> TreeSet:
    generator = np.random.default_rng(0)
    names = [f"random/{number}" for number in range(PROMPTS)]
    identity = Identity(
        "random", "0" * 64, "random", "random", 0.0, 0, L, E, K, {"steps": 3, "topk": 2}, dict.fromkeys(names, "random")
    )
    return TreeSet(identity, [random_position(name, place, generator) for name in names for place in range(PLACES)])


def random_position(name: str, place: int, generator: np.random.Generator) -> Position:
    M = len(PARENTS)
    accepted_M = np.zeros(M, bool)
    for draft, parent in enumerate(PARENTS):
        accepted_M[draft] = draft % 2 == 0 and (parent < 0 or accepted_M[parent]) and generator.random() < 0.6
    experts = generator.random((2, M + 1, L, E)).argsort(-1)[..., :K]
    prob_M, tokens_M = generator.random(M, np.float32), np.arange(M)
    return Position(name, place, 0, PARENTS, tokens_M, prob_M, DEPTHS, tokens_M % 2, accepted_M, prob_M, *experts)


def main(path: str | None = None) -> int:
    trees = read_trees(Path(path)) if path else random_trees()
    engine, failed = Replay(trees), 0
    for one in combinations(["confidence", "marginal", "global", "random"], ["predictor", "oracle"], [4]):
        began = time.perf_counter()
        steps = sum(len(steps.emitted_S) for steps in engine.steps(one).values())
        rate = steps / (time.perf_counter() - began)
        failed += rate < LIMIT
        print(f"{one.policy:<12} {one.footprints or '-':<10} {steps:>6} steps  {rate:>9,.0f} steps/s")
    print("within the limit" if not failed else f"{failed} below the limit ({LIMIT:,.0f} steps/s)")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
