"""Training batches from recorded traces: samples of similar length together, padded at the end, shared by processes.

Knows nothing about trace files or models. Its samples stay in memory as they are stored: L·K ids of a byte each (two
where E > 256) and four bytes of token id, 3.8 GB for 5 million tokens at L = 94, K = 8, in each process. Reading them
anew in another order would decode a whole row group of the file for every sample. Batches keep ids that narrow too.

Letters: B batch, T tokens of the longest sample, L MoE layers, K experts per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import lightning
import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence

from ecospec.data.traces import Trace

LENGTH_CLASS = 1.125  # samples whose lengths differ by less than this factor are mixed


class Batch(NamedTuple):
    """`input_ids` int64 [B, T] and `experts` [B, T, L, K], uint8 (int32 where E > 256), both padded with 0.

    `lengths` and `prompt_lens` int64 [B] say which positions are tokens, and from where they are answers;
    `sample_ids` name the B samples. `columns`: further values of every token, [B, T, ...] by name, where samples have
    such.
    """

    input_ids: Tensor
    experts: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    sample_ids: tuple[str, ...]
    columns: Mapping[str, Tensor] = MappingProxyType({})

    def tokens(self) -> Tensor:
        """Which positions are tokens, bool [B, T]."""
        return self._positions() < self.lengths[:, None]

    def answers(self) -> Tensor:
        """Which positions are tokens after the prompt, bool [B, T]."""
        return self.tokens() & (self._positions() >= self.prompt_lens[:, None])

    def on(self, device: torch.device) -> "Batch":
        """The batch with all tensors on `device`."""
        moved = (value.to(device) if isinstance(value, Tensor) else value for value in self)
        return Batch(*moved)._replace(columns={name: values.to(device) for name, values in self.columns.items()})

    def _positions(self) -> Tensor:
        return torch.arange(self.input_ids.shape[1], device=self.lengths.device)


@dataclass(frozen=True)
class BatchLimits:
    """What a batch of one process may hold: samples, and tokens with padding; a longer sample is a batch by itself."""

    samples: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.samples is None and self.tokens is None:
            raise ValueError("a batch needs a limit: of samples, of tokens, or of both")

    def allow(self, samples: int, longest: int) -> bool:
        """Whether so many samples, padded to the longest, fit."""
        return (self.samples is None or samples <= self.samples) and (
            self.tokens is None or samples * longest <= self.tokens
        )


def collate(items: Sequence[Trace]) -> Batch:
    """Pad at the end, where a causal model's other positions cannot see it: no attention mask is needed."""
    lengths = [len(item.input_ids) for item in items]
    input_ids = np.zeros((len(items), max(lengths)), np.int64)
    narrow = np.uint8 if items[0].experts.itemsize == 1 else np.int32
    experts = np.zeros((*input_ids.shape, *items[0].experts.shape[1:]), narrow)
    for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
        input_ids[row, :length] = item.input_ids
        experts[row, :length] = item.experts
    prompt_lens = torch.tensor([item.prompt_len for item in items])
    names = tuple(item.sample_id for item in items)
    columns = {
        name: pad_sequence([item.columns[name] for item in items], batch_first=True) for name in items[0].columns
    }
    known = (torch.from_numpy(input_ids), torch.from_numpy(experts), torch.tensor(lengths), prompt_lens, names)
    return Batch(*known, columns)


