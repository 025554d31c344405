"""An interrupted run goes on as if nothing had happened: the same losses, the same weights, to the last bit.

Letters: L MoE layers, E experts, K experts per token, V vocabulary, D embedding width, F width of a draft head.
"""

import csv
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ecospec.errors import DamageError, InputError
from ecospec.predictor.evaluation.evaluate import measure_model
from ecospec.predictor.kinds.draft_mlp.head_inputs import HEAD_INPUTS
from ecospec.predictor.kinds.draft_mlp.model import DraftMLP, DraftMLPConfig
from ecospec.predictor.kinds.loading import load_predictor
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.kinds.routing import embedding_hash
from ecospec.predictor.training import module as training
from ecospec.predictor.training.checkpoints import Checkpoints, finish, start_afresh, training_folder
from ecospec.predictor.training.fit import fit
from ecospec.predictor.training.module import PredictorModule
from ecospec.tracing.store.manifest import PartFile
from tests.learnable import TABLE, D, E, K, L, MemoryTraces, V, learnable_traces, options, trained

F, STEPS = 10, 3  # width of a draft head, and how deep it drafts


class Cut(Exception):
    """Stands for a sudden death of the process."""


@pytest.fixture
def losses(monkeypatch) -> dict[int, list[float]]:
    """Batch number → losses of all times that it was trained on."""
    seen: dict[int, list[float]] = {}
    step = PredictorModule.training_step

    def recorded(module: PredictorModule, batch: object, batch_idx: int) -> torch.Tensor:
        loss = step(module, batch, batch_idx)
        seen.setdefault(batch_idx, []).append(loss.item())
        return loss

    monkeypatch.setattr(PredictorModule, "training_step", recorded)
    return seen


def cut_at(batch_number: int, monkeypatch, error: BaseException) -> None:
    """Let training die just before it trains on this batch, once."""
    step, alive = PredictorModule.training_step, [False]

    def mortal(module: PredictorModule, batch: object, batch_idx: int) -> torch.Tensor:
        if batch_idx == batch_number and not alive[0]:
            alive[0] = True
            raise error
        return step(module, batch, batch_idx)

    monkeypatch.setattr(PredictorModule, "training_step", mortal)


def draft_mlp(table_VD: torch.Tensor, **made_for: str) -> DraftMLP:
    torch.manual_seed(0)
    fields = {"num_layers": L, "num_experts": E, "num_experts_per_tok": K, "vocab_size": V, "embedding_size": D}
    sizes = {"draft_size": F, "hidden_size": 24, "intermediate_size": 16, "steps": STEPS}
    return DraftMLP(DraftMLPConfig(**fields, **sizes, **made_for)).attach_embedding(table_VD)


def head_input_traces(seed: int) -> MemoryTraces:
    """Learnable samples with the hidden input of a draft head of width F at each of its depths, here noise."""
    traces, generator = learnable_traces(seed), torch.Generator().manual_seed(seed)
    for item in traces:
        noise_ATF = torch.randn(STEPS + 1, len(item.input_ids), F, generator=generator).bfloat16()
        item.columns = {HEAD_INPUTS: noise_ATF.transpose(0, 1)}
    return traces


def weights(predictor: ExpertPredictor | DraftMLP) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in predictor.state_dict().values()])


@pytest.mark.parametrize(("cut", "changes"), [(17, {}), (12, {}), (13, {"accumulate": 2}), (21, {"batch_size": 3})])
def test_a_run_cut_off_anywhere_goes_on_with_the_same_losses_and_weights(cut, changes, losses, tmp_path, monkeypatch):
    traces = learnable_traces(0)
    common = {"max_steps": 24, "validate_every": 4, **changes}
    whole, _ = trained(traces, options(output=str(tmp_path / "whole"), **common))
    expected, config = {n: seen[0] for n, seen in losses.items()}, options(output=str(tmp_path / "cut"), **common)
    losses.clear()
    cut_at(cut, monkeypatch, Cut())
    with pytest.raises(Cut):
        trained(traces, config)
    assert max(losses) == cut - 1
    resumed, numbers = trained(traces, config)
    assert losses.keys() == expected.keys()
    assert all(set(seen) == {expected[n]} for n, seen in losses.items())
    assert len(losses[0]) == 1 and max(map(len, losses.values())) <= 2  # it went on, and did not begin again
    assert torch.equal(weights(resumed), weights(whole))
    assert numbers["steps"] == 24


