"""What stands around training: loggers, the bar, machines that lack something, and decoding where training is not."""

import csv
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ecospec.configs.cli import parse
from ecospec.errors import InputError
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.training import trainer as trainers
from ecospec.predictor.training.checkpoints import training_folder
from ecospec.predictor.training.trainer import TrainingBar, make_loggers, make_trainer
from tests.learnable import learnable_traces, options, trained

TARGETS = ("deepseek-v3.1", "qwen3-235b-a22b", "gpt-oss-120b")


def test_loss_and_held_out_overlap_are_written_for_people_and_for_tensorboard(tmp_path):
    config = options(output=str(tmp_path / "out"), max_steps=30, validate_every=10, loggers=["csv", "tensorboard"])
    trained(learnable_traces(0), config)
    rows = list(csv.DictReader((training_folder(config) / "csv/version_0/metrics.csv").open()))
    events = EventAccumulator(str(training_folder(config) / "tensorboard/version_0")).Reload()
    for column, count in (("overlap", 3), ("excess_loss", 3), ("learning_rate", 3), ("tokens", 3)):
        written = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        shown = {event.step: event.value for event in events.Scalars(column)}
        assert written.keys() == shown.keys() == {10, 20, 30} and len(written) == count
        assert all(shown[step] == pytest.approx(written[step]) for step in shown)


def test_wandb_is_asked_for_by_name_and_used_where_it_is_installed(tmp_path, monkeypatch):
    config, find = options(loggers=["wandb"]), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(InputError, match="loggers wandb: it is not installed"):
        make_loggers(config, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleType(name) if name == "wandb" else find(name))
    made: list[dict] = []
    monkeypatch.setattr(trainers, "WandbLogger", lambda **keys: made.append(keys))
    make_loggers(config, tmp_path)
    assert made == [{"save_dir": tmp_path, "project": "ecospec"}]


def test_the_bar_shows_the_share_that_is_done_with_loss_and_overlap(tmp_path, monkeypatch):
    shown: list[tuple[float, dict]] = []
    update = TrainingBar.on_train_batch_end

    def watched(bar: TrainingBar, *args: object) -> None:
        update(bar, *args)
        shown.append((bar.train_progress_bar.n, bar.train_progress_bar.postfix))

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(TrainingBar, "on_train_batch_end", watched)
    trained(learnable_traces(0), options(output=str(tmp_path / "out"), max_steps=10, validate_every=5))
    assert [share for share, _ in shown] == pytest.approx([n / 10 for n in range(1, 11)])
    assert "overlap" in shown[-1][1] and "excess_loss" in shown[-1][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_deepspeed_is_refused_in_one_line_where_it_cannot_run(monkeypatch):
    config, find = options(strategy="deepspeed_stage_1", max_steps=1), importlib.util.find_spec
    with pytest.raises(InputError, match="strategy deepspeed_stage_1: needs CUDA GPUs"):
        make_trainer(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        make_trainer(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 16, "accumulate": 3}, "batch_size 16: must be a multiple of 3"),
        ({"accumulate": 0}, "accumulate 0"),
        ({"devices": 0}, "devices 0"),
        ({"num_nodes": 0}, "num_nodes 0"),
        ({"validate_every": -1}, "validate_every -1"),
        ({"early_stopping": 0}, "early_stopping 0"),
        ({"early_stopping": 2, "validate_every": 0}, "early_stopping: needs held-out overlap"),
        ({"checkpoint_overlaps": [0.5, 1.5]}, "checkpoint_overlaps 1.5"),
    ],
)
def test_impossible_keys_are_named(changes, named):
    with pytest.raises(InputError, match=named):
        TrainPredictorConfig(**changes)


def test_a_step_has_as_many_samples_in_however_many_parts():
    for devices, num_nodes, accumulate in ((1, 1, 1), (2, 1, 4), (2, 2, 2)):
        config = TrainPredictorConfig(batch_size=16, devices=devices, num_nodes=num_nodes, accumulate=accumulate)
        assert config.samples_per_batch * devices * num_nodes * accumulate == 16
    assert TrainPredictorConfig().samples_per_batch is None


@pytest.mark.parametrize("name", TARGETS)
def test_the_real_targets_are_trained_as_in_the_paper(name):
    config, _ = parse("ecospec-train predictor", TrainPredictorConfig, ["--config", f"{name}/predictor"])
    assert (config.batch_size, config.max_epochs, config.learning_rate, config.weight_decay) == (16, 100, 1e-5, 0.0)
    assert config.checkpoint_overlaps == [0.5, 0.6]
    assert config.strategy == ("deepspeed_stage_2" if name == "deepseek-v3.1" else "auto")
