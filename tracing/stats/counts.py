"""Routing in numbers: expert load, the union of consecutive tokens, temporal reuse, each beside what chance gives.

Unions and reuse are counted over windows of 1 to WIDTH consecutive tokens of one sample. Of a long trace a seeded
choice of windows is enough: each sample's windows fall into stretches, of which one is drawn, so that every window has
the same chance of being counted. Loads always count every token. Knows nothing of files.

Letters: T tokens, L MoE layers, E experts, K experts per token, X 64-bit words of a bit set, W window lengths 1..WIDTH,
S samples, C columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ecospec.bootstrap import estimate, ratio, resampled_sums

WIDTH = 8
WORD = 64
CHUNK_CELLS = 2**22  # ids or experts worked on at once: 4 MiB of bytes, so that they stay in the cache


def chance_experts(tokens: float, num_experts: int, top_k: int) -> float:
    """Unique experts that `tokens` tokens touch in one layer when each draws its K of E uniformly and alone.

    The same under group-limited routing (K experts from a few of several equal groups, as DeepSeek-V3 draws them): each
    expert is still among a token's K with probability K/E, and tokens are independent; only the spread differs.
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)


def chance_reuse(tokens: int, num_experts: int, top_k: int) -> float:
    """Share of a token's experts that `tokens` independent uniform tokens before it have used."""
    return chance_experts(tokens, num_experts, top_k) / num_experts


def load_experts(counts_LE: np.ndarray, tokens: int, top_k: int) -> float:
    """Unique experts per layer of `tokens` independent tokens that use experts as often as `counts_LE` says.

    What remains between this and the measured union is locality in time, not uneven load.
    """
    return float((1.0 - (1.0 - _use(counts_LE, top_k)) ** tokens).sum(-1).mean())


def load_reuse(counts_LE: np.ndarray, tokens: int, top_k: int) -> float:
    """Share of a token's experts that `tokens` such tokens before it have used."""
    use_LE = _use(counts_LE, top_k)
    return float((use_LE * (1.0 - (1.0 - use_LE) ** tokens)).sum(-1).mean() / top_k)


def _use(counts_LE: np.ndarray, top_k: int) -> np.ndarray:
    """Probability that a token uses an expert."""
    return top_k * counts_LE / counts_LE.sum(-1, keepdims=True)