@pytest.mark.parametrize("cut", [9, 12])
def test_a_draft_mlp_cut_off_draws_the_depths_that_it_would_have(cut, losses, tmp_path, monkeypatch):
    table, common = {"embedding_sha256": embedding_hash(TABLE)}, {"max_steps": 16, "validate_every": 4}
    whole = draft_mlp(TABLE, **table)
    fit(whole, head_input_traces(0), options(output=str(tmp_path / "whole"), **common))
    expected, config = {n: seen[0] for n, seen in losses.items()}, options(output=str(tmp_path / "cut"), **common)
    losses.clear()
    cut_at(cut, monkeypatch, Cut())
    with pytest.raises(Cut):
        fit(draft_mlp(TABLE, **table), head_input_traces(0), config)
    resumed = draft_mlp(TABLE, **table)
    fit(resumed, head_input_traces(0), config)
    assert losses.keys() == expected.keys() and len(losses[0]) == 1
    assert all(set(seen) == {expected[n]} for n, seen in losses.items())
    assert torch.equal(weights(resumed), weights(whole))


def test_epochs_end_and_begin_where_they_would_have(losses, tmp_path, monkeypatch):
    """6 batches an epoch: cuts just before and just after the end of one."""
    traces, expected = learnable_traces(0), None
    for cut in (None, 11, 12):
        losses.clear()
        config = options(output=str(tmp_path / str(cut)), max_epochs=3, validate_every=1)
        if cut is not None:
            with monkeypatch.context() as patch:
                cut_at(cut, patch, Cut())
                with pytest.raises(Cut):
                    trained(traces, config)
        trained(traces, config)
        expected = expected or {n: seen[0] for n, seen in losses.items()}
        assert {n: seen[-1] for n, seen in losses.items()} == expected


def test_the_time_already_used_counts(tmp_path, monkeypatch):
    traces, now = learnable_traces(0), [0.0]

    def ticking(batch_number: int) -> None:
        now[0] += 6.0

    config = options(output=str(tmp_path / "out"), max_minutes=2.0, validate_every=1)
    module = PredictorModule.__init__
    monkeypatch.setattr(PredictorModule, "__init__", lambda *args: module(*args, seconds_now=lambda: now[0]))
    loss = training.batch_loss
    monkeypatch.setattr(training, "batch_loss", lambda *args: (ticking(0), loss(*args))[1])
    cut_at(11, monkeypatch, Cut())
    with pytest.raises(Cut):
        trained(traces, config)
    now[0] += 1000.0  # the pause does not
    _, numbers = trained(traces, config)
    assert (numbers["steps"], numbers["seconds"]) == (20, 120.0)


def test_best_is_the_best_and_what_was_measured_can_be_measured_again(tmp_path):
    traces = learnable_traces(0)
    config = options(
        output=str(tmp_path / "out"), max_steps=40, validate_every=5, checkpoint_overlaps=[0.3, 0.4, 0.999]
    )
    predictor, numbers = trained(traces, config)
    kept = {path.name: path for path in training_folder(config).iterdir() if (path / "config.json").exists()}
    assert kept.keys() == {"best", "overlap-0.3", "overlap-0.4"}
    for name, folder in kept.items():
        files = {"config.json", "model.safetensors", "metrics.json", "provenance.json"}
        assert {path.name for path in folder.iterdir()} == files
        again = measure_model(load_predictor(folder).attach_embedding(TABLE), traces).overlap
        recorded = json.loads((folder / "metrics.json").read_text())
        assert again == pytest.approx(recorded["overlap"], abs=1e-9)
        assert name == "best" or again >= float(name.split("-")[1])
    overlaps = logged(training_folder(config), "overlap")
    assert len(overlaps) == 8
    best_step = max(overlaps, key=overlaps.get)
    assert numbers["best_step"] == best_step and numbers["best_overlap"] == pytest.approx(overlaps[best_step])
    assert torch.equal(weights(predictor), weights(load_predictor(kept["best"])))
    reached = {name: json.loads((folder / "metrics.json").read_text())["step"] for name, folder in kept.items()}
    assert reached["overlap-0.3"] == min(step for step, overlap in overlaps.items() if overlap >= 0.3)


def test_no_embedding_table_is_in_any_checkpoint_and_all_load_with_defaults(tmp_path, monkeypatch):
    config = options(output=str(tmp_path / "out"), max_steps=20, validate_every=4)
    cut_at(10, monkeypatch, Cut())
    with pytest.raises(Cut):
        trained(learnable_traces(0), config)
    folder = training_folder(config)
    (state,) = folder.glob("step-*.ckpt")
    assert state.name == json.loads((folder / "run.json").read_text())["last"] == "step-8.ckpt"
    for tensors in (torch.load(state)["state_dict"], load_file(folder / "best" / "model.safetensors")):
        assert tensors and not any(tensor.shape == TABLE.shape for tensor in tensors.values())


def unrelated_traces() -> MemoryTraces:
    """Samples whose held-out ones have nothing to do with those trained on."""
    traces = learnable_traces(0)
    for item in traces:
        if item.split == "test":
            item.experts = (item.experts + 5) % E
    return traces


