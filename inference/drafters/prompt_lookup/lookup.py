"""Prompt lookup: drafts what followed the text's last tokens when they stood in the text before. No model, no state.

Letters: T tokens of the text, M earlier occurrences of its ending (the latest first), L levels of the tree.
"""

import numpy as np
import torch
from torch import Tensor

from ecospec.inference.tree import DraftTree, tree_from_levels

END = -1  # fills continuations that the text's end cuts short


class PromptLookupDrafter:
    """Looks up the longest ending, of at most `max_ngram` tokens, that occurs earlier, and drafts how it went on.

    Up to `topk` different continuations of up to `steps` tokens, the latest first, merged into one tree; of two that
    agree as far as the shorter one goes, the longer counts. A draft's conditional probability is the share of the
    occurrences going on from its parent that go on with it. Nothing found: the root alone. Implements `Drafter`.
    """

    feature_layers = ()

    def __init__(self, steps: int = 3, topk: int = 2, max_ngram: int = 3) -> None:
        self.steps = steps
        self.topk = topk
        self.max_ngram = max_ngram

    def reset(self) -> None:
        """See `Drafter`; there is nothing to forget."""

    def draft(self, ids_T: Tensor, features_nF: Tensor | None = None) -> DraftTree:
        """See `Drafter`."""
        text_T = ids_T.cpu().numpy()
        next_ML = continuations(text_T, earlier_endings(text_T, self.max_ngram), self.steps)
        levels = tree_levels(next_ML, different(next_ML, self.topk))
        return tree_from_levels(ids_T[-1], [tuple(part.to(ids_T.device) for part in level) for level in levels])


def earlier_endings(text_T: np.ndarray, max_ngram: int) -> np.ndarray:
    """int [M]: the last token's position in each earlier occurrence of the longest ending that has one."""
    T = len(text_T)
    found_M = np.flatnonzero(text_T[:-1] == text_T[-1])[::-1]
    for back in range(1, max_ngram):
        inside_M = found_M[found_M >= back]
        longer_M = inside_M[text_T[inside_M - back] == text_T[T - 1 - back]]
        if not len(longer_M):
            break
        found_M = longer_M
    return found_M


def continuations(text_T: np.ndarray, found_M: np.ndarray, steps: int) -> np.ndarray:
    """int64 [M, L]: the tokens after each occurrence, `END` beyond the text."""
    padded = np.concatenate([text_T, np.full(steps, END)])
    return padded[found_M[:, None] + 1 + np.arange(steps)]


def different(next_ML: np.ndarray, topk: int) -> list[int]:
    """Rows of up to `topk` different continuations, as `PromptLookupDrafter` says."""
    chosen: list[int] = []
    length_M = (next_ML != END).sum(1)
    open_M = length_M > 0
    while open_M.any() and len(chosen) < topk:
        first = next_ML[open_M.argmax()]
        agrees_M = ((next_ML == first) | (first == END)).all(1)
        row = int(np.where(agrees_M, length_M, 0).argmax())  # the longest, and of these the latest
        open_M &= ~((next_ML == next_ML[row]) | (next_ML == END)).all(1)
        chosen.append(row)
    return chosen


def tree_levels(next_ML: np.ndarray, chosen: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Levels of (tokens, parents, conditional probabilities) of the tree that the chosen rows merge into."""
    node_of: dict[tuple[int, ...], int] = {(): 0}
    levels = []
    goes_on_ML = next_ML != END
    agrees = {row: np.logical_and.accumulate(next_ML == next_ML[row], axis=1) for row in chosen}
    for level in range(next_ML.shape[1]):
        nodes = []
        for row in chosen:
            path = tuple(next_ML[row, : level + 1].tolist())
            if path[-1] == END or path in node_of:
                continue
            node_of[path] = len(node_of)
            here_M = agrees[row][:, level - 1] if level else np.ones(len(next_ML), dtype=bool)
            share = agrees[row][:, level].sum() / (here_M & goes_on_ML[:, level]).sum()
            nodes.append((path[-1], node_of[path[:-1]], share))
        if nodes:
            tokens, parents, shares = zip(*nodes, strict=True)
            levels.append((torch.tensor(tokens), torch.tensor(parents), torch.tensor(shares, dtype=torch.float32)))
    return levels
