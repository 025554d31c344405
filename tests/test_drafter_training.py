"""Fitting an EAGLE-3 head to a target: what it learns from, that it learns, what it writes, what it refuses."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ecospec.configs import cli
from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.checkpoint import check_maps, load_head
from ecospec.inference.drafters.eagle3.head import default_feature_layers
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.predictor import cli as train_cli
from ecospec.predictor.config import HeadConfig, TrainDrafterConfig
from ecospec.predictor.heads.text import TargetText, read_text
from ecospec.predictor.heads.training import draft_vocabulary, fit, measure_head, new_head, output_rows
from ecospec.tracing import cli as trace_cli
from tests.config_reads import assert_all_read, watch_reads
from tests.tiny import tiny_model, tiny_target_folder

HEAD = HeadConfig(draft_vocab_size=40, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
HEAD_OPTIONS = [f"--head.{name}={value}" for name, value in vars(HEAD).items()]
LAYERS = default_feature_layers(6)
SEEDS = (0, 1, 2)


def sample(ids: list[int] | np.ndarray, prompt_len: int = 2) -> SimpleNamespace:
    """A trace item without the routing, which no draft head looks at."""
    return SimpleNamespace(input_ids=np.array(ids, np.int32), prompt_len=prompt_len)


def random_samples(seed: int, lengths: list[int], vocab_size: int) -> list[SimpleNamespace]:
    generator = np.random.default_rng(seed)
    return [sample(generator.integers(0, vocab_size, length)) for length in lengths]


@torch.no_grad()
def own_text(model: torch.nn.Module, prompts: list[int], length: int) -> list[SimpleNamespace]:
    """Greedy text of `model` from each one-token prompt: repetitive, as tiny random models are."""
    ids = model.generate(torch.tensor(prompts)[:, None], max_length=length, do_sample=False, eos_token_id=None)
    return [sample(row, prompt_len=1) for row in ids.tolist()]


@pytest.mark.parametrize("seed", SEEDS)
@torch.inference_mode()
def test_the_text_holds_what_the_target_says_about_each_sample_alone(seed: int) -> None:
    model = tiny_model("qwen3_moe", seed, num_hidden_layers=6)
    items = random_samples(seed, [5, 17, 9, 9], model.config.vocab_size)
    text = read_text(model, LAYERS, items, tokens_per_batch=20)
    batch = text.batch([2, 1])
    for row, item in enumerate([items[2], items[1]]):
        length = len(item.input_ids)
        assert batch.lengths_B[row] == length
        ids = torch.from_numpy(item.input_ids).long()
        assert torch.equal(batch.ids_BT[row, :length], ids)
        out = model(ids[None], output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(batch.features_BTF[row, :length], features, atol=1e-2, rtol=1e-2)
        assert torch.equal(batch.best_BT[row, :length], out.logits[0].argmax(-1))
        logits = model.get_output_embeddings()(batch.final_BTH[row, :length])
        torch.testing.assert_close(logits, out.logits[0], atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_holds_every_sample_once_within_the_token_limit(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(5, 30, 50).tolist()
    empty = torch.zeros(sum(lengths), 1)
    firsts = torch.tensor(np.cumsum([0, *lengths[:-1]]))
    prompts = torch.arange(50)  # stands for the sample's identity
    text = TargetText(empty[:, 0].long(), empty, empty, empty[:, 0].long(), firsts, torch.tensor(lengths), prompts)
    batches = list(text.batches(64, seed))
    assert sorted(torch.cat([batch.prompt_lens_B for batch in batches]).tolist()) == list(range(50))
    assert all(batch.ids_BT.numel() <= 64 for batch in batches)


def test_a_target_that_rescales_its_logits_is_refused() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=6)
    read_text(model, LAYERS, [sample(range(8))], 64)

    def halve(_module: torch.nn.Module, _args: tuple, out: object) -> None:
        out.logits = out.logits / 2

    model.register_forward_hook(halve)
    with pytest.raises(InputError, match="target"):
        read_text(model, LAYERS, [sample(range(8))], 64)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_its_maps_agree(seed: int, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed, num_hidden_layers=6)
    items = random_samples(seed, [300, 200], 60)
    counts = {token: sum(list(item.input_ids).count(token) for item in items) for token in range(264)}
    expected = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:40])
    assert draft_vocabulary(items, 264, 40).tolist() == expected
    head = new_head(model, HEAD, items, seed)
    assert (torch.arange(40) + head.d2t).tolist() == expected == head.t2d.nonzero().squeeze(1).tolist()
    assert torch.equal(head.target_ids(torch.arange(40)), torch.tensor(expected))
    assert torch.equal(head.lm_head.weight, model.lm_head.weight[expected])
    check_maps(head.d2t, head.t2d, 264, tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trained_head_drafts_better_than_an_untrained_one(precision: str) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=6).requires_grad_(False)
    train, test = own_text(model, list(range(24)), 40), own_text(model, list(range(100, 112)), 40)
    config = TrainDrafterConfig(head=HEAD, max_steps=60, warmup_steps=5, tokens_per_batch=512, precision=precision)
    head = new_head(model, HEAD, train, seed=0)
    held_out = read_text(model, LAYERS, test, 512)
    before = measure_head(head, held_out, config)
    training = fit(head, read_text(model, LAYERS, train, 512), output_rows(model, head), config)
    after = measure_head(head, held_out, config)
    assert training["steps"] == 60
    assert after["acceptance_length"] > before["acceptance_length"] + 0.3
    assert all(late > early + 0.1 for early, late in zip(before["agreement"], after["agreement"], strict=True))
    assert 1 <= after["acceptance_length"] <= 1 + HEAD.steps
    assert 0 < after["vocabulary_coverage"] <= 1


def test_training_changes_neither_target_nor_embedding_and_repeats_exactly() -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=6).requires_grad_(False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    items = random_samples(0, [12, 20, 16], 264)
    text = read_text(model, LAYERS, items, 64)
    heads = [new_head(model, HEAD, items, seed=5) for _ in range(2)]
    for head in heads:
        fit(head, text, output_rows(model, head), TrainDrafterConfig(head=HEAD, max_steps=4, tokens_per_batch=64))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    first, second = (head.state_dict() for head in heads)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["fc.weight"], new_head(model, HEAD, items, seed=5).fc.weight)


def test_a_saved_head_drafts_the_same_tree(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=6)
    head = new_head(model, HeadConfig(**vars(HEAD) | {"rope_theta": 500.0}), random_samples(0, [50], 264), seed=1)
    head.save(tmp_path)
    loaded = load_head(tmp_path, model.config).attach(model)
    ids_T, features = torch.randint(0, 264, (9,)), torch.randn(8, 96)
    one, other = (TreeDrafter(each).draft([ids_T], [features]).row(0) for each in (head, loaded))
    assert torch.equal(one.tokens_N, other.tokens_N)
    assert torch.equal(one.prob_N, other.prob_N)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target's folder and the traces of its answers to some prompts."""
    root = tmp_path_factory.mktemp("drafter")
    target = tiny_target_folder(root / "target", num_hidden_layers=6)
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(4, 12))) for _ in range(30)]
    (root / "prompts.txt").write_text("\n".join(prompts))
    options = ["--target", str(target), "--prompts", str(root / "prompts.txt"), "--output", str(root / "traces")]
    assert trace_cli.main(["run", *options, "--max-new-tokens", "12"]) == 0
    return target, root / "traces"


