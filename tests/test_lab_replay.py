"""On the shipped lab, replaying recorded trees gives what live decoding gives, policy by policy."""

import pytest

from ecospec.configs.schema import PromptConfig, TargetConfig
from ecospec.data.prompts import read_prompts
from ecospec.inference.assemble import plan_methods
from ecospec.inference.config import EvalConfig, MethodConfig, RecordConfig
from ecospec.inference.evaluation.evaluate import evaluate
from ecospec.inference.replay.command import TREES, run_record
from ecospec.inference.replay.results import ALL, replay
from ecospec.inference.replay.stepping import Combination, Replay
from ecospec.inference.replay.treefile import read_trees
from ecospec.predictor.kinds import trained_kinds
from ecospec.tracing.target.loading import load_target

PROMPTS = {"datasets": ["lab/maths", "lab/code", "lab/terms", "lab/prose"], "samples": 5}
COMBINATIONS = [
    Combination(policy, gamma, None if policy == "confidence" else "predictor")
    for policy in ("confidence", "marginal", "global")
    for gamma in (2, 4, 6)
] + [Combination("marginal", 4, "last_step")]


def label(one: Combination) -> str:
    return f"{one.policy} {one.gamma} {one.footprints}"


def selection(one: Combination) -> dict:
    known = {"policy": one.policy, "gamma": one.gamma}
    return known | ({"footprints": one.footprints} if one.footprints else {})


def settings(temperature: float) -> dict:
    methods = [MethodConfig(label(one), selection=selection(one)) for one in COMBINATIONS]
    return {
        "target": TargetConfig(name="lab", dtype="float32"),
        **PROMPTS,
        "max_new_tokens": 32,
        "temperature": [temperature],
        "methods": [MethodConfig("plain", drafter="none"), *methods],
    }


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_twenty_prompts_replay_as_they_decode(temperature, tmp_path):
    run_record(RecordConfig(**settings(temperature)), tmp_path / "trees")
    config = EvalConfig(**settings(temperature))
    replayed = Replay(read_trees(tmp_path / "trees" / TREES))
    target, prompts = load_target(config.target), read_prompts(PromptConfig(**PROMPTS))
    assert len(prompts) == 20
    outcomes, differences = evaluate(config, target, plan_methods(config, config.selection, config.methods), prompts)
    assert not differences
    for one in COMBINATIONS:
        steps = replayed.steps(one)
        for outcome in (outcome for outcome in outcomes if outcome.plan.label == label(one)):
            found = steps[outcome.prompts[0].sample_id]
            assert found.emitted_S.tolist() == [step.emitted[0] for step in outcome.run.steps]
            assert found.verified_S.tolist() == [step.verified[0] for step in outcome.run.steps]
            assert found.active_SL.tolist() == [list(step.active_by_layer()) for step in outcome.run.steps]


@pytest.mark.slow
def test_shipped_footprints_keep_most_of_what_oracle_saves(tmp_path):
    methods = [MethodConfig(kind.name, selection={"footprints": kind.name}) for kind in trained_kinds()]
    config = RecordConfig(
        target=TargetConfig(name="lab", dtype="float32"),
        datasets=PROMPTS["datasets"],
        samples=15,
        max_new_tokens=48,
        temperature=[0.0],
        methods=methods,
    )
    run_record(config, tmp_path / "trees")
    combinations = [Combination("marginal", 4, source) for source in ("oracle", "predictor", "draft_mlp")]
    oracle, *shipped = replay(read_trees(tmp_path / "trees" / TREES), combinations)[-len(combinations) :]
    for run in shipped:
        assert run.dataset == ALL and run["steps"] >= 1000
        assert run["saving_kept"] >= 0.6 and run["saving_kept_interval"][0] >= 0.4, run.footprints
        assert run["acceptance_length_regret"] >= -0.01 * oracle["acceptance_length"], run.footprints