def count_loads(experts_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [L, E]: how many tokens use each expert."""
    T, L, K = experts_TLK.shape
    first_id_L1 = (np.arange(L, dtype=np.min_scalar_type(L * num_experts)) * num_experts)[:, None]
    counts = np.zeros(L * num_experts, np.int64)
    step = max(1, CHUNK_CELLS // (8 * L * K))
    for start in range(0, T, step):
        ids = experts_TLK[start : start + step] + first_id_L1
        counts += np.bincount(ids.reshape(-1), minlength=len(counts))
    return counts.reshape(L, num_experts)


def bit_sets(experts_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """uint64 [X, T, L]: the experts of each token and layer as a set of bits; words first, as numpy sums those fast."""
    T, L, K = experts_TLK.shape
    width = -(-num_experts // WORD) * WORD
    used = np.zeros(T * L * width, np.uint8)
    used[(experts_TLK.reshape(-1, K) + np.arange(0, T * L * width, width)[:, None]).reshape(-1)] = 1
    words = np.packbits(used).view(np.uint64).reshape(T, L, width // WORD)
    return np.ascontiguousarray(np.moveaxis(words, -1, 0))


def set_sizes(sets_XTL: np.ndarray) -> np.ndarray:
    """uint16 [T, L]: how many experts each set holds."""
    return np.bitwise_count(sets_XTL).sum(0, dtype=np.uint16)


@dataclass(frozen=True)
class WindowSums:
    """Sums over windows: `unions_WL` unique experts, `windows_W` how many windows there are of each length, and
    `reused_W`, the experts that the last token of a window shares with the tokens before it (0 at length 1)."""

    unions_WL: np.ndarray
    windows_W: np.ndarray
    reused_W: np.ndarray


def window_sums(experts_TLK: np.ndarray, num_experts: int, starts: int | None = None) -> WindowSums:
    """Over the windows that begin at the first `starts` tokens (all that fit by default) and end within T."""
    T, L, K = experts_TLK.shape
    sets_XTL = union_XTL = bit_sets(experts_TLK, num_experts)
    sums = WindowSums(np.zeros((WIDTH, L), np.int64), np.zeros(WIDTH, np.int64), np.zeros(WIDTH, np.int64))
    shorter = 0
    for w in range(min(WIDTH, T)):
        if w:
            union_XTL = union_XTL[:, :-1] | sets_XTL[:, w:]
        begun = T - w if starts is None else starts
        sizes_TL = set_sizes(union_XTL[:, :begun])
        sums.unions_WL[w], sums.windows_W[w] = sizes_TL.sum(0, dtype=np.int64), begun
        if w:
            sums.reused_W[w] = shorter[:begun].sum(dtype=np.int64) + K * L * begun - sums.unions_WL[w].sum()
        shorter = sizes_TL
    return sums


def pieces(length: int, stretches: int, chosen: int, longest: int) -> Iterator[tuple[int, int, int | None]]:
    """(first token, end, starts) of the pieces to give to `window_sums` so that each chosen window is counted once.

    The places where WIDTH tokens can begin are cut into `stretches` equal parts; the windows that begin in part
    `chosen` are counted, in pieces of `longest` starts at most. Shorter windows at the very end go with the last part.
    """
    places = max(length - WIDTH + 1, 0)
    first, last = places * chosen // stretches, places * (chosen + 1) // stretches
    for start in range(first, last, longest):
        stop = min(start + longest, last)
        yield start, stop + WIDTH - 1, stop - start
    if chosen == stretches - 1:
        yield places, length, None


@dataclass
class Tally:
    """Whole numbers summed over the samples of one data set; the rows keep apart what intervals need.

    `rows` has for each sample its unions (summed over layers), windows and reused experts by window length.
    """

    counts_LE: np.ndarray
    unions_WL: np.ndarray
    top_k: int
    tokens: int = 0
    rows: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def empty(cls, num_layers: int, num_experts: int, top_k: int) -> "Tally":
        counts_LE = np.zeros((num_layers, num_experts), np.int64)
        return cls(counts_LE, np.zeros((WIDTH, num_layers), np.int64), top_k)

    def add(self, experts_TLK: np.ndarray, stretches: int = 1, chosen: int = 0) -> None:
        """Count one sample: its loads in full, its windows in stretch `chosen` of `stretches`."""
        (T, L, _), E = experts_TLK.shape, self.counts_LE.shape[1]
        self.counts_LE += count_loads(experts_TLK, E)
        self.tokens += T
        row = np.zeros((3, WIDTH), np.int64)
        for first, end, starts in pieces(T, stretches, chosen, max(1, CHUNK_CELLS // (L * E))):
            sums = window_sums(experts_TLK[first:end], E, starts)
            self.unions_WL += sums.unions_WL
            row += np.stack([sums.unions_WL.sum(1), sums.windows_W, sums.reused_W])
        self.rows.append(row)

    @property
    def windows_W(self) -> np.ndarray:
        return sum((row[1] for row in self.rows), np.zeros(WIDTH, np.int64))


def pooled(tallies: Sequence[Tally]) -> Tally:
    """All samples of all data sets; needs one tally at least."""
    return Tally(
        counts_LE=sum(tally.counts_LE for tally in tallies),
        unions_WL=sum(tally.unions_WL for tally in tallies),
        top_k=tallies[0].top_k,
        tokens=sum(tally.tokens for tally in tallies),
        rows=[row for tally in tallies for row in tally.rows],
    )


def summarise(tally: Tally) -> dict:
    """The statistics of one tally as they stand in `stats.json`."""
    L, E = tally.counts_LE.shape
    unions, windows, reused = np.stack(tally.rows).transpose(1, 0, 2)  # each [S, W]
    by_layer, windows_W = load_by_layer(tally.counts_LE), windows.sum(0)
    return {
        "samples": len(tally.rows),
        "tokens": tally.tokens,
        **{key: float(np.mean(values)) for key, values in by_layer.items()},
        "by_layer": by_layer,
        "union": [
            {
                "tokens": w,
                "windows": int(windows_W[w - 1]),
                "mean": mean,
                "interval": interval,
                "chance": chance_experts(w, E, tally.top_k),
                "chance_of_loads": load_experts(tally.counts_LE, w, tally.top_k),
                "by_layer": _shares(tally.unions_WL[w - 1], windows_W[w - 1]),
            }
            for w, (mean, interval) in enumerate(ratios(unions / L, windows), 1)
        ],
        "reuse": [
            {
                "previous": w,
                "mean": mean,
                "interval": interval,
                "chance": chance_reuse(w, E, tally.top_k),
                "chance_of_loads": load_reuse(tally.counts_LE, w, tally.top_k),
            }
            for w, (mean, interval) in enumerate(ratios(reused[:, 1:] / (L * tally.top_k), windows[:, 1:]), 1)
        ],
    }


def load_by_layer(counts_LE: np.ndarray) -> dict[str, list[float]]:
    """For each of L layers: entropy of the load in bits and as a share of log2 E, experts that were used at all,
    the fewest experts that carry half of the load, and the largest load over the mean one."""
    entropy_L = entropy_bits(counts_LE)
    return {
        "entropy_bits": entropy_L.tolist(),
        "entropy_share": (entropy_L / np.log2(counts_LE.shape[1])).tolist(),
        "experts_used": (counts_LE > 0).sum(-1).tolist(),
        "experts_for_half": experts_for_half(counts_LE).tolist(),
        "max_over_mean": (counts_LE.max(-1) / counts_LE.mean(-1)).tolist(),
    }


def entropy_bits(counts_LE: np.ndarray) -> np.ndarray:
    """[L], between 0 (one expert takes all) and log2 E (even load)."""
    share_LE = counts_LE / counts_LE.sum(-1, keepdims=True)
    return -(share_LE * np.log2(np.where(share_LE > 0, share_LE, 1.0))).sum(-1) + 0.0


def experts_for_half(counts_LE: np.ndarray) -> np.ndarray:
    """[L]: the fewest experts that together carry half of a layer's load."""
    carried_LE = np.sort(counts_LE, -1)[:, ::-1].cumsum(-1)
    return (2 * carried_LE < counts_LE.sum(-1, keepdims=True)).sum(-1) + 1


def ratios(sums_SC: np.ndarray, counts_SC: np.ndarray) -> list[tuple[float | None, list[float] | None]]:
    """For each column, its sum over its count with a 95 % interval by bootstrap over the S samples (seeded).

    None for a column that counts nothing, no interval for one that counts in fewer than two samples.
    """
    both_SX = np.hstack([sums_SC, counts_SC]).astype(float)
    values_RC = ratio(*np.hsplit(resampled_sums(both_SX), 2))
    several_C = np.count_nonzero(counts_SC, axis=0) > 1
    estimates = [estimate(values_R) for values_R in values_RC.T]
    return [(value, ends if several else None) for (value, ends), several in zip(estimates, several_C, strict=True)]


def _shares(sums_L: np.ndarray, count: int) -> list[float] | None:
    return (sums_L / count).tolist() if count else None
