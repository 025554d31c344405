"""Key-value caches over texts of unequal length.

In a batch slot i of a text holds its i-th token, so a slot is a position and a short text has empty slots at its end.
After each pass the entries that stay move to the end of their text's own and the rest is dropped; a pass over several
texts needs plain (full) layers for that, one text may use any layer that can drop entries.

Letters: B texts, N new entries of a pass, S slots of past entries that a layer shows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig


@dataclass
class RowCache:
    """`cache` and the number of tokens that each of its B texts has in it."""

    cache: Cache = field(default_factory=DynamicCache)
    lengths: list[int] = field(default_factory=lambda: [0])
    _windows: list[int | None] | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        """Slots in use before the next pass: the longest text's length."""
        return max(self.lengths)

    def lengths_B(self, device: torch.device) -> Tensor:
        return torch.tensor(self.lengths, device=device)

    def windows(self, config: PreTrainedConfig) -> list[int | None]:
        """Each layer's attention window, None without one; asked once, as plain caches do not know it."""
        if self._windows is None:
            self._windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        return self._windows

    def keep(self, kept: list[list[int]], entries: int) -> None:
        """Of the `entries` that every text got since the last call keep the listed ones (a list a text), in order.

        Numbers are counted from the end of the cache, which holds for windowed layers too.
        """
        width = self.width
        moves = [
            (row, node - entries, place + length - width - entries)
            for row, (length, nodes) in enumerate(zip(self.lengths, kept, strict=True))
            for place, node in enumerate(nodes)
        ]
        if any(source != target for _, source, target in moves):
            rows, sources, targets = torch.tensor(moves).T
            for layer in self.cache.layers:
                _move(layer, rows, sources, targets)
        self.lengths = [length + len(nodes) for length, nodes in zip(self.lengths, kept, strict=True)]
        self.cache.crop(self.width - width - entries)

    def keep_first(self, counts: list[int], entries: int) -> None:
        """As `keep`, for the first `counts[b]` entries of text b."""
        self.keep([list(range(count)) for count in counts], entries)

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all texts but `rows`."""
        width = self.width
        self.cache.batch_select_indices(torch.tensor(rows))
        self.lengths = [self.lengths[row] for row in rows]
        if rows:
            self.cache.crop(self.width - width)


def _move(layer: object, rows: Tensor, sources: Tensor, targets: Tensor) -> None:
    for tensor in (layer.keys, layer.values):
        if tensor is not None:  # layers that share another's entries keep none
            tensor[rows, :, targets] = tensor[rows, :, sources]
    indexer = getattr(layer, "indexer_keys", None)
    if indexer is not None:
        indexer[rows, targets] = indexer[rows, sources]
