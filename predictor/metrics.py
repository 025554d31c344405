"""How well predicted experts match recorded ones: one meter for the predictor and for everything it must beat.

Overlap is |predicted ∩ true| / K averaged over tokens and MoE layers (EcoSpec B.1 calls it Top-K accuracy). Knows
no model: it is fed traces and logits.

Letters: T tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ecospec.configs.errors import InputError
from ecospec.data.traces import Trace, TraceSet
from ecospec.predictor.loss import excess_loss, layer_losses

LogitsOf = Callable[[np.ndarray], Tensor]  # token ids [T] → logits [T, L, E]


@dataclass
class Tally:
    """Sums over the tokens of one kind."""

    tokens: int = 0
    hits_L: np.ndarray | float = 0.0
    loss_L: np.ndarray | float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.tokens + other.tokens, self.hits_L + other.hits_L, self.loss_L + other.loss_L)


@dataclass
class OverlapMeter:
    """Accumulates samples; `metrics()` are the numbers of `metrics.json`."""

    top_k: int
    tallies: dict[tuple[str, str, str], Tally] = field(default_factory=dict)  # (split, dataset, prompt or answer)

    def add(self, item: Trace, logits_TLE: Tensor) -> None:
        experts_TLK = torch.from_numpy(item.experts.astype(np.int64)).to(logits_TLE.device)
        hits_TL = shared_experts(top_experts(logits_TLE, self.top_k), experts_TLK, logits_TLE.shape[-1])
        losses_TL = layer_losses(logits_TLE, experts_TLK)
        for part, where in (("prompt", slice(0, item.prompt_len)), ("answer", slice(item.prompt_len, None))):
            hits, losses = hits_TL[where], losses_TL[where]
            tally = Tally(len(hits), hits.sum(0).double().cpu().numpy(), losses.sum(0).double().cpu().numpy())
            key = (item.split, item.dataset, part)
            self.tallies[key] = self.tallies.get(key, Tally()) + tally

    def metrics(self) -> dict:
        """Headline numbers cover held-out samples from `prompt_len` on.

        Raises InputError when the samples of a split have no such position.
        """
        held_out, train = self._total(split="test", part="answer"), self._total(split="train", part="answer")
        datasets = sorted({dataset for split, dataset, _ in self.tallies if split == "test"})
        by_dataset = {name: self._total(split="test", part="answer", dataset=name) for name in datasets}
        return {
            "overlap": self._overlap(held_out, "test"),
            "overlap_all": self._overlap(self._total(split="test"), "test"),
            "overlap_train": self._overlap(train, "train"),
            "overlap_by_layer": (held_out.hits_L / held_out.tokens / self.top_k).tolist(),
            "overlap_by_dataset": {name: self._overlap(t, "test") for name, t in by_dataset.items() if t.tokens},
            "excess_loss": excess_loss(float(np.mean(held_out.loss_L) / held_out.tokens), self.top_k),
        }

    def _total(self, split: str, part: str | None = None, dataset: str | None = None) -> Tally:
        def matches(key: tuple[str, str, str]) -> bool:
            return all(wanted in (None, found) for wanted, found in zip((split, dataset, part), key, strict=True))

        return sum((tally for key, tally in self.tallies.items() if matches(key)), Tally())

    def _overlap(self, tally: Tally, split: str) -> float:
        if not tally.tokens:
            raise InputError(f"--traces: its {split} samples have no answer positions to measure; trace more samples")
        return float(np.mean(tally.hits_L) / tally.tokens / self.top_k)


def top_experts(logits: Tensor, top_k: int) -> Tensor:
    """The predicted experts (equation 4): [..., E] → ids [..., K], ascending; of equal logits the lower id wins."""
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return best.sort(dim=-1).values


def shared_experts(predicted: Tensor, true: Tensor, num_experts: int) -> Tensor:
    """How many ids two sets [..., K] share: [...]."""
    member = torch.zeros(*true.shape[:-1], num_experts, dtype=torch.bool, device=true.device).scatter_(-1, true, True)
    return member.gather(-1, predicted).sum(-1)


def measure(logits_of: LogitsOf, traces: TraceSet) -> dict:
    """The metrics of one predictor, given as a function, on all samples of both splits."""
    meter = OverlapMeter(traces.top_k)
    for item in traces:
        meter.add(item, logits_of(item.input_ids))
    return meter.metrics()
