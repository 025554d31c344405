"""Training end to end: limits and schedule, a learnable trace is learned, the command writes what the contract says.

Letters: T tokens, L MoE layers, E experts, K experts per token, V vocabulary.
"""

import json
import math
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ecospec.configs.cli import parse
from ecospec.data import module as data_module
from ecospec.data.module import BatchLimits, TrainBatches
from ecospec.data.traces import read_traces
from ecospec.errors import InputError
from ecospec.predictor import cli
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.evaluation.evaluate import measure_beside_baselines
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.training.module import (
    FINAL_FACTOR,
    EndlessBatches,
    Limits,
    PredictorModule,
    learning_rate_factor,
)
from ecospec.predictor.training.start import require_answers
from ecospec.predictor.training.trainer import make_trainer, run_trainer
from ecospec.tracing.cli import main as trace_main
from ecospec.tracing.target.loading import MoeShape
from tests.learnable import SHAPE, TABLE, E, fresh_predictor, learnable_traces, options, trained
from tests.tiny import tiny_target_folder

ROW_KEYS = {
    "overlap",
    "overlap_all",
    "overlap_train",
    "overlap_by_layer",
    "overlap_by_dataset",
    "recall_at",
    "excess_loss",
    "calibration",
    "seconds_per_step",
}


@pytest.mark.parametrize("seed", range(2))
def test_fifty_steps_beat_frequency_on_a_learnable_trace(seed):
    traces = learnable_traces(seed)
    predictor, training = trained(traces, options(max_steps=50, seed=seed))
    metrics = measure_beside_baselines(predictor, traces)
    assert training["steps"] == 50
    assert metrics.numbers.overlap > metrics.others["frequency"].overlap + 0.2
    assert metrics.numbers.excess_loss < metrics.others["frequency"].excess_loss - 0.2
    written = metrics.to_json()
    assert ROW_KEYS | {"ladder", "kind"} == set(written)
    assert all(set(numbers) == ROW_KEYS for numbers in written["ladder"].values())
    assert metrics.others["token"].overlap_by_layer[0] == 1.0  # counting tokens knows the layer that follows them


def test_context_is_learned_that_counting_tokens_cannot_know():
    traces = learnable_traces(0, samples=300)
    predictor, _ = trained(traces, options(max_steps=200))
    metrics = measure_beside_baselines(predictor, traces)
    assert metrics.numbers.overlap_by_layer[1] > metrics.others["token"].overlap_by_layer[1] + 0.2


