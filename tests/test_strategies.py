"""Several processes, and DeepSpeed, train what one process trains; a killed run goes on; the export is the same.

Real processes over gloo on the lab's shipped traces, in float32. Their data-parallel mean over two batches is one
process's accumulation of two.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ecospec.predictor.kinds.loading import load_predictor
from tests.train_processes import ROOT, run

STEPS = 10
KEYS = {
    "config": "lab/predictor",
    "traces": str(ROOT / "data/lab/traces"),
    "backbone.hidden_size": "32",
    "backbone.num_layers": "1",
    "max_minutes": "30",
    "max_steps": str(STEPS),
    "validate_every": "4",
    "loggers": "csv",
}
TWO = {"devices": "2", "accumulate": "1"}


def words(output: Path, **changes: str) -> list[str]:
    keys = KEYS | {"accumulate": "2", "output": str(output)} | changes
    return ["predictor", *(word for name, value in keys.items() for word in (f"--{name}", value))]


def read_losses(path: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def assert_same_run(losses: Path, output: Path, reference: Path) -> None:
    """Every step has the loss that it has in one process, and what comes out is the same predictor."""
    expected = dict(read_losses(reference / "losses"))
    assert expected.keys() == set(range(1, STEPS + 1))
    assert all(loss == pytest.approx(expected[step], abs=1e-5) for step, loss in read_losses(losses))
    assert {step for step, _ in read_losses(losses)} == expected.keys()
    found, wanted = (load_file(folder / "model.safetensors") for folder in (output, reference / "out"))
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == torch.float32 for name in found)
    assert all(torch.allclose(found[name], wanted[name], atol=2e-4) for name in found)
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (output, reference / "out")]
    assert metrics[0]["overlap"] == pytest.approx(metrics[1]["overlap"], abs=2e-3)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    done = run(1, folder / "losses", *words(folder / "out"), paired=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_two_processes_killed_go_on_as_one_process_would_have_and_only_as_two(strategy, one_process, tmp_path):
    changes = TWO | {"strategy": strategy}
    killed = run(2, tmp_path / "losses", *words(tmp_path / "out", **changes), die_at=6)
    assert killed.returncode != 0 and not (tmp_path / "out").exists()
    assert json.loads((tmp_path / "out.training" / "run.json").read_text())["last"] == "step-4.ckpt"
    alone = run(1, tmp_path / "unused", *words(tmp_path / "out", strategy=strategy, accumulate="1"))
    assert alone.returncode == 2
    assert re.search(r"this run has 1 processes: .* had 2", alone.stderr.splitlines()[-1])
    resumed = run(2, tmp_path / "losses", *words(tmp_path / "out", **changes))
    assert resumed.returncode == 0, resumed.stderr
    assert len(re.findall("written to", resumed.stdout)) == 1  # one process evaluates, exports and speaks
    assert [step for step, _ in read_losses(tmp_path / "losses")] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    assert_same_run(tmp_path / "losses", tmp_path / "out", one_process)
    assert not list((tmp_path / "out.training").glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
def test_a_loss_that_is_not_finite_in_one_process_ends_all_and_spares_what_was_saved(tmp_path):
    ended = run(2, tmp_path / "losses", *words(tmp_path / "out", **TWO), spoil_at=7)
    assert ended.returncode == 1 and not (tmp_path / "out").exists()
    assert (tmp_path / "exits").read_text().split() == ["1", "1"]
    assert "step 6: the loss of another process is not finite" in ended.stderr
    assert re.search(r"step 6: the loss is nan on samples \S+.*--learning_rate", ended.stderr)
    assert [step for step, _ in read_losses(tmp_path / "losses")] == [1, 2, 3, 4, 5, 6]
    folder = tmp_path / "out.training"
    assert json.loads((folder / "run.json").read_text())["last"] == "step-4.ckpt"
    state = torch.load(folder / "step-4.ckpt")["state_dict"]
    assert state and all(weight.isfinite().all() for weight in state.values())
    resumed = run(2, tmp_path / "losses", *words(tmp_path / "out", **TWO))
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [3, 6, 10])
def test_a_killed_process_goes_on_bit_for_bit(die_at, one_process, tmp_path):
    killed = run(1, tmp_path / "losses", *words(tmp_path / "out"), die_at=die_at, paired=True)
    assert killed.returncode == -9 and not (tmp_path / "out").exists()
    resumed = run(1, tmp_path / "losses", *words(tmp_path / "out"), paired=True)
    assert resumed.returncode == 0, resumed.stderr
    assert set(read_losses(tmp_path / "losses")) == set(read_losses(one_process / "losses"))
    files = [folder / "model.safetensors" for folder in (tmp_path / "out", one_process / "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
def test_mixed_precision_under_deepspeed_exports_float32(one_process, tmp_path):
    changes = TWO | {"strategy": "deepspeed_stage_2", "precision": "bf16-mixed"}
    done = run(2, tmp_path / "losses", *words(tmp_path / "out", **changes))
    assert done.returncode == 0, done.stderr
    assert {weight.dtype for weight in load_predictor(tmp_path / "out").parameters()} == {torch.float32}
    expected, losses = (dict(read_losses(folder / "losses")) for folder in (one_process, tmp_path))
    assert losses.keys() == expected.keys()
    assert all(math.isclose(loss, expected[step], rel_tol=0.02) for step, loss in losses.items())
