"""Laws of the shipped lab: what its card promises, and the red line of lossless decoding on a trained model."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from ecospec.configs.schema import PredictorConfig, PromptConfig, TargetConfig
from ecospec.data import read_traces
from ecospec.data.lab import shipped
from ecospec.data.lab.recipe.card import shipped_weights
from ecospec.data.prompts import known_datasets, read_prompts
from ecospec.errors import InputError
from ecospec.inference.assemble import MethodPlan, PartsLoader, plan_methods
from ecospec.inference.config import DrafterConfig, EvalConfig, MethodConfig, SelectionConfig
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.evaluation.evaluate import evaluate, sampling_options
from ecospec.inference.replay.command import TREES
from ecospec.inference.replay.treefile import read_trees
from ecospec.predictor.config import EvaluateConfig
from ecospec.predictor.evaluation.evaluate import evaluate_predictor
from ecospec.predictor.kinds import trained_kinds
from ecospec.predictor.training.task import open_target_traces
from ecospec.seeds import sample_seed
from ecospec.tracing.cli import main
from ecospec.tracing.stats.counts import Tally, summarise
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.names import part_folder, resolve_target

MIB = 2**20
NEW_TOKENS = 64
DOMAINS = ("maths", "code", "terms", "prose")
CARD = shipped("lab", "card.json")


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(name="lab", dtype="float32"))


@pytest.fixture(scope="module")
def stock(target):
    """What Transformers' own loop writes after a prompt at a temperature: ids, decoded when first asked for."""
    return cache(lambda prompt, temperature: decode_stock(target, prompt, temperature))


def encode(target, prompt):
    return target.tokenizer(prompt.text, return_tensors="pt").input_ids


def decode_stock(target, prompt, temperature):
    torch.manual_seed(sample_seed(0, prompt.sample_id))
    return target.model.generate(
        encode(target, prompt), max_new_tokens=NEW_TOKENS, **sampling_options(temperature)
    ).tolist()


def decode_ours(target, method, prompt, temperature):
    torch.manual_seed(sample_seed(0, prompt.sample_id))
    options = {"max_new_tokens": NEW_TOKENS, **sampling_options(temperature)}
    ids, _ = generate_with(target.model, method, encode(target, prompt), **options)
    return ids.tolist()


EVERY = ("plain", "confidence", "marginal", "global", "random")
CASES = [(policy, 3) for policy in EVERY[:3]] + [pytest.param(policy, 10, marks=pytest.mark.slow) for policy in EVERY]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("policy", "samples"), CASES)
def test_prompts_of_every_domain_decode_to_the_ids_of_generate(target, stock, policy, samples, temperature):
    """Three prompts of each domain, and in the long suite ten under every policy."""
    plan = MethodPlan(
        label=policy,
        baseline="none" if policy == "plain" else None,
        drafter=DrafterConfig(path="lab"),
        selection=SelectionConfig(policy="marginal" if policy == "plain" else policy),
        predictor=PredictorConfig(path="lab"),
    )
    method = PartsLoader(target).method(plan)
    prompts = read_prompts(PromptConfig(datasets=[f"lab/{domain}" for domain in DOMAINS], samples=samples))
    assert len(prompts) == 4 * samples
    for prompt in prompts:
        assert decode_ours(target, method, prompt, temperature) == stock(prompt, temperature), prompt.sample_id


@pytest.mark.slow
def test_in_bf16_every_first_difference_is_within_rounding_and_gone_in_fp32(target):
    config = EvalConfig(
        target=TargetConfig(name="lab", dtype="bfloat16"), datasets=[f"lab/{d}" for d in DOMAINS], samples=6
    )
    config = dataclasses.replace(
        config,
        methods=[MethodConfig("plain", drafter="none"), MethodConfig("EAGLE-3", selection="confidence")],
    )
    half, plans, prompts = (
        load_target(config.target),
        plan_methods(config, config.selection, config.methods),
        read_prompts(config),
    )
    outcomes, differences = evaluate(config, half, plans, prompts)
    plain = {o.prompts[0].sample_id: o.new_ids[0] for o in outcomes if o.plan.baseline == "none"}
    found = [difference for group in differences.values() for difference in group]
    assert found, "no text differs in bf16: this law was not tried"
    by_id = {prompt.sample_id: prompt for prompt in prompts}
    method = PartsLoader(target).method(plans[1])
    for difference in found:
        assert difference.within_rounding, difference
        prompt, written = encode(target, by_id[difference.sample_id]), plain[difference.sample_id]
        ids = torch.cat([prompt, torch.tensor([written[: max(0, difference.position - 2)]]).long()], dim=1)
        length = prompt.shape[1] + difference.position + 1
        expected = target.model.generate(ids, max_length=length, do_sample=False)
        ours, _ = generate_with(target.model, method, ids, max_length=length, do_sample=False)
        assert torch.equal(ours, expected)


def test_the_target_has_the_promised_shape(target):
    assert len(target.shape.layers) >= 8
    assert target.shape.num_experts >= 64
    assert target.shape.top_k == 8
    assert (shipped("lab", "target") / "model.safetensors").stat().st_size <= 16 * MIB
    assert target.model.config.max_position_embeddings == 2048


