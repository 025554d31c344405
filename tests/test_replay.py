"""Replaying recorded trees is decoding: the same steps, tokens and experts, from the pools alone."""

from dataclasses import replace

import numpy as np
import pytest

from ecospec.inference.decoding.statistics import Run
from ecospec.inference.replay.results import compared, replay
from ecospec.inference.replay.stepping import Combination, Replay, combinations
from ecospec.inference.replay.treefile import Position, TreeSet
from ecospec.predictor.kinds.counting import ExpertShares, TableFootprints
from ecospec.predictor.kinds.frequency.table import FrequencyTable
from tests.recording import PROMPTS, SOURCES, WIDTH, E, HashedOracle, K, L, Shrinking, live, recorded, session

PROCESSORS = (("repetition_penalty", 1.3), ("no_repeat_ngram_size", 3), ("min_new_tokens", 4), ("top_k", 40))
RUNGS = ["oracle", *SOURCES]
SHARES = {"Qwen3-235B-A22B": 0.34, "DeepSeek-V3.1": 0.45, "GPT-OSS-120B": 0.62}
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
@pytest.mark.parametrize("source", SOURCES)
def test_every_footprint_source_replays_as_it_decodes(sampled, source):
    engine = Replay(recorded(sampled, True))
    for one in combinations(["marginal", "global"], [source], [3, 5]):
        steps = engine.steps(one)
        for prompt_id in PROMPTS:
            assert replayed(steps[prompt_id]) == seen(live(session(sampled, True), prompt_id, one)), (one, prompt_id)


def test_sources_that_say_the_same_of_every_node_leave_eagles_rule():
    engine = Replay(recorded(True, True))
    for gamma in range(1, WIDTH + 1):
        eagles = engine.steps(Combination("confidence", gamma))
        last = engine.steps(Combination("marginal", gamma, "last_step"))
        assert {name: replayed(steps) for name, steps in last.items()} == {
            name: replayed(steps) for name, steps in eagles.items()
        }


def test_the_last_step_is_the_root_before_and_nothing_at_a_texts_first_position():
    trees = recorded(True, True)
    engine = Replay(trees)
    (pools,) = engine.pools
    found = pools.footprints("last_step", engine.sources, E)
    for span in trees.spans.values():
        assert not found[span.start].any()
        for number in span[1:]:
            ids_LK = trees.positions[number - 1].experts_true_NLK[0]
            expected = np.zeros((L, E), bool)
            np.put_along_axis(expected, ids_LK.astype(int), True, -1)
            assert (found[number].numpy() == expected).all()


@OPTIONS
def test_regret_is_the_difference_from_oracle_at_the_same_policy_and_gamma(sampled):
    runs = replay(recorded(sampled, False), combinations(["confidence", "marginal", "global"], RUNGS, [1, 3, 5]))
    of = {(run.dataset, run.gamma, run.selection, run.footprints): run for run in runs}
    names = ("acceptance_length", "active_experts")
    for (dataset, gamma, policy, footprints), run in of.items():
        if footprints is None:
            assert [run[key] for key in (*(f"{name}_regret" for name in names), "saving_kept")] == [None] * 3
            continue
        oracle, eagles = of[dataset, gamma, policy, "oracle"], of[dataset, gamma, "confidence", None]
        for name in names:
            assert run[f"{name}_regret"] == pytest.approx(run[name] - oracle[name])
        saved, kept = (eagles["active_experts"] - one["active_experts"] for one in (oracle, run))
        assert run["saving_kept"] == (pytest.approx(kept / saved) if saved > 0 else None)
        if footprints == "oracle":
            assert [run[f"{name}_regret"] for name in names] == [0, 0]
            assert run["saving_kept"] in (None, 1)
            assert run["saving_kept_interval"] in (None, [1, 1])
    assert any(run["saving_kept"] not in (None, 1) for run in runs)


