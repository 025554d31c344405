"""Repeats in token rows, made and found, and the loss that teaches a model not to repeat itself.

The loss follows DITTO (Xu et al., "Learning to Break the Loop", NeurIPS 2022): a repeated token should be a good deal
less probable than the same token was the time before.

Letters: B batch, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Token rows of one width, padded at the end, and where each token stood before."""

    tokens_BT: Tensor
    earlier_BT: Tensor  # index in its row of the token that this one repeats; -1 where it repeats none
    lengths_B: Tensor
    shortest_B: Tensor  # index before which the text should not end

    def __getitem__(self, chosen: np.ndarray) -> "Rows":
        return Rows(*(part[chosen] for part in vars(self).values()))


def join(rows: Sequence[Rows]) -> Rows:
    return Rows(*(torch.cat(parts) for parts in zip(*(vars(part).values() for part in rows), strict=True)))


def as_rows(texts: Sequence[tuple[np.ndarray, np.ndarray]], shortest: Sequence[int], width: int) -> Rows:
    """Rows of (tokens, indices of earlier tokens), cut or padded to `width`, none to end before its `shortest`."""
    tokens_BT, earlier_BT = np.zeros((len(texts), width), np.int64), np.full((len(texts), width), -1)
    for row, (tokens, earlier) in enumerate(texts):
        tokens_BT[row, : len(tokens)] = tokens[:width]
        earlier_BT[row, : len(earlier)] = earlier[:width]
    lengths = [min(len(tokens), width) for tokens, _ in texts]
    return Rows(
        torch.from_numpy(tokens_BT), torch.from_numpy(earlier_BT), torch.tensor(lengths), torch.tensor(shortest)
    )


def stutter(
    tokens: np.ndarray, first: int, longest: int, copies: int, width: int, random: np.random.Generator
) -> tuple:
    """(tokens, indices of earlier tokens) of a text in which one span is said 2 to `copies` times over.

    The span starts no earlier than `first` and has up to `longest` tokens, short ones being likelier. At least 16 of
    `width` tokens are left for the text that follows, where two copies leave room for it.
    """
    span = min(round(np.exp(random.uniform(0, np.log(longest)))), max(1, len(tokens) - first - 1))
    start = int(random.integers(first, max(first + 1, min(len(tokens) - span, 200))))
    times = int(min(max(2, (width - 16 - start) // span), random.integers(2, copies + 1)))
    said = np.concatenate([tokens[:start], np.tile(tokens[start : start + span], times), tokens[start + span :]])
    earlier = np.full(len(said), -1)
    earlier[start + span : start + times * span] = np.arange(start, start + (times - 1) * span)
    return said, earlier


def own_repeats(ids: Sequence[int], gram: int, most: int) -> np.ndarray:
    """For each token that closes an n-gram seen before, where that n-gram first ended; -1 for others.

    Only the first `most` repeats are given: deep in a loop they all say the same.
    """
    first_end: dict[tuple[int, ...], int] = {}
    earlier, found = np.full(len(ids), -1), 0
    for last in range(gram - 1, len(ids)):
        closing = tuple(ids[last - gram + 1 : last + 1])
        if closing in first_end and found < most:
            earlier[last] = first_end[closing]
            found += 1
        first_end.setdefault(closing, last)
    return earlier


def repetition_loss(chances_BT: Tensor, earlier_BT: Tensor, decay: float) -> Tensor:
    """Mean over repeated tokens of -log(1 - p), p what the token's chance has above `decay` times its earlier chance.

    `chances_BT` [B, T]: probability given to the token that stands there; `earlier_BT` [B, T]: index into T, negative
    where the token repeats none. No gradient flows into the earlier chance. 0 where nothing is repeated.
    """
    repeats_BT = earlier_BT >= 0
    before_BT = chances_BT.detach().gather(1, earlier_BT.clamp(min=0))
    excess_BT = (chances_BT - decay * before_BT).clamp(min=0, max=1 - 1e-3)
    return -(torch.log1p(-excess_BT) * repeats_BT).sum() / repeats_BT.sum().clamp(min=1)