def test_training_stops_early_when_held_out_overlap_no_longer_rises(tmp_path):
    config = options(output=str(tmp_path / "out"), max_steps=4000, validate_every=5, early_stopping=3)
    _, numbers = trained(unrelated_traces(), config)
    overlaps = logged(training_folder(config), "overlap")
    assert numbers["steps"] == max(overlaps) == numbers["best_step"] + 15
    assert max(overlaps.values()) == overlaps[numbers["best_step"]]


def test_a_run_cut_off_right_after_it_had_decided_to_stop_early_trains_no_further(losses, tmp_path, monkeypatch):
    common = {"max_steps": 4000, "validate_every": 5, "early_stopping": 3}
    whole, expected = trained(unrelated_traces(), options(output=str(tmp_path / "whole"), **common))
    config, save = options(output=str(tmp_path / "cut"), **common), Checkpoints._save_state
    losses.clear()

    def mortal(kept: Checkpoints, trainer: object) -> None:
        save(kept, trainer)
        if trainer.should_stop:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_save_state", mortal)
        with pytest.raises(Cut):
            trained(unrelated_traces(), config)
    resumed, numbers = trained(unrelated_traces(), config)
    assert {n: len(seen) for n, seen in losses.items()} == dict.fromkeys(range(expected["steps"]), 1)
    names = ("steps", "best_step", "best_overlap", "tokens_seen")
    assert [numbers[name] for name in names] == [expected[name] for name in names]
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 0.5}, "learning_rate 0.5: .* had 0.01"),
        ({"batch_size": 7}, "batch_size 7: .* had None"),
        ({"devices": 2}, "this run has 2 processes: .* had 1"),
    ],
)
def test_another_run_is_not_resumed(change, named, tmp_path, monkeypatch):
    common = {"output": str(tmp_path / "out"), "max_steps": 20, "validate_every": 4}
    cut_at(10, monkeypatch, Cut())
    with pytest.raises(Cut):
        trained(learnable_traces(0), options(**common))
    with pytest.raises(InputError, match=named):
        trained(learnable_traces(0), options(**common | change))
    other = learnable_traces(0)
    other.manifest = replace(other.manifest, parts=[PartFile("part-0.parquet", 60, "of others")])
    with pytest.raises(InputError, match="traces"):
        trained(other, options(**common))


def test_a_model_made_for_something_else_is_not_resumed(tmp_path, monkeypatch):
    """The same keys, though the draft head, the target's table or its configuration at those places is another."""
    traces, config = head_input_traces(0), options(output=str(tmp_path / "out"), max_steps=20, validate_every=4)
    made = {"drafter_fingerprint": "first", "target_config_sha256": "first", "embedding_sha256": embedding_hash(TABLE)}
    cut_at(10, monkeypatch, Cut())
    with pytest.raises(Cut):
        fit(draft_mlp(TABLE, **made), traces, config)
    for changes, table, named in (
        ({"drafter_fingerprint": "second"}, TABLE, "drafter: .* head has changed: .* had first"),
        ({"target_config_sha256": "second"}, TABLE, "target: .* configuration has changed: .* had first"),
        ({"embedding_sha256": embedding_hash(-TABLE)}, -TABLE, "target: .* table has changed"),
    ):
        with pytest.raises(InputError, match=named):
            fit(draft_mlp(table, **made | changes), traces, config)
    assert fit(draft_mlp(TABLE, **made), traces, config)["steps"] == 20


def test_kept_predictors_of_a_finished_run_are_removed_only_when_that_is_asked_for(losses, tmp_path):
    common = {"output": str(tmp_path / "out"), "max_steps": 8, "validate_every": 4}
    config = options(**common, checkpoint_overlaps=[0.1])
    trained(learnable_traces(0), config)
    folder = training_folder(config)
    finish(folder)
    kept = kept_files(tmp_path)
    assert {path.parent.name for path in kept} == {"best", "overlap-0.1"}
    losses.clear()
    with pytest.raises(InputError, match=f"output .*{folder} holds predictors .*overwrite"):
        trained(learnable_traces(0), options(**common))
    assert kept_files(tmp_path) == kept and not losses
    trained(learnable_traces(0), options(**common, overwrite=True))
    assert (folder / "best").is_dir() and not (folder / "overlap-0.1").exists()


def test_what_a_kill_left_half_written_is_removed(tmp_path):
    for tidy in (start_afresh, finish):
        folder = tmp_path / tidy.__name__
        for name in (".best.17.partial", ".overlap-0.5.17.old"):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text("{}")
        (folder / ".run.json.17.partial").write_text("{")
        (folder / "csv").mkdir()
        tidy(folder)
        assert [path.name for path in folder.iterdir()] == ["csv"]


