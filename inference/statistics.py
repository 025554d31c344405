"""What a decoding run measured: one record a step, and the means that `results.json` reports.

Letters: N nodes verified in a step, L MoE layers, E experts, K experts per token.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

PHASES = ("draft", "predict", "select", "verify", "accept")


@dataclass
class Step:
    """One decoding step. `experts_NLK` are the ids that the target's routers chose in the verification pass."""

    emitted: int  # tokens, the bonus token included, not cut at the end of the text
    verified: int  # nodes in the pass, the root included
    experts_NLK: Tensor
    seconds: dict[str, float] | None = None  # by phase; None where the loop is not ours
    total: float | None = None  # seconds

    def active_by_layer(self) -> list[int]:
        """Unique experts that the pass touched, per MoE layer."""
        sorted_LM = self.experts_NLK.transpose(0, 1).flatten(1).sort(1).values
        return (1 + (sorted_LM[:, 1:] != sorted_LM[:, :-1]).sum(1)).tolist()


@dataclass
class Run:
    """Statistics of one generated text."""

    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last
    steps: list[Step] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """α: tokens per step, the bonus token included; 1.0 for plain decoding, 0.0 before the first step."""
        return _mean([step.emitted for step in self.steps])

    @property
    def active_experts(self) -> float:
        """𝓔: mean over steps of the unique experts per MoE layer."""
        return _mean([_mean(step.active_by_layer()) for step in self.steps])

    @property
    def tokens_per_second(self) -> float:
        """After prefill: the first token is prefill's."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class StepClock:
    """Seconds by phase of one step; waits for the GPU at each boundary where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.began = self.now()

    def now(self) -> float:
        if self.synchronize:
            self.synchronize()
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[name] += self.now() - start

    def total(self) -> float:
        return self.now() - self.began


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
