"""Which sequences share a forward pass. Pure: the batches depend on the lengths alone."""

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices in batches of at most `batch_size`, similar lengths together, equal lengths in their given order."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