@pytest.mark.parametrize("kept", [False, True])
def test_without_samples_to_train_on_training_does_not_begin(kept, tmp_path):
    traces = learnable_traces(0)
    traces[:] = [item for item in traces if item.split == "test"]
    with pytest.raises(InputError, match="traces: none of the samples is of the train split"):
        trained(traces, options(output=str(tmp_path / "out") if kept else None, max_steps=2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_step_and_samples_and_spares_the_last_good_state(bad, tmp_path, monkeypatch):
    traces = learnable_traces(0)
    loss, calls = training.batch_loss, []

    def spoiled(predictor: ExpertPredictor, batch: object) -> torch.Tensor:
        calls.append(batch)
        return loss(predictor, batch) * (bad if len(calls) == 11 else 1.0)

    config = options(output=str(tmp_path / "out"), max_steps=20, validate_every=4)
    monkeypatch.setattr(training, "batch_loss", spoiled)
    with pytest.raises(DamageError, match=r"step 10: .*synthetic/\d+/0.*--learning_rate") as caught:
        trained(traces, config)
    samples = {item.sample_id: item.input_ids.tolist() for item in traces}
    named = [word.strip(",") for word in str(caught.value).split() if word.startswith("synthetic/")]
    assert [samples[name.rstrip(";")] for name in named] == calls[10].input_ids.tolist()
    (state,) = training_folder(config).glob("step-*.ckpt")
    assert state.name == "step-8.ckpt"
    assert all(tensor.isfinite().all() for tensor in torch.load(state)["state_dict"].values())


@pytest.mark.parametrize(("validate_every", "spoiled_step"), [(4, 12), (4, 18), (0, 18), (None, 18)])
def test_a_finite_loss_of_infinite_gradient_replaces_nothing_that_was_saved(
    validate_every, spoiled_step, tmp_path, monkeypatch
):
    """At a measurement, at the last step, there without measurements, and where nothing is written."""
    output = None if validate_every is None else str(tmp_path / "out")
    config = options(output=output, max_steps=18, validate_every=validate_every or 0)
    loss, calls, before = training.batch_loss, [], {}

    def spoiled(predictor: ExpertPredictor, batch: object) -> torch.Tensor:
        calls.append(batch)
        if len(calls) < spoiled_step:
            return loss(predictor, batch)
        before.update(kept_files(tmp_path))
        weight = predictor.head.weight[0, 0]
        return loss(predictor, batch) + (weight - weight.detach()).sqrt()

    monkeypatch.setattr(training, "batch_loss", spoiled)
    with pytest.raises(
        DamageError, match=rf"step {spoiled_step}: weights .* synthetic/\d+/0.*--learning_rate"
    ) as caught:
        trained(learnable_traces(0), config)
    assert all(name in str(caught.value) for name in calls[-1].sample_ids)
    assert kept_files(tmp_path) == before
    assert len(calls) == spoiled_step and bool(before) == bool(validate_every)


def kept_files(folder: Path) -> dict[Path, bytes]:
    """Content of all files but the logs."""
    found = [path for path in folder.rglob("*") if path.is_file() and "csv" not in path.parts]
    return {path: path.read_bytes() for path in found}


def test_ctrl_c_finishes_the_step_and_leaves_it_to_be_resumed(losses, tmp_path, monkeypatch):
    traces, handler = learnable_traces(0), signal.getsignal(signal.SIGINT)
    config = options(output=str(tmp_path / "out"), max_steps=20)
    step = PredictorModule.training_step

    def interrupted(module: PredictorModule, batch: object, batch_idx: int) -> torch.Tensor:
        if batch_idx == 7 and len(losses.get(7, [])) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return step(module, batch, batch_idx)

    monkeypatch.setattr(PredictorModule, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(traces, config)
    assert signal.getsignal(signal.SIGINT) is handler
    assert max(losses) == 7
    trained(traces, config)
    assert {n: len(seen) for n, seen in losses.items()} == dict.fromkeys(range(20), 1)


def test_a_rerun_after_the_end_but_before_the_export_trains_no_further(losses, tmp_path):
    config = options(output=str(tmp_path / "out"), max_steps=8, validate_every=4)
    first, _ = trained(learnable_traces(0), config)
    again, numbers = trained(learnable_traces(0), config)
    assert max(map(len, losses.values())) == 1 and numbers["steps"] == 8
    assert torch.equal(weights(first), weights(again))


def logged(folder: Path, column: str) -> dict[int, float]:
    """Step → value, from the CSV logs of all parts of a run."""
    rows = {}
    for path in sorted(folder.glob("csv/version_*/metrics.csv")):
        for row in csv.DictReader(path.open()):
            if row.get(column):
                rows[int(row["step"])] = float(row[column])
    return rows
