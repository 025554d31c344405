"""Re-trace agreement: how far two traces of the same text name the same experts.

Another engine, data type or quantisation routes some tokens otherwise. A predictor that is fitted on one trace and
judged on the other cannot do better than the two traces agree: their overlap is its ceiling. Knows nothing of files.

Letters: T tokens, L MoE layers, E experts, K experts per token, S samples.
"""

from collections.abc import Sequence

import numpy as np

from ecospec.tracing.stats.counts import CHUNK_CELLS, bit_sets, ratios, set_sizes

MEASURES = ("overlap", "overlap_all", "same_sets", "changed_tokens")


def shared_choices(ours_TLK: np.ndarray, theirs_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """uint16 [T, L]: how many of a token's K experts both traces name."""
    T, L, _ = ours_TLK.shape
    shared_TL = np.empty((T, L), np.uint16)
    step = max(1, CHUNK_CELLS // (L * num_experts))
    for start in range(0, T, step):
        chosen = slice(start, start + step)
        both_XTL = bit_sets(ours_TLK[chosen], num_experts) & bit_sets(theirs_TLK[chosen], num_experts)
        shared_TL[chosen] = set_sizes(both_XTL)
    return shared_TL


class AgreementTally:
    """Sums over the samples of one data set, for `MEASURES` each a numerator and a denominator."""

    def __init__(self) -> None:
        self.tokens = 0
        self.shared_L: np.ndarray | int = 0
        self.sums: list[tuple[int, ...]] = []
        self.counts: list[tuple[int, ...]] = []

    def add(self, shared_TL: np.ndarray, top_k: int, prompt_len: int) -> None:
        """Count one sample, given what `shared_choices` found for it."""
        T, L = shared_TL.shape
        same_TL, answer = shared_TL == top_k, T - prompt_len
        self.tokens += T
        self.shared_L = self.shared_L + shared_TL.sum(0, dtype=np.int64)
        changed = T - int(same_TL.all(-1).sum())
        self.sums.append((int(shared_TL[prompt_len:].sum()), int(shared_TL.sum()), int(same_TL.sum()), changed))
        self.counts.append((answer * L * top_k, T * L * top_k, T * L, T))


def summarise_agreement(tallies: Sequence[AgreementTally], top_k: int) -> dict:
    """Agreement pooled over `tallies`: `overlap`, the share of choices that both traces name, over positions from
    `prompt_len` on as a predictor's headline is, `overlap_all` over all; `same_sets`, the share of tokens' layers with
    all K equal; `changed_tokens`, the share of tokens with a difference in any layer; `by_layer`, overlap_all of each.
    """
    sums_SC = np.array([row for tally in tallies for row in tally.sums])
    counts_SC = np.array([row for tally in tallies for row in tally.counts])
    tokens = sum(tally.tokens for tally in tallies)
    shared_L = sum(tally.shared_L for tally in tallies)
    found = zip(MEASURES, ratios(sums_SC, counts_SC), strict=True)
    return {
        "samples": len(sums_SC),
        "tokens": tokens,
        **{name: {"mean": mean, "interval": interval} for name, (mean, interval) in found},
        "by_layer": (shared_L / (tokens * top_k)).tolist(),
    }
