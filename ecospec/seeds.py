"""Seeds of random draws, from a run's seed and sample ids alone, so that whoever draws again draws the same."""

import hashlib
from collections.abc import Iterable


def sample_seed(seed: int, sample_id: str) -> int:
    """The seed of one prompt's draws in decoding, the same for every method."""
    return _leading_bits(f"{seed}/{sample_id}", 56)


def batch_seed(seed: int, sample_ids: Iterable[str]) -> int:
    """The seed of the draws of one batch that is traced."""
    return _leading_bits("\n".join([str(seed), *sample_ids]), 63)


def _leading_bits(text: str, bits: int) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - bits)
