"""Training batches from recorded traces: samples of similar length together, padded at the end.

Knows nothing about trace files or models. Its samples stay in memory (L·K ids a token, a byte each as a rule), since
a shuffled epoch would otherwise decode a whole row group of the file for every sample.

Letters: B batch, T tokens of the longest sample, L MoE layers, K experts per token.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import lightning
import numpy as np
import torch
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


def group_by_length(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of sample indices, each index once, in an order that (seed, epoch) decide alone.

    A batch of B samples holds B · longest <= tokens_per_batch tokens, unless one sample alone is longer.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    stretch = max(1, round(LENGTH_BUCKET * tokens_per_batch / max(1.0, np.mean(lengths))))
    batches: list[list[int]] = []
    for start in range(0, len(order), stretch):
        batch: list[int] = []
        for index in sorted(order[start : start + stretch].tolist(), key=lambda i: lengths[i]):
            if batch and (len(batch) + 1) * lengths[index] > tokens_per_batch:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
    return [batches[i] for i in generator.permutation(len(batches))]


class TraceBatches:
    """One epoch of batches each time it is iterated; epochs differ in order only."""

    def __init__(self, items: Sequence[Trace], tokens_per_batch: int, seed: int) -> None:
        self.items, self.tokens_per_batch, self.seed = items, tokens_per_batch, seed
        self.lengths = [len(item.input_ids) for item in items]
        self.epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        batches = group_by_length(self.lengths, self.tokens_per_batch, self.seed, self.epoch)
        self.epoch += 1
        for indices in batches:
            yield collate([self.items[i] for i in indices])


class TraceDataModule(lightning.LightningDataModule):
    """Lightning's view of the samples to train on (all positions of them, prompts too)."""

    def __init__(self, items: Sequence[Trace], tokens_per_batch: int, seed: int = 0) -> None:
        super().__init__()
        self.items, self.tokens_per_batch, self.seed = items, tokens_per_batch, seed

    def train_dataloader(self) -> TraceBatches:
        return TraceBatches(self.items, self.tokens_per_batch, self.seed)
