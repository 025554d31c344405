"""The predictors that cost nothing, which a trained one must beat: experts by frequency, and by token id.

Both are counts over the `train` samples, and both double as footprint sources of the decoder. Of samples of another
split they refuse to know anything.

Letters: T tokens, L MoE layers, E experts, K experts per token, V vocabulary, S token ids seen in training (and a
row of zeros for all others).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec.data.traces import Trace, TraceSet
from ecospec.errors import InputError
from ecospec.predictor.objective.metrics import top_experts


@dataclass(frozen=True)
class FrequencyPredictor:
    """The same experts for every token: `share_LE` is each expert's share of its layer's choices (sums to 1)."""

    share_LE: np.ndarray
    top_k: int

    def logits(self, input_ids_T: np.ndarray) -> Tensor:
        """log share of each expert, [T, L, E]."""
        return torch.from_numpy(np.log(self.share_LE)).expand(len(input_ids_T), -1, -1)

    def predict(self, input_ids_T: np.ndarray) -> np.ndarray:
        """Expert ids [T, L, K], ascending."""
        return top_experts(self.logits(input_ids_T), self.top_k).numpy()

    def fill(self, counts_TLE: np.ndarray) -> Tensor:
        """log shares [T, L, E] of counts to which one token's worth of choices is added."""
        smoothed_TLE = counts_TLE + self.top_k * self.share_LE
        return torch.from_numpy(np.log(smoothed_TLE / smoothed_TLE.sum(-1, keepdims=True)))


@dataclass(frozen=True)
class TokenPredictor:
    """The experts most often chosen for the same token id, in any context; frequency breaks ties and fills gaps.

    `counts_SLE` has a row for each seen id and zeros in row 0, where `row_V` sends the others: memory grows with the
    ids seen, not with the vocabulary.
    """

    row_V: np.ndarray
    counts_SLE: np.ndarray
    frequency: FrequencyPredictor

    def logits(self, input_ids_T: np.ndarray) -> Tensor:
        """log of counts to which frequency adds one token's worth of choices, [T, L, E].

        An expert's share is at most 1/K, so what is added never outweighs one count: it only breaks ties.
        """
        return self.frequency.fill(self.counts_SLE[self.row_V[input_ids_T]])

    def predict(self, input_ids_T: np.ndarray) -> np.ndarray:
        """Expert ids [T, L, K], ascending."""
        return top_experts(self.logits(input_ids_T), self.frequency.top_k).numpy()


@dataclass(frozen=True)
class LastStepPredictor:
    """The experts of the token before; frequency breaks ties and fills gaps, as for `TokenPredictor`."""

    frequency: FrequencyPredictor

    def known(self, experts_TLK: np.ndarray) -> np.ndarray:
        """bool [T, L, E]: the experts of the token before each; none before the first."""
        known_TLE = np.zeros((len(experts_TLK), *self.frequency.share_LE.shape), bool)
        np.put_along_axis(known_TLE[1:], experts_TLK[:-1].astype(np.int64), True, axis=-1)
        return known_TLE

    def logits(self, known_TLE: np.ndarray) -> Tensor:
        """log of what `known` says, to which frequency adds one token's worth of choices, [T, L, E]."""
        return self.frequency.fill(known_TLE)


def fit_frequency(traces: TraceSet) -> FrequencyPredictor:
    """Count the experts of each layer over the `train` samples. Raises InputError when there are none."""
    L, E, K = traces.num_layers, traces.num_experts, traces.top_k
    counts_LE, tokens = np.zeros(L * E, np.int64), 0
    for item in _training(traces):
        counts_LE += np.bincount(_flat_TP(item, E).ravel(), minlength=L * E)
        tokens += len(item.input_ids)
    share_LE = (counts_LE.reshape(L, E) + K / E) / (K * (tokens + 1))  # one even token on top: no share is zero
    return FrequencyPredictor(share_LE, K)


def fit_token(traces: TraceSet, vocab_size: int) -> TokenPredictor:
    """Count the experts of each token id and layer over the `train` samples.

    Raises InputError when there are none, or when a token id lies beyond `vocab_size`.
    """
    L, E = traces.num_layers, traces.num_experts
    row_V = _rows_of_seen_ids(traces, vocab_size)
    counts_SLE = np.zeros((row_V.max() + 1, L, E), np.int32)
    for item in _training(traces):
        first_T1 = row_V[item.input_ids, None] * (L * E)
        np.add.at(counts_SLE.reshape(-1), first_T1 + _flat_TP(item, E), 1)
    return TokenPredictor(row_V, counts_SLE, fit_frequency(traces))


def fit_tables(traces: TraceSet, vocab_size: int) -> dict[str, FrequencyPredictor | TokenPredictor]:
    """`frequency` and `token`, counted once. Raises InputError as `fit_token` does."""
    token = fit_token(traces, vocab_size)
    return {"frequency": token.frequency, "token": token}


def _rows_of_seen_ids(traces: TraceSet, vocab_size: int) -> np.ndarray:
    """[V]: 1, 2, … for the ids of the `train` samples in ascending order, 0 for those never seen."""
    seen_V = np.zeros(vocab_size, bool)
    for item in _training(traces):
        if item.input_ids.max() >= vocab_size:
            raise InputError(f"--traces: token id {item.input_ids.max()} lies beyond the target's {vocab_size} tokens")
        seen_V[item.input_ids] = True
    return np.where(seen_V, seen_V.cumsum(), 0)


def _training(traces: TraceSet) -> Iterator[Trace]:
    found = False
    for item in traces:
        if item.split == "train":
            found = True
            yield item
    if not found:
        raise InputError("--traces: it has no train samples to count; trace more samples")


def _flat_TP(item: Trace, num_experts: int) -> np.ndarray:
    """The chosen (layer, expert) pairs of each token as layer · E + expert, [T, L·K]."""
    T, L, _ = item.experts.shape
    return (item.experts.astype(np.int64) + num_experts * np.arange(L)[:, None]).reshape(T, -1)
