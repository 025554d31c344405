"""Estimates with 95 % intervals by bootstrap over samples, such as prompts; the draws are the same everywhere.

Letters: S samples, C columns, R = 1 + RESAMPLES sets of samples, of which the first has each sample once.
"""

import numpy as np

RESAMPLES = 1000
CHUNK_DRAWS = 2**20  # at once: a trace has too many samples for all of them


def resampled_sums(values_SC: np.ndarray) -> np.ndarray:
    """float64 [R, C]: the columns summed over all samples, then over as many drawn with replacement."""
    generator, (S, C) = np.random.default_rng(0), values_SC.shape
    sums_RC, chunk = np.empty((1 + RESAMPLES, C)), max(1, CHUNK_DRAWS // max(S, 1))
    sums_RC[0] = values_SC.sum(0)
    for start in range(1, len(sums_RC), chunk):
        rows = min(chunk, len(sums_RC) - start)
        drawn = generator.integers(S, size=(rows, S)) + S * np.arange(rows)[:, None]
        times_RS = np.bincount(drawn.ravel(), minlength=rows * S).reshape(rows, S)
        sums_RC[start : start + rows] = times_RS.astype(float) @ values_SC
    return sums_RC


def ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Elementwise, NaN where a count is not positive."""
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=counts > 0)


def estimate(values_R: np.ndarray) -> tuple[float | None, list[float] | None]:
    """The first value, and the ends of the middle 95 % of the others; None for NaN, which is left out."""
    first, others_R = values_R[0], values_R[1:][~np.isnan(values_R[1:])]
    ends = np.quantile(others_R, [0.025, 0.975]).tolist() if len(others_R) else None
    return None if np.isnan(first) else float(first), ends
