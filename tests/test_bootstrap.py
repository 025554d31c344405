"""Laws of the bootstrap: its draws are those of one generator, whatever is drawn at once; NaN is left out."""

import numpy as np
import pytest

from ecospec import bootstrap
from ecospec.bootstrap import estimate, ratio, resampled_sums


@pytest.mark.parametrize("chunk", [1, 30, 2**20])
@pytest.mark.parametrize("samples", [1, 7, 40])
def test_sums_are_those_of_samples_drawn_one_set_after_another(
    chunk: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "CHUNK_DRAWS", chunk)
    values = np.random.default_rng(samples).integers(0, 1000, (samples, 3)).astype(float)
    generator = np.random.default_rng(0)
    drawn = [values[generator.integers(samples, size=samples)].sum(0) for _ in range(bootstrap.RESAMPLES)]
    assert np.array_equal(resampled_sums(values), [values.sum(0), *drawn])


def test_an_estimate_leaves_out_what_could_not_be_divided() -> None:
    values = ratio(np.array([3.0, 1.0, 5.0, 2.0]), np.array([2.0, 0.0, 2.0, 2.0]))
    assert np.array_equal(values, [1.5, np.nan, 2.5, 1.0], equal_nan=True)
    assert estimate(values) == (1.5, [1.0 + 0.025 * 1.5, 1.0 + 0.975 * 1.5])
    assert estimate(values[1:2]) == (None, None)
