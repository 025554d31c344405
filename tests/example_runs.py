"""A comparison and a tree file made up by rule; times are dyadic, so every digit made of them is the same anywhere.

`tests/example_run/` holds what version 0.1's code made of them, before its columns came from one table.

Letters: N tree nodes (root first), L MoE layers, E experts, K experts per token, B texts of a batch.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ecospec.configs.schema import PredictorConfig
from ecospec.data.prompts import Prompt
from ecospec.inference.assemble import MethodPlan
from ecospec.inference.config import DrafterConfig, SelectionConfig
from ecospec.inference.decoding.statistics import Run, Step
from ecospec.inference.evaluation.evaluate import Outcome
from ecospec.inference.evaluation.lossless import Difference
from ecospec.inference.replay.stepping import Combination
from ecospec.inference.replay.treefile import Identity, Position, TreeSet

FOLDER = Path(__file__).parent / "example_run"
L, E, K = 4, 16, 2
PHASES = ("draft", "predict", "select", "verify", "accept")
CONFIG = SimpleNamespace(target=SimpleNamespace(expert_mib=None), chat_template=None)
TARGET = SimpleNamespace(
    name="example",
    model=SimpleNamespace(dtype=torch.float32),
    tokenizer=SimpleNamespace(chat_template=None),
    shape=SimpleNamespace(num_experts=E, top_k=K, layers=[1, 2, 3, 5]),
)
PLANS = [
    MethodPlan("plain", "none", DrafterConfig(steps=3, topk=2), SelectionConfig(), PredictorConfig()),
    MethodPlan("stock", "hf_greedy", DrafterConfig(steps=3, topk=2), SelectionConfig(), PredictorConfig()),
    MethodPlan("EAGLE-3", None, DrafterConfig(steps=3, topk=2), SelectionConfig("confidence"), PredictorConfig()),
    MethodPlan(
        "EcoSpec", None, DrafterConfig(steps=3, topk=2), SelectionConfig("marginal"), PredictorConfig("runs/predictor")
    ),
    MethodPlan(
        "EcoSpec", None, DrafterConfig(steps=3, topk=2), SelectionConfig("marginal", gamma=2), PredictorConfig("lab")
    ),
]
SEEN = {"seen"}
NOTICE = "Made up: <no> claim."
LADDER = {"predictor": {"overlap": 0.75}, "token": {"overlap": 0.5}}
OVERLAPS = {"predictor": 0.75, "lab": 0.625}
SIZES = {"maths": 3, "code": 2, "seen": 2, "short": 1}  # prompts; those of `short` end with the token prefill gives
PROVENANCE = {"command": ["ecospec-decode", "eval", "--output", "a run"], "git_revision": None, "threads": 2}


class Clock:
    """A clock that counts in 1/1024 seconds."""

    def __init__(self, generator: np.random.Generator, phases: tuple[str, ...]) -> None:
        ticks = generator.integers(1, 64, len(PHASES))
        self._seconds = {name: int(t) / 1024 * (name in phases) for name, t in zip(PHASES, ticks, strict=True)}
        self._rest = int(generator.integers(1, 8)) / 1024

    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    def total(self) -> float:
        return sum(self._seconds.values()) + self._rest


def outcomes() -> list[Outcome]:
    """Every method on every prompt: greedily one by one, and sampled in pairs; `short` prompts only sampled."""
    generator, found = np.random.default_rng(7), []
    for size, temperature in ((1, 0.0), (2, 1.0)):
        for dataset, count in SIZES.items():
            prompts = [Prompt(f"{dataset}/{row}/0", dataset, row, 0, "?") for row in range(count)]
            for start in range(0, 0 if dataset == "short" and size == 1 else count, size):
                batch = prompts[start : start + size]
                plans = PLANS if size == 1 else [plan for plan in PLANS if plan.baseline != "hf_greedy"]
                found += [_outcome(generator, plan, batch, temperature, size) for plan in plans]
    return found


def _outcome(generator: np.random.Generator, plan: MethodPlan, batch: list, temperature: float, size: int) -> Outcome:
    label = plan.label if plan.selection.gamma == 4 else "EcoSpec, small"
    plan = MethodPlan(label, plan.baseline, plan.drafter, plan.selection, plan.predictor)
    steps = [] if batch[0].dataset == "short" else [_step(generator, plan, len(batch), n) for n in range(5)]
    new = [1 + sum(step.emitted[row] for step in steps if row in step.rows) for row in range(len(batch))]
    seconds = [int(ticks) / 1024 for ticks in generator.integers(64, 512, 2)]
    run = Run(new, seconds[0], seconds[1] if steps else 0.0, steps)
    return Outcome(plan, batch, temperature, size, [[3] * count for count in new], run)


def _step(generator: np.random.Generator, plan: MethodPlan, count: int, number: int) -> Step:
    rows = list(range(count)) if number < 4 else [0]
    N = plan.selection.gamma if plan.baseline is None else 1
    every_BNLE = np.tile(np.arange(E), (len(rows), N, L, 1))
    ids_BNLK = torch.from_numpy(generator.permuted(every_BNLE, axis=-1)[..., :K].copy())
    emitted = generator.integers(1, N + 1, len(rows)).tolist()
    phases = {"none": ("verify", "accept"), None: PHASES}.get(plan.baseline)
    clock = None if phases is None else Clock(generator, phases)
    return Step(emitted, [N] * len(rows), [[0]] * len(rows), ids_BNLK, rows, clock)


def differences() -> dict[tuple, list[Difference]]:
    """One text of one method strays."""
    stray = Difference("code/1/0", 3, 5, 7, 0.25, 0.125, False, 0.0, "float32")
    return {(1, 0.0, "code", "EAGLE-3"): [stray]}


def trees() -> TreeSet:
    """Three prompts of two data sets, and one whose text ended with its first token."""
    generator, lengths = np.random.default_rng(11), {"a/0": 6, "a/1": 9, "b/0": 7, "b/1": 0}
    datasets = {prompt_id: prompt_id[0] for prompt_id in lengths}
    identity = Identity(
        "example", "hash", "eagle3", "lab", 0.0, 0, L, E, K, {"steps": 2, "topk": 2}, datasets, {"linear": "probe"}
    )
    positions = [_position(generator, name, 4 + n) for name, length in lengths.items() for n in range(length)]
    return TreeSet(identity, positions, {"target": 0.5, "predictor": 0.125})


def _position(generator: np.random.Generator, prompt_id: str, number: int) -> Position:
    depth_M, parents_M = np.array([1, 1, 2, 2], np.int16), np.array([-1, -1, 0, 0], np.int16)
    first, second = generator.integers(0, 2, 2)
    ids = [generator.permuted(np.tile(np.arange(E), (5, L, 1)), axis=-1)[..., :K].astype(np.int16) for _ in range(2)]
    return Position(
        prompt_id,
        number,
        int(generator.integers(0, 50)),
        parents_M,
        generator.integers(0, 50, 4).astype(np.int32),
        np.array([0.5, 0.25, 0.5, 0.125], np.float32),
        depth_M,
        np.array([0, 1, 0, 1], np.int16),
        np.array([first, 1 - first, first & second, 0], bool),
        np.zeros(4, np.float32),
        np.sort(ids[0], -1),
        {"predictor": np.sort(ids[1], -1)},
    )


def combinations() -> list[Combination]:
    """EAGLE's rule, and EcoSpec's with two sources and two ε."""
    sources = [Combination("marginal", 3, name) for name in ("oracle", "predictor", "last_step")]
    return [Combination("confidence", 3), *sources, Combination("marginal", 3, "predictor", 1.0)]
