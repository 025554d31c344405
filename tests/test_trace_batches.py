"""Batches of traces: no sample is lost or given twice, whatever the epoch, the processes, and where it was interrupted.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch

from ecospec.data import module
from ecospec.data.module import BatchLimits, HeldOutBatches, TraceDataModule, TrainBatches, collate, group_by_length
from ecospec.predictor.objective.overlap import Overlap
from tests.halves import ReadsTokens

L, E, K = 3, 10, 3
LIMITS = [BatchLimits(tokens=120), BatchLimits(samples=8), BatchLimits(samples=5, tokens=150)]
SEEDS = range(3)


def items_of(lengths: list[int], num_experts: int = E) -> list[SimpleNamespace]:
    """Samples of these lengths; the token ids of each are its number."""
    rng = np.random.default_rng(0)
    dtype = np.min_scalar_type(num_experts - 1)
    return [
        SimpleNamespace(
            input_ids=np.full(T, number, np.int32),
            prompt_len=1,
            experts=np.sort(rng.random((T, L, num_experts)).argsort(-1)[..., :K], -1).astype(dtype),
            sample_id=f"made-up/{number}/0",
            columns={},
        )
        for number, T in enumerate(lengths)
    ]


def random_lengths(seed: int, size: int = 200) -> list[int]:
    return np.random.default_rng(seed).integers(1, 60, size).tolist()


def in_process(monkeypatch: pytest.MonkeyPatch, rank: int, processes: int) -> None:
    monkeypatch.setattr(module, "rank_and_world", lambda: (rank, processes))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_sample_is_in_exactly_one_batch_and_batches_keep_their_limits(seed, limits):
    lengths = random_lengths(seed)
    batches = group_by_length(lengths, limits, seed, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(limits.allow(len(batch), max(lengths[i] for i in batch)) for batch in batches)
    assert max(map(len, batches)) > 1


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_epoch_has_as_many_batches(seed, limits):
    lengths = random_lengths(seed)
    epochs = [group_by_length(lengths, limits, seed, epoch, processes=2) for epoch in range(6)]
    assert len({len(batches) for batches in epochs}) == 1
    assert len({str(sorted(map(sorted, batches))) for batches in epochs}) == 6  # of other samples


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_is_a_small_part_of_what_random_batches_would_have(seed):
    lengths = np.array(random_lengths(seed, 400))

    def padding(batches: list[list[int]]) -> int:
        return sum(len(batch) * lengths[batch].max() - lengths[batch].sum() for batch in batches)

    unsorted = np.random.default_rng(seed).permutation(400).reshape(-1, 8).tolist()
    assert padding(group_by_length(lengths, BatchLimits(samples=8), seed, 0)) < 0.15 * padding(unsorted)


def test_a_sample_longer_than_the_budget_is_a_batch_by_itself():
    batches = group_by_length([5, 500, 5], BatchLimits(tokens=20), seed=0, epoch=0)
    assert sorted(sorted(batch) for batch in batches) == [[0, 2], [1]]


def test_a_batch_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="needs a limit"):
        BatchLimits()


def test_order_depends_on_seed_and_epoch_alone():
    lengths, limits = list(range(1, 80)), BatchLimits(tokens=90)
    orders = {(seed, epoch): group_by_length(lengths, limits, seed, epoch) for seed in range(2) for epoch in range(2)}
    assert orders[0, 0] == group_by_length(lengths, limits, 0, 0)
    assert len({str(order) for order in orders.values()}) == 4


@pytest.mark.parametrize("num_experts", [10, 300])
def test_a_batch_holds_the_very_ids_in_a_narrow_type(num_experts):
    items = items_of([4, 9, 6], num_experts)
    batch = collate(items)
    assert batch.experts.dtype == (torch.uint8 if num_experts <= 256 else torch.int32)
    assert batch.sample_ids == ("made-up/0/0", "made-up/1/0", "made-up/2/0")
    assert batch.tokens().sum(-1).tolist() == [4, 9, 6]
    assert batch.answers().sum(-1).tolist() == [3, 8, 5]
    for row, item in enumerate(items):
        assert batch.input_ids[row][batch.tokens()[row]].tolist() == item.input_ids.tolist()
        assert batch.experts[row][batch.tokens()[row]].tolist() == item.experts.tolist()
    assert not batch.experts[~batch.tokens()].any()


@pytest.mark.parametrize("limits", LIMITS)
def test_an_epoch_holds_every_token_once_and_the_next_is_another(limits):
    lengths = random_lengths(1, 60)
    batches = TraceDataModule(items_of(lengths), [], limits, seed=0).train_dataloader()
    first, second = list(batches), list(batches)
    for epoch in (first, second):
        assert len(epoch) == len(batches)
        assert sum(batch.lengths.sum().item() for batch in epoch) == sum(lengths)
    assert [batch.sample_ids for batch in first] != [batch.sample_ids for batch in second]


@pytest.mark.parametrize("processes", [2, 3, 7])
def test_processes_share_an_epoch_and_repeat_no_more_than_rounding_needs(monkeypatch, processes):
    items, shares = items_of(random_lengths(2, 70)), []
    for rank in range(processes):
        in_process(monkeypatch, rank, processes)
        shares.append([batch.sample_ids for batch in TrainBatches(items, LIMITS[0], seed=3)])
    assert len(set(map(len, shares))) == 1
    given = [names for share in shares for names in share]
    assert {name for names in given for name in names} == {item.sample_id for item in items}
    assert len(given) - len(set(given)) < processes


def test_fewer_batches_than_processes_reach_every_process(monkeypatch):
    for rank in range(4):
        in_process(monkeypatch, rank, 4)
        assert len(list(TrainBatches(items_of([3, 4]), LIMITS[0], seed=0))) == 1


@pytest.mark.parametrize("processes", [1, 2, 3, 50])
def test_held_out_samples_are_seen_once_by_one_process_and_none_waits(monkeypatch, processes):
    items, seen, counts = items_of(random_lengths(3, 60)), [], set()
    for rank in range(processes):
        in_process(monkeypatch, rank, processes)
        loader = HeldOutBatches(items, LIMITS[0])
        batches = list(loader)
        counts |= {len(loader), len(batches)}
        assert all(len(batch.input_ids) for batch in batches)  # a forward pass of each is possible
        seen += [name for batch in batches if batch.tokens().any() for name in batch.sample_ids]
    assert len(counts) == 1
    assert sorted(seen) == sorted(item.sample_id for item in items)


def test_nothing_held_out_is_no_batch():
    assert list(HeldOutBatches([], LIMITS[0])) == []


class Table(ReadsTokens, torch.nn.Module):
    """A predictor that knows the token only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(100, L * E)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (L, E))


