"""The experts most often used for a token id.

Letters: T tokens, L MoE layers, E experts, V vocabulary, S token ids seen in training (and a row of zeros for all
others).
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ecospec.data.traces import Traces
from ecospec.errors import InputError
from ecospec.predictor.kinds.counting import ExpertTable, count_shares, pairs_TP, training_samples


@dataclass(frozen=True)
class TokenTable(ExpertTable):
    """The experts most often chosen for the same token id, in any context; shares break ties and fill gaps.

    `counts_SLE` has a row for each seen id and zeros in row 0, where `row_V` sends the others: memory grows with the
    ids seen, not with the vocabulary.
    """

    row_V: np.ndarray
    counts_SLE: np.ndarray

    def logits(self, input_ids_T: np.ndarray) -> Tensor:
        """log of the token's counts to which one token's worth of choices is added, [T, L, E]."""
        return self.shares.fill(self.counts_SLE[self.row_V[input_ids_T]])


def count_tokens(traces: Traces, vocab_size: int) -> TokenTable:
    """Count the experts of each token id and layer over the `train` samples.

    Raises InputError when there are none, or when a token id lies beyond `vocab_size`.
    """
    L, E = traces.num_layers, traces.num_experts
    row_V = _rows_of_seen_ids(traces, vocab_size)
    counts_SLE = np.zeros((row_V.max() + 1, L, E), np.int32)
    for item in training_samples(traces):
        first_T1 = row_V[item.input_ids, None] * (L * E)
        np.add.at(counts_SLE.reshape(-1), first_T1 + pairs_TP(item, E), 1)
    return TokenTable(count_shares(traces), row_V, counts_SLE)


def _rows_of_seen_ids(traces: Traces, vocab_size: int) -> np.ndarray:
    """[V]: 1, 2, … for the ids of the `train` samples in ascending order, 0 for those never seen."""
    seen_V = np.zeros(vocab_size, bool)
    for item in training_samples(traces):
        if item.input_ids.max() >= vocab_size:
            raise InputError(f"--traces: token id {item.input_ids.max()} lies beyond the target's {vocab_size} tokens")
        seen_V[item.input_ids] = True
    return np.where(seen_V, seen_V.cumsum(), 0)