def test_held_out_samples_teach_nothing():
    traces = learnable_traces(0)
    scrambled = learnable_traces(0)
    for item in scrambled:
        if item.split == "test":
            item.experts = (item.experts + 1) % E
    weights = [list(trained(t, options(max_steps=5))[0].state_dict().values()) for t in (traces, scrambled)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_seed_decides_the_result():
    traces = learnable_traces(0)
    heads = [trained(traces, options(max_steps=5, seed=seed))[0].head.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_mixed_precision_trains_and_keeps_float32_weights():
    traces = learnable_traces(0)
    predictor, _ = trained(traces, options(max_steps=50, precision="bf16-mixed"))
    assert {p.dtype for p in predictor.parameters()} == {torch.float32}
    metrics = measure_beside_baselines(predictor, traces)
    assert metrics.numbers.overlap > metrics.others["frequency"].overlap + 0.2


def test_training_ends_after_the_epochs_asked_for():
    traces = learnable_traces(0)
    _, training = trained(traces, options(max_epochs=3))
    assert training["tokens_seen"] == 3 * sum(len(item.input_ids) for item in traces if item.split == "train")


@pytest.mark.parametrize(("processes", "rounds"), [(1, 6), (2, 3), (4, 2), (5, 2), (7, 1)])
def test_an_epoch_ends_with_its_last_round_though_some_batches_are_given_twice(processes, rounds, monkeypatch):
    """6 batches an epoch, read as the first of several processes would."""
    monkeypatch.setattr(data_module, "rank_and_world", lambda: (0, processes))
    _, training = trained(learnable_traces(0), options(max_epochs=4))
    assert training["steps"] == 4 * rounds


def test_training_ends_when_the_time_is_up():
    _, training = trained(learnable_traces(0), options(max_minutes=0.02, max_steps=100_000))
    assert 1.2 <= training["seconds"] < 6
    assert 0 < training["steps"] < 100_000


def test_progress_follows_whichever_limit_is_nearest():
    assert Limits(minutes=2.0).progress(seconds=60, steps=999, epochs=9) == 0.5
    assert Limits(steps=10).progress(seconds=999, steps=5, epochs=9) == 0.5
    assert Limits(epochs=4).progress(seconds=999, steps=999, epochs=1) == 0.25
    assert Limits(2.0, 10, 4).progress(seconds=12, steps=9, epochs=1) == 0.9


def test_the_learning_rate_warms_up_then_falls_to_its_floor_with_progress():
    warming = [learning_rate_factor(step, 10, 0.0) for step in range(11)]
    assert warming == pytest.approx([(step + 1) / 11 for step in range(11)])
    falling = [learning_rate_factor(100, 10, share / 10) for share in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert falling[5] == pytest.approx((1 + FINAL_FACTOR) / 2)
    assert falling[-1] == learning_rate_factor(100, 10, 1.7) == pytest.approx(FINAL_FACTOR)


def test_the_learning_rate_falls_with_elapsed_time_when_time_is_the_limit():
    traces, seen, now = learnable_traces(0), [], [0.0]

    class SixSecondSteps(PredictorModule):
        def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
            seen.append(self.optimizers().param_groups[0]["lr"])
            now[0] += 6.0
            return super().training_step(batch, batch_idx)

    config = options(max_minutes=1.0, warmup_steps=0)
    predictor = fresh_predictor(config, SHAPE, "hash", TABLE)
    epoch = TrainBatches(traces, BatchLimits(tokens=config.tokens_per_batch), seed=0)
    module = SixSecondSteps(predictor, config, epoch, seconds_now=lambda: now[0])
    run_trainer(make_trainer(config), module, EndlessBatches(epoch))
    expected = [config.learning_rate * learning_rate_factor(step, 0, step / 10) for step in range(10)]
    assert seen == pytest.approx(expected)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A trace folder of the tiny target, with samples of both splits."""
    root = tmp_path_factory.mktemp("recorded")
    prompts = root / "words.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"word {i}"}) + "\n" for i in range(16)))
    arguments = ["--target", str(tiny_target), "--prompts", str(prompts), "--max-new-tokens", "12"]
    assert trace_main(["run", *arguments, "--output", str(root / "traces")]) == 0
    assert {item.split for item in read_traces(root / "traces")} == {"train", "test"}
    return root / "traces"


def command(target: Path, traces: Path, output: Path, *more: str) -> list[str]:
    folders = ["--target", str(target), "--traces", str(traces), "--output", str(output)]
    sizes = ["--backbone.hidden_size", "32", "--backbone.num_layers", "1", "--tokens-per-batch", "128"]
    return ["predictor", "--config", "lab/predictor", *folders, *sizes, "--max-steps", "20", *more]


def test_the_command_writes_the_predictor_folder_and_a_table(recorded, tiny_target, tmp_path, capsys):
    output = tmp_path / "predictor"
    assert cli.main(command(tiny_target, recorded, output)) == 0
    assert {p.name for p in output.iterdir()} == {"config.json", "model.safetensors", "metrics.json", "provenance.json"}
    metrics = json.loads((output / "metrics.json").read_text())
    assert ROW_KEYS | {"ladder", "kind"} == metrics.keys()
    assert metrics["kind"] == "predictor" and metrics["ladder"].keys() == {"frequency", "last_step", "token"}
    assert math.isfinite(metrics["excess_loss"]) and 0 < metrics["overlap"] <= 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["predictor", "frequency", "last_step", "token"]
    assert lines[1].split()[1] == f"{metrics['overlap']:.3f}"
    provenance = json.loads((output / "provenance.json").read_text())
    assert provenance["training"]["steps"] == 20
    assert provenance["traces"]["target"]["name"] == str(tiny_target)
    training = tmp_path / "predictor.training"
    assert set(tmp_path.iterdir()) == {output, training}
    assert {p.name for p in training.iterdir()} == {"best", "csv", "tensorboard"}


def test_an_exported_predictor_scores_what_its_metrics_say(recorded, tiny_target, tmp_path, capsys):
    assert cli.main(command(tiny_target, recorded, tmp_path / "predictor")) == 0
    saved = json.loads((tmp_path / "predictor" / "metrics.json").read_text())
    words = ["evaluate", "--target", str(tiny_target), "--traces", str(recorded)]
    words += ["--predictor", str(tmp_path / "predictor"), "--output", str(tmp_path / "again")]
    assert cli.main(words) == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert again.keys() == saved.keys() and again["ladder"].keys() == saved["ladder"].keys()
    for found, expected in (
        (again, saved),
        *((again["ladder"][name], saved["ladder"][name]) for name in again["ladder"]),
    ):
        assert found["overlap_by_layer"] == expected["overlap_by_layer"]
        assert found["excess_loss"] == pytest.approx(expected["excess_loss"])
    capsys.readouterr()
    assert cli.main(words) == 2
    assert "--overwrite" in one_error_line(capsys)


WITHOUT_TRAINING = """
import importlib.metadata, sys
absent = ("lightning", "pytorch-lightning", "deepspeed", "torchmetrics", "tensorboard")
for name in absent:
    sys.modules[name.replace("-", "_")] = None
installed = [found for found in importlib.metadata.distributions() if found.name.lower() not in absent]
importlib.metadata.distributions = lambda: installed
from ecospec.inference.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_what_was_exported_decodes_where_lightning_and_deepspeed_are_not_installed(recorded, tiny_target, tmp_path):
    assert cli.main(command(tiny_target, recorded, tmp_path / "predictor")) == 0
    prompts, config = tmp_path / "prompts.txt", tmp_path / "decode.yaml"
    prompts.write_text("word word word word\n")
    selection = {"policy": "marginal", "gamma": 3, "footprints": "predictor"}
    methods = [{"label": "plain", "drafter": "none"}, {"label": "EcoSpec", "selection": selection}]
    keys = {"target": str(tiny_target), "drafter": {"kind": "prompt_lookup"}, "predictor": str(tmp_path / "predictor")}
    keys |= {"prompts": str(prompts), "max_new_tokens": 6, "methods": methods}
    config.write_text(json.dumps(keys))
    words = ["eval", "--config", str(config), "--output", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRAINING, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "run" / "results.json").read_text())["runs"]
    assert {"predictor"} == {run["footprints"] for run in runs if run["label"] == "EcoSpec"}
    assert "lightning" not in json.loads((tmp_path / "run" / "provenance.json").read_text())["packages"]


def test_a_predictor_is_evaluated_on_its_own_target_only(recorded, tiny_target, tmp_path, capsys):
    other = tiny_target_folder(tmp_path / "other", seed=8)
    of_target, of_other, traces = ["--target", str(tiny_target)], ["--target", str(other)], ["--traces", str(recorded)]
    for words, named in (
        ([*of_other, *traces], "recorded on"),
        ([*of_target, *traces, "--predictor", "lab"], "this target has 3 of 8"),
        (of_target, "--traces"),
    ):
        assert cli.main(["evaluate", *words]) == 2
        assert named in one_error_line(capsys)


def test_a_finished_folder_is_kept_unless_overwrite_is_given(recorded, tiny_target, tmp_path, capsys):
    output = tmp_path / "predictor"
    assert cli.main(command(tiny_target, recorded, output)) == 0
    (output / "note.txt").write_text("on this run")
    assert cli.main(command(tiny_target, recorded, output)) == 2
    assert "--overwrite" in one_error_line(capsys)
    assert (output / "note.txt").exists()
    assert cli.main(command(tiny_target, recorded, output, "--overwrite")) == 0
    assert not (output / "note.txt").exists()


def test_an_output_that_cannot_be_written_is_noticed_before_training(
    recorded, tiny_target, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("ecospec.predictor.training.fit.fit", None)
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "predictor", tmp_path / "file" / "more" / "predictor"):
        assert cli.main(command(tiny_target, recorded, output)) == 2
        assert str(output) in one_error_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_write_is_one_line_and_leaves_no_part(recorded, tiny_target, tmp_path, capsys, monkeypatch):
    save, limits = ExpertPredictor.save_pretrained, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_what_is_too_large(predictor: ExpertPredictor, folder: Path, **more: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        try:
            save(predictor, folder, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(ExpertPredictor, "save_pretrained", save_what_is_too_large)
    assert cli.main(command(tiny_target, recorded, tmp_path / "predictor")) == 1
    assert "large" in one_error_line(capsys)
    assert not (tmp_path / "predictor").exists()
    assert {p.name for p in (tmp_path / "predictor.training").iterdir()} <= {"csv", "tensorboard"}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(KeyboardInterrupt(), 130, "interrupted"), (float("nan"), 1, "step 0: the loss is nan on samples words/")],
)
def test_an_interrupt_and_a_bad_loss_are_one_line(
    error, code, line, recorded, tiny_target, tmp_path, capsys, monkeypatch
):
    def spoiled(*_: object) -> torch.Tensor:
        if isinstance(error, BaseException):
            raise error
        return torch.tensor(error)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("ecospec.predictor.training.module.batch_loss", spoiled)
    assert cli.main(command(tiny_target, recorded, tmp_path / "predictor")) == code
    assert line in one_error_line(capsys)
    assert signal.getsignal(signal.SIGINT) is handler
    assert not (tmp_path / "predictor").exists()


def test_another_exit_from_training_stays_what_it_is(monkeypatch):
    def exits(*_: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(PredictorModule, "on_fit_start", exits)
    with pytest.raises(SystemExit, match="3"):
        trained(learnable_traces(0), options(max_steps=1))


@pytest.mark.parametrize("split", ["train", "test"])
def test_traces_without_answers_in_a_split_are_refused_before_training(split):
    traces = learnable_traces(0)
    require_answers(traces, options(traces="here"))
    for item in traces:
        if item.split == split:
            item.prompt_len = len(item.input_ids)
    with pytest.raises(InputError, match=f"traces here: its {split} samples have no answer positions"):
        require_answers(traces, options(traces="here"))


@pytest.mark.parametrize(("changes", "named"), [({"num_hidden_layers": 2}, "2 MoE layers"), ({}, "weights")])
def test_traces_of_another_target_are_refused_naming_both(recorded, tiny_target, tmp_path, capsys, changes, named):
    other = tiny_target_folder(tmp_path / "other", seed=1, **changes)
    assert cli.main(command(other, recorded, tmp_path / "out")) == 2
    line = one_error_line(capsys)
    assert str(other) in line and str(tiny_target) in line and named in line
    assert not (tmp_path / "out").exists()


def test_traces_from_before_weights_were_hashed_are_accepted(recorded, tiny_target, tmp_path):
    old = shutil.copytree(recorded, tmp_path / "old")
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["target"]["weights_sha256"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(command(tiny_target, old, tmp_path / "predictor", "--max-steps", "1")) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--traces", "no-such-folder"], "no-such-folder"),
        (["--backbone.path", "no-such-backbone"], "--backbone.path"),
        (["--backbone.num_heads", "5"], "--backbone.num_heads 5"),
        (["--tokens-per-batch", "0"], "--tokens_per_batch 0"),
        (["--learning-rate", "fast"], "learning_rate"),
        (["--learning-rate", "0"], "--learning_rate 0"),
        (["--learning-rate", ".nan"], "--learning_rate nan"),
        (["--max-minutes", ".nan"], "--max_minutes nan"),
        (["--max-minutes", ".inf"], "--max_minutes inf"),
        (["--max-minutes", "-1"], "--max_minutes -1"),
        (["--warmup-steps", "-1"], "--warmup_steps -1"),
        (["--weight-decay", "-0.1"], "--weight_decay -0.1"),
        (["--gradient-clip", "0"], "--gradient_clip 0"),
        (["--head.rope_theta", "1"], "does not read it (only drafter)"),
        (["--mlp.num_blocks", "2"], "--mlp.num_blocks: --kind predictor does not read it (only draft_mlp)"),
        (["--kind", "linear"], "--backbone.hidden_size: --kind linear does not read it (only predictor)"),
        (["--seed", "-1"], "--seed -1"),
        (["--max-minuets", "1"], "max-minuets"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, named, recorded, tiny_target, tmp_path, capsys):
    assert cli.main(command(tiny_target, recorded, tmp_path / "out", *change)) == 2
    assert named.replace("-", "_") in one_error_line(capsys).replace("-", "_")


@pytest.mark.parametrize("key", ["traces", "output", "max_minutes"])
def test_a_missing_key_is_named(key, recorded, tiny_target, tmp_path, capsys):
    given = {"target": tiny_target, "traces": recorded, "output": tmp_path / "out", "max_minutes": 1} | {key: None}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    assert cli.main(["predictor", *words]) == 2
    assert f"--{key}" in one_error_line(capsys)


def test_the_shipped_configuration_parses_and_fits_its_budget():
    config, _ = parse("ecospec-train predictor", TrainPredictorConfig, ["--config", "lab/predictor"])
    assert config.max_minutes == 2.0
    lab = MoeShape("qwen3_moe", tuple(range(8)), 64, 8, 64, 128, 8)
    predictor = fresh_predictor(config, lab, "hash", torch.randn(64, 128))
    assert 300_000 < predictor.num_parameters() <= 600_000


def test_help_needs_no_torch():
    code = "import sys; from ecospec.predictor.cli import main\n"
    code += "try: main(['predictor', '--help'])\nexcept SystemExit: pass\n"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert run.returncode == 0 and "--max_minutes" in run.stdout


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ecospec-train: ")]
    assert len(lines) == 1
    return lines[0]