def train(traced: tuple[Path, Path], output: Path, *options: str) -> int:
    target, traces = traced
    paths = ["--target", str(target), "--traces", str(traces), "--output", str(output)]
    return train_cli.main(["drafter", *paths, "--max-steps", "3", *HEAD_OPTIONS, *options])


def test_the_command_writes_a_published_layout_with_metrics_and_provenance(
    traced: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(traced, tmp_path / "head") == 0
    assert "acceptance length" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["head"]  # nothing temporary is left
    files = sorted(path.name for path in (tmp_path / "head").iterdir())
    assert files == ["config.json", "metrics.json", "model.safetensors", "provenance.json"]
    config, metrics, provenance = (
        json.loads((tmp_path / "head" / name).read_text()) for name in (files[0], *files[1::2])
    )
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    published = {"draft_vocab_size": 40, "hidden_size": 32, "vocab_size": 264, "head_dim": 8, "num_hidden_layers": 1}
    assert published.items() <= config.items()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert len(metrics["agreement"]) == len(metrics["train_loss"]) == 3
    assert metrics["steps"] == provenance["config"]["max_steps"] == 3
    assert provenance["target"]["name"] == str(traced[0])
    target = AutoConfig.from_pretrained(traced[0])
    assert load_head(tmp_path / "head", target).feature_layers == LAYERS


def test_training_a_head_reads_every_key_that_it_knows(
    traced: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watch_reads(monkeypatch)
    assert train(traced, tmp_path / "head") == 0
    assert_all_read(train_cli.SUBCOMMANDS, "drafter", reads)


def test_an_output_folder_in_use_is_kept_unless_told_otherwise(
    traced: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(traced, tmp_path / "head") == 0
    (tmp_path / "head" / "note").write_text("mine")
    assert train(traced, tmp_path / "head") == 2
    assert_one_line(capsys, "--overwrite")
    assert (tmp_path / "head" / "note").read_text() == "mine"
    assert train(traced, tmp_path / "head", "--overwrite") == 0
    assert not (tmp_path / "head" / "note").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--traces", "nowhere"], "nowhere"),
        (["--head.draft_vocab_size", "265"], "--head.draft_vocab_size 265"),
        (["--head.num_key_value_heads", "3"], "--head.num_key_value_heads 3"),
        (["--head.steps", "0"], "--head.steps 0"),
        (["--head.rope_theta", ".nan"], "--head.rope_theta nan"),
        (["--devices", "8"], "--devices: ecospec-train drafter does not read it (only predictor)"),
        (["--head.steps", "100"], "train sample"),
        (["--head.layers", "2"], "head.layers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    options: list[str], named: str, traced: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(traced, tmp_path / "head", *options) == 2
    assert_one_line(capsys, named)
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("changes", [{"num_experts": 4}, {"seed": 1}])
def test_traces_of_another_target_are_refused(
    changes: dict, traced: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_target_folder(tmp_path / "other", num_hidden_layers=6, **changes)
    assert train((other, traced[1]), tmp_path / "head") == 2
    assert_one_line(capsys, "recorded on")


def test_the_shipped_configuration_describes_a_head_of_at_most_600_000_weights() -> None:
    config, _ = cli.parse("ecospec-train drafter", TrainDrafterConfig, ["--config", "lab/drafter"])
    lab = {"hidden_size": 128, "vocab_size": 4096, "num_hidden_layers": 6, "num_experts": 2}
    head = new_head(tiny_model("qwen3_moe", **lab), config.head, random_samples(0, [20], 4096), seed=0)
    assert config.max_minutes == 10 and config.target.dtype == "float32"
    assert sum(parameter.numel() for parameter in head.parameters()) <= 600_000


def assert_one_line(capsys: pytest.CaptureFixture[str], named: str) -> None:
    errors = [line for line in capsys.readouterr().err.splitlines() if re.match("ecospec-train: ", line)]
    assert len(errors) == 1 and named in errors[0]