@pytest.mark.parametrize("seed", range(4))
def test_intervals_hold_their_points_and_need_two_prompts(seed):
    generator = np.random.default_rng(seed)
    steps_P, tokens_P = generator.integers(5, 40, (2, 12))
    parts = [np.stack([steps_P, steps_P + tokens_P, steps_P * per_step], -1) for per_step in (7.0, 9.0, 6.0)]
    sums = [part + generator.random((12, 3)) * [0, 5, 20] for part in parts]
    found = compared(*sums)
    names = [f"{name}_{kind}" for name in ("acceptance_length", "active_experts") for kind in ("difference", "regret")]
    for name in (*names, "saving_kept"):
        low, high = found[f"{name}_interval"]
        assert low < found[name] < high
    alone = compared(*(part[:1] for part in sums))
    assert all((value is None) == name.endswith("interval") for name, value in alone.items())


def test_a_saving_that_may_be_none_has_no_interval():
    ours_P3, eagles_P3, oracles_P3 = (
        np.array([[1, 1, first], [1, 1, second]], float) for first, second in ((9, 4), (9, 5), (8, 6))
    )
    found = compared(ours_P3, eagles_P3, oracles_P3 - [0, 0, 1])
    assert found["saving_kept"] == pytest.approx((7 - 6.5) / (7 - 6))
    assert found["saving_kept_interval"] is None, "the second prompt alone saves nothing"
    assert compared(ours_P3, eagles_P3, oracles_P3)["saving_kept"] is None


def test_modelled_speed_is_tokens_over_what_a_step_reads():
    trees = recorded(True, True)
    timed = TreeSet(trees.identity, trees.positions, {"target": 4.0, "linear": 1.0})
    some = [Combination("confidence", 1), *(Combination("marginal", 4, name) for name in ("oracle", "linear"))]
    plain, oracle, linear = (run for run in replay(timed, some) if run.dataset == "all")
    assert plain["modelled_speedup"] == plain["modelled_speedup_with_source"] == pytest.approx(dict.fromkeys(SHARES, 1))
    assert (plain["source_share"], oracle["source_share"], linear["source_share"]) == (0, None, 0.25)
    assert oracle["modelled_speedup_with_source"] is None
    for target, fixed in SHARES.items():
        seconds = fixed + (1 - fixed) * linear["active_experts"] / K
        assert linear["modelled_speedup"][target] == pytest.approx(linear["acceptance_length"] / seconds)
        with_source = linear["modelled_speedup_with_source"][target]
        assert with_source == pytest.approx(linear["acceptance_length"] / (seconds + 0.25))


@OPTIONS
def test_results_are_the_means_of_live_decoding_exactly(sampled):
    runs = replay(recorded(sampled, True), EVERY)
    for dataset in ("maths", "code", "all"):
        for run in (run for run in runs if run.dataset == dataset):
            one = Combination(run.selection, run.gamma, run.footprints)
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
    assert [run.label for run in runs[:3]] == ["confidence", "marginal/oracle", "marginal/predictor"]
    base = {(run.dataset, run.gamma): run for run in runs if run.selection == "confidence"}
    for run in runs:
        for name in ("acceptance_length", "active_experts"):
            difference = run[f"{name}_difference"]
            assert difference == pytest.approx(run[name] - base[run.dataset, run.gamma][name])
            interval = run[f"{name}_difference_interval"]
            assert (interval is None) == (run["samples"] == 1)
            if run.selection == "confidence" or run.gamma == 1:
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
    table = FrequencyTable(ExpertShares(np.full((L, E), 1 / E), K))
    engine = Replay(recorded(True, False), {"frequency": TableFootprints(table)})
    for gamma in (2, 4):
        for policy in ("marginal", "global"):
            ours, eagles = (
                engine.steps(Combination(policy, gamma, "frequency")),
                engine.steps(Combination("confidence", gamma)),
            )
            assert {name: replayed(steps) for name, steps in ours.items()} == {
                name: replayed(steps) for name, steps in eagles.items()
            }
