"""Training batches from recorded traces: samples of similar length together, padded at the end.

Knows nothing about trace files or models. Its samples stay in memory (L·K ids a token, a byte each as a rule), since
a shuffled epoch would otherwise decode a whole row group of the file for every sample.

Letters: B batch, T tokens of the longest sample, L MoE layers, K experts per token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import lightning
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ecospec.data.traces import Trace
from ecospec.predictor.loss import PADDING

LENGTH_BUCKET = 16  # batches whose samples are sorted by length together; the larger, the less padding and randomness


class Batch(NamedTuple):
    """`input_ids` int64 [B, T], padded with 0; `experts` int64 [B, T, L, K], padded with -1; `prompt_lens` [B]."""

    input_ids: Tensor
    experts: Tensor
    prompt_lens: Tensor


def collate(items: Sequence[Trace]) -> Batch:
    """Pad at the end, where a causal model's other positions cannot see it: no attention mask is needed."""
    B, T = len(items), max(len(item.input_ids) for item in items)
    input_ids = torch.zeros(B, T, dtype=torch.int64)
    experts = torch.full((B, T, *items[0].experts.shape[1:]), PADDING, dtype=torch.int64)
    for row, item in enumerate(items):
        length = len(item.input_ids)
        input_ids[row, :length] = torch.from_numpy(item.input_ids.astype(np.int64))
        experts[row, :length] = torch.from_numpy(item.experts.astype(np.int64))
    return Batch(input_ids, experts, torch.tensor([item.prompt_len for item in items]))


def group_by_length(lengths: Sequence[int], limits: "BatchLimits | int", seed: int, epoch: int) -> list[list[int]]:
    """Batches of sample indices, each index once, in an order that (seed, epoch) decide alone.

    A batch of B samples holds B · longest <= tokens_per_batch tokens, unless one sample alone is longer.
    """
    limits = BatchLimits(tokens=limits) if isinstance(limits, int) else limits
    tokens_per_batch, samples = limits.tokens, limits.samples or len(lengths)
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    stretch = max(1, round(LENGTH_BUCKET * tokens_per_batch / max(1.0, np.mean(lengths))))
    batches: list[list[int]] = []
    for start in range(0, len(order), stretch):
        batch: list[int] = []
        for index in sorted(order[start : start + stretch].tolist(), key=lambda i: lengths[i]):
            if batch and (len(batch) == samples or (len(batch) + 1) * lengths[index] > tokens_per_batch):
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in generator.permutation(len(batches))]


@dataclass(frozen=True)
class BatchLimits:
    """Most samples and most tokens (padding included) of one batch; at least one of them is given."""

    samples: int | None = None
    tokens: int | None = None


class TraceBatches:
    """One epoch of batches each time it is iterated, this process's share of them; epochs differ in order only."""

    def __init__(self, items: Sequence[Trace], limits: BatchLimits, seed: int) -> None:
        self.items, self.limits, self.seed = items, limits, seed
        self.lengths = [len(item.input_ids) for item in items]
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[Batch]:
        groups = group_by_length(self.lengths, self.limits, self.seed, self.epoch)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for indices in groups[rank : len(groups) // world * world : world][self.given :]:
            self.given += 1
            yield collate([self.items[i] for i in indices])
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "batches": self.given}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.given = state["epoch"], state["batches"]


class TraceDataModule(lightning.LightningDataModule):
    """Lightning's view of the samples to train on (all positions of them, prompts too) and of those held out."""

    def __init__(self, train: Sequence[Trace], held_out: Sequence[Trace], limits: BatchLimits, seed: int = 0) -> None:
        super().__init__()
        self.train, self.held_out, self.limits, self.seed = train, held_out, limits, seed

    def train_dataloader(self) -> TraceBatches:
        return TraceBatches(self.train, self.limits, self.seed)

    def val_dataloader(self) -> Iterable[Batch]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        items = self.held_out[rank::world]
        groups = group_by_length([len(item.input_ids) for item in items], self.limits, self.seed, 0) if items else []
        return (collate([items[i] for i in indices]) for indices in groups)