def test_drafter_and_predictors_are_at_most_half_the_active_target(target):
    routed = sum(p.numel() for name, p in target.model.named_parameters() if ".experts." in name)
    others = sum(p.numel() for name, p in target.model.named_parameters() if ".experts." not in name)
    embedding = target.model.get_input_embeddings().weight.numel()
    active = others - embedding + routed * target.shape.top_k / target.shape.num_experts
    parts = PartsLoader(target)
    head = parts.drafter(DrafterConfig(path="lab")).head
    for part in (head, *(parts.loaded(kind, "lab") for kind in trained_kinds())):
        assert sum(p.numel() for p in part.parameters()) <= active / 2


def test_prompts_are_enough_distinct_and_apart():
    train = read_prompts(PromptConfig(datasets=[f"lab/train/{domain}" for domain in DOMAINS]))
    test = read_prompts(PromptConfig(datasets=[f"lab/{domain}" for domain in DOMAINS]))
    for domain in DOMAINS:
        assert sum(prompt.dataset == f"lab/train/{domain}" for prompt in train) >= 100
        assert sum(prompt.dataset == f"lab/{domain}" for prompt in test) >= 40
    texts = [prompt.text for prompt in train + test]
    assert len(set(texts)) == len(texts)


def test_on_traces_it_was_not_trained_on_the_shipped_predictor_beats_the_token_table_by_ten_points():
    metrics = evaluate_predictor(EvaluateConfig(traces=str(shipped("lab", "traces"))))
    assert metrics.numbers.overlap >= 0.88
    assert metrics.numbers.overlap >= metrics.others["token"].overlap + 0.10


def test_the_shipped_traces_are_sound_and_show_locality():
    check_folder(shipped("lab", "traces"))
    traces = read_traces(shipped("lab", "traces"))
    tally = Tally.empty(traces.num_layers, traces.num_experts, traces.top_k)
    for trace in traces:
        tally.add(trace.experts)
    union = summarise(tally)["union"][3]
    assert union["mean"] < 0.92 * union["chance"]


def test_the_shipped_traces_are_what_tracing_their_prompts_again_gives(tmp_path):
    """Column by column; keys also depend on settings that had no name when the lab was traced."""
    words = ["run", "--config", "lab/trace", "--datasets", "lab/train/terms", "--samples", "2"]
    assert main([*words, "--output", str(tmp_path / "t")]) == 0
    (part,) = shipped("lab", "traces").glob("part-*")
    old = pq.read_table(part)
    columns = [name for name in old.column_names if name != "key"]
    assert columns == ["sample_id", "dataset", "turn", "input_ids", "prompt_len", "experts", "split"]
    again = pq.read_table(next((tmp_path / "t").glob("part-*")))
    rows = {row["sample_id"]: row for row in old.select(columns).to_pylist()}
    assert [rows[row["sample_id"]] for row in again.to_pylist()] == again.select(columns).to_pylist()
    assert set(again["source_id"].to_pylist()) == {"terms-train-000", "terms-train-001"}


def test_lab_is_the_word_for_every_part_that_is_shipped(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "traces").mkdir(parents=True)
    assert main(["check", "lab"]) == 0
    assert "sound; 160 samples" in capsys.readouterr().out
    assert read_traces("lab").folder == shipped("lab", "traces")
    assert open_target_traces(EvaluateConfig(traces="lab")).folder == shipped("lab", "traces")
    assert resolve_target("lab") == str(shipped("lab", "target"))
    assert part_folder("lab", "drafter") == shipped("lab", "drafter")
    assert part_folder("lab/linear", "predictor") == shipped("lab", "linear")
    assert known_datasets()["lab/maths"].parent == shipped("lab/prompts")
    for other in (Path("lab"), "./lab", "labs", "lab/nothing", "some/lab"):
        assert shipped(other, "traces") is None, "a folder or hub id of one's own"
    with pytest.raises(InputError, match="no manifest"):
        read_traces(Path("lab"))


def test_the_shipped_trees_are_the_train_prompts_of_the_shipped_target(target):
    trees = read_trees(shipped("lab", "trees") / TREES)
    assert trees.identity.target_config_sha256 == target.config_sha256
    assert trees.identity.counts == target.shape.counts
    assert {name.split("/")[1] for name in trees.spans} == {"train"}
    assert len(trees.spans) == 160 and all(trees.spans.values())
    assert all("predictor" in position.predicted for position in trees.positions)


def test_the_card_keeps_its_promises():
    numbers = json.loads(Path(CARD).read_text())
    assert numbers["weights"] == shipped_weights(), "measure again: python -m ecospec.data.lab.build --stage card"
    looping = numbers["looping"]["pooled"]
    assert looping["share"] <= 0.20 and looping["tokens"] >= 100
    bits = numbers["bits_per_byte"]  # of the shipped target they are above the dense model's: the price of not looping
    assert bits["unpolished"] < bits["dense"]
    routing = numbers["routing"]
    assert routing["union"]["4"] <= 0.92 * routing["chance"]["4"]
    assert routing["unused_experts"] == 0
    assert all(part["alpha"] >= 2.0 for part in numbers["acceptance"].values())
    assert numbers["acceptance"]["pooled"]["steps"] >= 4000
    assert numbers["overlap"]["predictor"] >= 0.85
    assert numbers["overlap"]["predictor"] >= numbers["overlap"]["token"] + 0.08