def group_by_length(
    lengths: Sequence[int], limits: BatchLimits, seed: int, epoch: int, processes: int = 1
) -> list[list[int]]:
    """Batches of sample indices, in an order that (seed, epoch) decide alone; their number is every epoch's.

    Each index occurs once. Consecutive `processes` batches, one for each process, are of similar length; where the
    number of batches is no multiple of it, at most `processes` - 1 batches are repeated, the shortest first.
    """
    generator = np.random.default_rng([seed, epoch])
    batches = _cut(np.asarray(lengths, np.int64), limits, generator)
    batches += [batches[i % len(batches)] for i in range(-len(batches) % processes)]
    rounds = generator.permutation(len(batches) // processes)
    return [batches[processes * first + process] for first in rounds for process in range(processes)]


def _cut(lengths_S: np.ndarray, limits: BatchLimits, generator: np.random.Generator) -> list[list[int]]:
    """Samples, mixed within classes of similar length and in ascending order of these, cut into batches.

    A sample counts as long as the longest of its class, so that no epoch needs more batches than another.
    """
    _, class_S = np.unique(np.floor(np.log(lengths_S) / np.log(LENGTH_CLASS)), return_inverse=True)
    longest_C = np.zeros(class_S.max(initial=-1) + 1, np.int64)
    np.maximum.at(longest_C, class_S, lengths_S)
    order = generator.permutation(len(lengths_S))
    batches: list[list[int]] = []
    for index in order[np.argsort(class_S[order], kind="stable")].tolist():
        if not batches or not limits.allow(len(batches[-1]) + 1, longest_C[class_S[index]]):
            batches.append([])
        batches[-1].append(index)
    return batches


class TrainBatches:
    """This process's batches of one epoch each time it is iterated; epochs differ in composition and order.

    An iteration goes on after the last batch that was given out, so that training resumes where it was saved.
    """

    def __init__(self, items: Sequence[Trace], limits: BatchLimits, seed: int) -> None:
        self.items, self.limits, self.seed = items, limits, seed
        self.lengths = [len(item.input_ids) for item in items]
        self.epoch = self.given = 0
        self.of_all_processes = len(group_by_length(self.lengths, limits, seed, epoch=0))

    def __len__(self) -> int:
        return -(-self.of_all_processes // rank_and_world()[1])

    def __iter__(self) -> Iterator[Batch]:
        if self.given == len(self):
            self.epoch, self.given = self.epoch + 1, 0
        rank, processes = rank_and_world()
        batches = group_by_length(self.lengths, self.limits, self.seed, self.epoch, processes)
        for indices in batches[rank::processes][self.given :]:
            self.given += 1
            yield collate([self.items[i] for i in indices])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class HeldOutBatches:
    """This process's share of all batches, each sample in one process only.

    All processes get equally many, so that none waits for another: the last ones may hold no token (`lengths` 0).
    """

    def __init__(self, items: Sequence[Trace], limits: BatchLimits) -> None:
        self.items = items
        self.batches = group_by_length([len(item.input_ids) for item in items], limits, seed=0, epoch=0)

    def __len__(self) -> int:
        return -(-len(self.batches) // rank_and_world()[1])

    def __iter__(self) -> Iterator[Batch]:
        rank, processes = rank_and_world()
        for number in range(rank, len(self) * processes, processes):
            batch = collate([self.items[i] for i in self.batches[number % len(self.batches)]])
            yield batch if number < len(self.batches) else batch._replace(lengths=torch.zeros_like(batch.lengths))


class TraceDataModule(lightning.LightningDataModule):
    """Lightning's view of the samples to train on (all positions of them, prompts too) and of those held out.

    The loaders share batches out among processes by themselves: the trainer needs `use_distributed_sampler=False`.
    Checkpoints hold the training loader's state here, too: of a loader's own state, which it saves as well, Lightning
    makes no use where an epoch had just ended.
    """

    def __init__(self, train: Sequence[Trace], held_out: Sequence[Trace], limits: BatchLimits, seed: int = 0) -> None:
        super().__init__()
        self.batches = TrainBatches(train, limits, seed)
        self.held_out, self.limits = held_out, limits

    def train_dataloader(self) -> TrainBatches:
        return self.batches

    def val_dataloader(self) -> HeldOutBatches:
        return HeldOutBatches(self.held_out, self.limits)

    def state_dict(self) -> dict[str, int]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.load_state_dict(state)


def rank_and_world() -> tuple[int, int]:
    """The number of this process and how many there are; known only once training has begun."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
