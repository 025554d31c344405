"""Seeds are those of every run so far: texts that were sampled can be sampled again."""

import hashlib

import pytest

from ecospec.seeds import batch_seed, sample_seed


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_seeds_depend_on_seed_and_samples_as_they_always_did(seed: int) -> None:
    name = hashlib.sha256(f"{seed}/lab/maths/3/0".encode()).digest()
    assert sample_seed(seed, "lab/maths/3/0") == int.from_bytes(name[:7], "big")
    names = hashlib.sha256(f"{seed}\na/0/0\nb/1/0".encode()).digest()
    assert batch_seed(seed, ["a/0/0", "b/1/0"]) == int.from_bytes(names[:8], "big") >> 1


def test_seeds_are_known_numbers() -> None:
    assert (sample_seed(0, "lab/maths/0/0"), batch_seed(0, ["lab/maths/0/0"])) == (
        19207534637256253,
        3041007474768358719,
    )
