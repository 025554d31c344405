"""Replaying recorded trees is decoding: the same steps, tokens and experts, from the pools alone."""

from dataclasses import replace

import numpy as np
import pytest

from ecospec.inference.replay import Combination, Replay, combinations
from ecospec.inference.replay_results import replay
from ecospec.inference.statistics import Run
from ecospec.inference.treefile import Position, TreeSet
from ecospec.predictor.simple import FrequencyPredictor
from tests.recording import PROMPTS, WIDTH, E, HashedOracle, K, L, Shrinking, live, recorded, session

PROCESSORS = (("repetition_penalty", 1.3), ("no_repeat_ngram_size", 3), ("min_new_tokens", 4), ("top_k", 40))
OPTIONS = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
EVERY = [
    *(Combination(policy, gamma, "predictor") for policy in ("marginal", "global") for gamma in range(1, WIDTH + 1)),
    *(Combination("confidence", gamma) for gamma in range(1, WIDTH + 2)),
]


def seen(run: Run) -> list[tuple]:
    return [(step.emitted[0], step.verified[0], step.active_by_layer()) for step in run.steps]


def replayed(steps) -> list[tuple]:
    return list(zip(steps.emitted_S.tolist(), steps.verified_S.tolist(), steps.active_SL.tolist(), strict=True))


@OPTIONS
@pytest.mark.parametrize("ends", [False, True], ids=["by length", "by end token"])
def test_replay_takes_the_steps_of_live_decoding(sampled, ends):
    engine, cut = Replay(recorded(sampled, ends)), 0
    for one in EVERY:
        steps = engine.steps(one)
        for prompt_id in PROMPTS:
            run = live(session(sampled, ends), prompt_id, one)
            assert replayed(steps[prompt_id]) == seen(run), (one, prompt_id)
            cut += int(steps[prompt_id].emitted_S.sum()) - (run.new_tokens - 1)
    assert cut > 0, "some texts must end inside a step, which counts uncut"


@pytest.mark.parametrize(
    "case",
    [("gpt_oss",), ("qwen3_moe", Shrinking), ("qwen3_moe", HashedOracle, PROCESSORS)],
    ids=["windowed attention", "pools of unequal width", "processors of the text so far"],
)
def test_so_it_does_with(case):
    key = (True, True, *case)
    engine = Replay(recorded(*key))
    for one in EVERY[::3]:
        steps = engine.steps(one)
        for prompt_id in PROMPTS:
            assert replayed(steps[prompt_id]) == seen(live(session(*key), prompt_id, one)), (one, prompt_id)


@OPTIONS
def test_results_are_the_means_of_live_decoding_exactly(sampled):
    runs = replay(recorded(sampled, True), EVERY)
    for dataset in ("maths", "code", "all"):
        for run in (run for run in runs if run["dataset"] == dataset):
            one = Combination(run["selection"], run["gamma"], run["footprints"])
            names = [name for name in PROMPTS if dataset in (name.split("/")[0], "all")]
            steps = [step for name in names for step in live(session(sampled, True), name, one).steps]
            emitted = [step.emitted[0] for step in steps]
            assert run["acceptance_length"] == Run(steps=steps).acceptance_length
            assert run["active_experts"] == np.array([step.active_by_layer() for step in steps]).mean()
            assert run["active_experts"] == pytest.approx(Run(steps=steps).active_experts, rel=1e-12)
            assert run["emitted_histogram"] == [emitted.count(n) for n in range(1, max(emitted) + 1)]
            assert (run["steps"], run["samples"]) == (len(steps), len(names))


def test_differences_are_paired_with_confidence_at_the_same_gamma():
    runs = replay(recorded(True, True), combinations(["confidence", "marginal"], ["oracle", "predictor"], [1, 3]))
    assert [run["label"] for run in runs[:3]] == ["confidence", "marginal/oracle", "marginal/predictor"]
    base = {(run["dataset"], run["gamma"]): run for run in runs if run["selection"] == "confidence"}
    for run in runs:
        for name in ("acceptance_length", "active_experts"):
            difference = run[f"{name}_difference"]
            assert difference == pytest.approx(run[name] - base[run["dataset"], run["gamma"]][name])
            interval = run[f"{name}_difference_interval"]
            assert (interval is None) == (run["samples"] == 1)
            if run["selection"] == "confidence" or run["gamma"] == 1:
                assert difference == 0
                assert interval in (None, [0, 0])
            elif interval:
                assert interval[0] <= interval[1]


def reranked(position: Position, gamma: int) -> set[int]:
    """EAGLE's re-ranking: the pool sorted by cumulative probability, its best γ - 1 drafts, ties to the shallower."""
    prob = []
    for parent, conditional_prob in zip(position.parents_M, position.prob_M, strict=True):
        prob.append((prob[parent] if parent >= 0 else np.float32(1)) * conditional_prob)
    order = sorted(range(len(prob)), key=lambda draft: (-prob[draft], position.depth_M[draft], draft))
    return set(order[: gamma - 1])


@OPTIONS
@pytest.mark.parametrize("gamma", range(1, WIDTH + 1))
def test_confidence_is_eagles_reranking(sampled, gamma):
    trees = recorded(sampled, False)
    steps = Replay(trees).steps(Combination("confidence", gamma))
    for prompt_id, span in trees.spans.items():
        at, emitted = span.start, []
        while at < span.stop:
            position = trees.positions[at]
            chosen = reranked(position, gamma)
            emitted.append(1 + sum(bool(position.accepted_M[draft]) for draft in chosen))
            at += emitted[-1]
        assert steps[prompt_id].emitted_S.tolist() == emitted


def test_the_root_alone_and_the_oracle_are_bounds():
    trees = recorded(True, True)
    plain, oracle, predicted, whole = replay(
        TreeSet(replace(trees.identity, datasets=dict.fromkeys(PROMPTS, "one")), trees.positions),
        [
            Combination("confidence", 1),
            Combination("marginal", 4, "oracle"),
            Combination("marginal", 4, "predictor"),
            Combination("random", 99),
        ],
    )
    assert (plain["acceptance_length"], plain["active_experts"], plain["verified_tokens_per_step"]) == (1, K, 1)
    assert oracle["active_experts"] < predicted["active_experts"] < whole["active_experts"]
    assert whole["verified_tokens_per_step"] == WIDTH


def test_a_table_of_even_experts_chooses_as_confidence_does():
    """Every node's footprint is the root's, so none is new: marginal falls back on the probabilities."""
    table = FrequencyPredictor(np.full((L, E), 1 / E), K)
    engine = Replay(recorded(True, False), {"frequency": table})
    for gamma in (2, 4):
        for policy in ("marginal", "global"):
            ours, eagles = (
                engine.steps(Combination(policy, gamma, "frequency")),
                engine.steps(Combination("confidence", gamma)),
            )
            assert {name: replayed(steps) for name, steps in ours.items()} == {
                name: replayed(steps) for name, steps in eagles.items()
            }
