"""How well predicted experts match recorded ones: one meter for the predictor and for everything it must beat.

Overlap is |predicted ∩ true| / K averaged over tokens and MoE layers (EcoSpec B.1 calls it Top-K accuracy). Knows
no model: it is fed traces and logits, a stretch of a sample's tokens at a time.

Letters: T tokens (t of one stretch), L MoE layers, E experts, K experts per token, S set sizes, C calibration bins.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ecospec.data.traces import Trace, Traces
from ecospec.errors import InputError
from ecospec.predictor.objective.loss import excess_loss, layer_losses

# A sample → for each pass over its tokens (one, as a rule) the logits [t, L, E] of its consecutive stretches.
PassesOf = Callable[[Trace], Iterable[Iterable[Tensor]]]
EXTRA = (0, 2, 4, 8)  # experts beyond K in the sets whose recall is measured
BINS = 10  # of equal width, for calibration


@dataclass(frozen=True)
class PredictorNumbers:
    """What one predictor is worth; headline numbers cover held-out samples from `prompt_len` on.

    `overlap_all` counts prompts, too, `overlap_train` is that of answers trained on. `recall_at` is the share of the
    true experts among the 8, 10, … most probable (K and a few more). `calibration` takes min(1, K·p) as the predicted
    probability that an expert is among the true K: `bins` of equal width have its mean, the share of those experts that
    were, and their number; `error` is the mean distance of the two, weighted by that number (expected calibration
    error). `seconds_per_step`: the median time to predict one step's draft tree, where it was measured.
    """

    overlap: float
    overlap_all: float
    overlap_train: float
    overlap_by_layer: list[float]
    overlap_by_dataset: dict[str, float]
    recall_at: dict[str, float]
    excess_loss: float
    calibration: dict
    seconds_per_step: float | None = None


@dataclass
class TokenTally:
    """Sums over the tokens of one kind: `hits_LS` true experts among the so many most probable, `loss_L` nats.

    Of the (token, layer, expert) triples in each of C bins `bins_3C` has the number, the sum of the predicted
    probability that the expert is chosen, and how often it was.
    """

    tokens: int = 0
    hits_LS: np.ndarray | float = 0.0
    loss_L: np.ndarray | float = 0.0
    bins_3C: np.ndarray | float = 0.0

    def __add__(self, other: "TokenTally") -> "TokenTally":
        return TokenTally(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )


@dataclass
class OverlapMeter:
    """Accumulates samples; `numbers()` are those of `metrics.json`."""

    top_k: int
    num_experts: int
    tallies: dict[tuple[str, str, str], TokenTally] = field(default_factory=dict)  # (split, dataset, prompt or answer)

    @property
    def sizes_S(self) -> list[int]:
        """Sizes of the predicted sets, K first."""
        return sorted({min(self.top_k + extra, self.num_experts) for extra in EXTRA})

    def add(self, item: Trace, stretches: Iterable[Tensor]) -> None:
        """Count a sample, given logits [t, L, E] of its consecutive stretches."""
        begin = 0
        for logits_tLE in stretches:
            end = begin + len(logits_tLE)
            experts_tLK = torch.from_numpy(item.experts[begin:end].astype(np.int64)).to(logits_tLE.device)
            answer = max(item.prompt_len - begin, 0)
            for part, where in (("prompt", slice(0, answer)), ("answer", slice(answer, None))):
                key = (item.split, item.dataset, part)
                headline = (item.split, part) == ("test", "answer")
                found = tally(logits_tLE[where], experts_tLK[where], self.sizes_S, headline)
                self.tallies[key] = self.tallies.get(key, TokenTally()) + found
            begin = end

    def numbers(self) -> PredictorNumbers:
        """All but the time. Raises InputError when the samples of a split have no position after their prompt."""
        held_out, train = self._total(split="test", part="answer"), self._total(split="train", part="answer")
        datasets = sorted({dataset for split, dataset, _ in self.tallies if split == "test"})
        by_dataset = {name: self._total(split="test", part="answer", dataset=name) for name in datasets}
        return PredictorNumbers(
            overlap=self._overlap(held_out, "test"),
            overlap_all=self._overlap(self._total(split="test"), "test"),
            overlap_train=self._overlap(train, "train"),
            overlap_by_layer=self._recall_LS(held_out)[:, 0].tolist(),
            overlap_by_dataset={name: self._overlap(t, "test") for name, t in by_dataset.items() if t.tokens},
            recall_at=dict(zip(map(str, self.sizes_S), self._recall_LS(held_out).mean(0).tolist(), strict=True)),
            excess_loss=excess_loss(float(np.mean(held_out.loss_L) / held_out.tokens), self.top_k),
            calibration=calibration(held_out.bins_3C),
        )

    def _total(self, split: str, part: str | None = None, dataset: str | None = None) -> TokenTally:
        def matches(key: tuple[str, str, str]) -> bool:
            return all(wanted in (None, found) for wanted, found in zip((split, dataset, part), key, strict=True))

        return sum((tally for key, tally in self.tallies.items() if matches(key)), TokenTally())

    def _overlap(self, tally: TokenTally, split: str) -> float:
        if not tally.tokens:
            raise InputError(f"--traces: its {split} samples have no answer positions to measure; trace more samples")
        return float(self._recall_LS(tally)[:, 0].mean())

    def _recall_LS(self, tally: TokenTally) -> np.ndarray:
        return tally.hits_LS / tally.tokens / self.top_k


def tally(logits_TLE: Tensor, experts_TLK: Tensor, sizes_S: list[int], whole: bool) -> TokenTally:
    """Count some tokens; `experts_TLK` int64. Loss and bins, which take longest, only of what is `whole`."""
    ranks_TLK = ranks(logits_TLE, experts_TLK)
    hits_LS = torch.stack([(ranks_TLK < size).sum((0, 2)) for size in sizes_S], -1).double()
    if not whole:
        return TokenTally(len(logits_TLE), hits_LS.cpu().numpy())
    loss_L = layer_losses(logits_TLE, experts_TLK).sum(0).double()
    bins_3C = calibration_bins(logits_TLE, experts_TLK)
    return TokenTally(len(logits_TLE), *(sums.cpu().numpy() for sums in (hits_LS, loss_L, bins_3C)))


def ranks(logits: Tensor, experts: Tensor) -> Tensor:
    """How many experts are more probable than each true one: [..., E], ids [..., K] → [..., K]; ties as `top_experts`.

    An expert is among the best n when its rank is below n.
    """
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places).gather(-1, experts)


def calibration_bins(logits_TLE: Tensor, experts_TLK: Tensor) -> Tensor:
    """`TokenTally.bins_3C` of some tokens, float64."""
    predicted = (experts_TLK.shape[-1] * logits_TLE.softmax(-1)).clamp(max=1).flatten()
    chosen = torch.zeros_like(logits_TLE).scatter_(-1, experts_TLK, 1).flatten()
    bin_of = (predicted * BINS).long().clamp(max=BINS - 1)
    sums = (None, predicted.double(), chosen.double())
    return torch.stack([torch.bincount(bin_of, weights, BINS).double() for weights in sums])


def calibration(bins_3C: np.ndarray) -> dict:
    """The expected calibration error of summed bins, and those that are not empty."""
    number_C, predicted_C, chosen_C = bins_3C[:, bins_3C[0] > 0]
    bins = {"predicted": predicted_C / number_C, "observed": chosen_C / number_C, "number": number_C.astype(int)}
    error = float(np.abs(predicted_C - chosen_C).sum() / number_C.sum())
    return {"error": error, "bins": {name: values.tolist() for name, values in bins.items()}}


def top_experts(logits: Tensor, top_k: int) -> Tensor:
    """The predicted experts (equation 4): [..., E] → ids [..., K], ascending; of equal logits the lower id wins."""
    best = logits.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return best.sort(dim=-1).values


def shared_experts(predicted: Tensor, true: Tensor, num_experts: int) -> Tensor:
    """How many ids two sets [..., K] share: [...]."""
    member = torch.zeros(*true.shape[:-1], num_experts, dtype=torch.bool, device=true.device).scatter_(-1, true, True)
    return member.gather(-1, predicted).sum(-1)


def measure(passes_of: PassesOf, traces: Traces) -> PredictorNumbers:
    """The numbers of one predictor, given as a function, on all samples of both splits."""
    meter = OverlapMeter(traces.top_k, traces.num_experts)
    for item in traces:
        for stretches in passes_of(item):
            meter.add(item, stretches)
    return meter.numbers()
