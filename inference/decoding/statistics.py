"""What a decoding run measured: one record a step. `ecospec.inference.metrics` says what is reported of them.

Letters: B texts still being decoded, N nodes verified in a step (padding included), L MoE layers, K experts per token.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ecospec.inference.metrics.phases import PHASES
from ecospec.inference.tree import DraftTrees


class StepClock:
    """Seconds by phase of one step. On a GPU it records events, which cost no wait until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []
        self._began = self._ended = self._mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def stop(self) -> "StepClock":
        self._ended = self._mark()
        return self

    def total(self) -> float:
        """Seconds from the beginning to `stop`."""
        return self._between(self._began, self._ended)

    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        sums = {phase.name: 0.0 for phase in PHASES}
        for name, start, end in self._spans:
            sums[name] += self._between(start, end)
        return sums

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: object, end: object) -> float:
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000


@dataclass
class Step:
    """One decoding step of the texts still being decoded.

    `experts_BNLK` are the ids that the target's routers chose in the verification pass; of text b the first
    `verified[b]` nodes count.
    """

    emitted: list[int]  # tokens a text, the bonus token included, not cut at the end of the text
    verified: list[int]  # nodes a text in the pass, the root included
    kept: list[list[int]]  # nodes of each text's accepted path, root first
    experts_BNLK: Tensor
    rows: list[int] = field(default_factory=lambda: [0])  # which texts of the batch they were
    clock: StepClock | None = None  # None where the loop is not ours, and so it is with
    trees: DraftTrees | None = None  # what was verified
    measured: Mapping[str, object] = field(default_factory=dict)  # by the selector, by the keys of its metrics

    def active_by_layer(self) -> list[int]:
        """Unique experts that the pass touched, per MoE layer."""
        pairs = zip(self.experts_BNLK, self.verified, strict=True)
        experts_XLK = torch.cat([experts_NLK[:count] for experts_NLK, count in pairs])
        sorted_LM = experts_XLK.transpose(0, 1).flatten(1).sort(1).values
        real_L = (sorted_LM[:, 0] >= 0).long()  # -1: a weightless expert, which reads nothing
        return (real_L + (sorted_LM[:, 1:] != sorted_LM[:, :-1]).sum(1)).tolist()


@dataclass
class Run:
    """Statistics of one batch of generated texts (usually one)."""

    new_by_row: list[int] = field(default_factory=list)  # new tokens of each text
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last
    steps: list[Step] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return sum(self.new_by_row)

    @property
    def acceptance_length(self) -> float:
        """α: tokens per step and text, the bonus token included; 1.0 for plain decoding, 0.0 before the first step."""
        return _mean([emitted for step in self.steps for emitted in step.emitted])

    @property
    def active_experts(self) -> float:
        """𝓔: mean over steps of the unique experts per MoE layer."""
        return _mean([_mean(step.active_by_layer()) for step in self.steps])

    @property
    def tokens_per_second(self) -> float:
        """After prefill: the first token of each text is prefill's."""
        return (self.new_tokens - len(self.new_by_row)) / self.decode_seconds if self.decode_seconds else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