def measure_in_process(rank: int, processes: int, folder: Path, lengths: list[int]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=processes)
    data = TraceDataModule(items_of(lengths), items_of(lengths), LIMITS[0], seed=0)
    found = {"train": [batch.sample_ids for batch in data.train_dataloader()], "overlaps": []}
    for seed in SEEDS:
        overlap = Overlap()
        for batch in data.val_dataloader():
            overlap.update(Table(seed), batch)
        found["overlaps"].append(overlap.compute().item())
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@torch.no_grad()
def overlap_by_sets(predictor: Table, items: list[SimpleNamespace]) -> float:
    """The mean over all answer positions and layers, one sample after the other, without padding."""
    shares = []
    for item in items:
        logits_TLE = predictor.logits(predictor.hidden(torch.from_numpy(item.input_ids)))
        for t, layer in np.ndindex(len(item.input_ids) - item.prompt_len, L):
            best = logits_TLE[item.prompt_len + t, layer].topk(K).indices.tolist()
            shares.append(len(set(best) & set(item.experts[item.prompt_len + t, layer].tolist())) / K)
    return sum(shares) / len(shares)


@pytest.mark.usefixtures("both_cores")
def test_two_processes_measure_what_one_would_and_share_the_samples(tmp_path):
    lengths = random_lengths(6, 35)
    assert len(HeldOutBatches(items_of(lengths), LIMITS[0])) % 2  # one process has a batch less
    arguments = (2, tmp_path, lengths)
    torch.multiprocessing.start_processes(measure_in_process, arguments, nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = [overlap_by_sets(Table(seed), items_of(lengths)) for seed in SEEDS]
    assert found[0]["overlaps"] == found[1]["overlaps"] == pytest.approx(expected)
    mine, theirs = ({name for names in share["train"] for name in names} for share in found)
    assert len(mine | theirs) == 35 and len(mine & theirs) <= max(map(len, found[0]["train"]))


class Recorder(lightning.LightningModule):
    """Notes the batches that it is given and trains nothing; after `last` of them, at `hook`, it saves and stops."""

    def __init__(self, path: str, last: int | None = None, hook: str = "") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.path, self.last, self.hook, self.seen = path, last, hook, []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: module.Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.sample_ids)
        return 0 * self.weight

    def validation_step(self, batch: module.Batch, batch_idx: int) -> None: ...

    def on_train_batch_end(self, *_: object) -> None:
        self._save("batch")

    def on_validation_end(self) -> None:
        self._save("validation")

    def on_train_epoch_end(self) -> None:
        self._save("epoch")

    def _save(self, hook: str) -> None:
        if (hook, len(self.seen)) == (self.hook, self.last):
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True


def seen_in_training(recorder: Recorder, items: list, ends: dict, resume: bool = False) -> list:
    data = TraceDataModule(items, items[:9], LIMITS[0], seed=5)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        val_check_interval=3,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **ends,
        **quiet,
    )
    trainer.fit(recorder, datamodule=data, ckpt_path=recorder.path if resume else None)
    return recorder.seen


@pytest.mark.parametrize("limited_by", ["max_epochs", "max_steps"])
@pytest.mark.parametrize(("after", "hook"), [(1, "batch"), (4, "batch"), (6, "validation"), (0, "batch"), (0, "epoch")])
def test_a_resumed_run_sees_the_batches_an_uninterrupted_one_would(tmp_path, after, hook, limited_by):
    items, path = items_of(random_lengths(4, 50)), str(tmp_path / "saved.ckpt")
    number = len(TrainBatches(items, LIMITS[0], seed=5))
    assert number > 6
    ends = {"max_epochs": 3} if limited_by == "max_epochs" else {"max_epochs": -1, "max_steps": 3 * number}
    whole = seen_in_training(Recorder(path), items, ends)
    assert len(whole) == 3 * number and len(set(whole)) > 2 * number
    for last in (after or number, number + (after or number)):
        begun = seen_in_training(Recorder(path, last, hook), items, ends)
        resumed = seen_in_training(Recorder(path), items, ends, resume=True)
        assert begun + resumed == whole
