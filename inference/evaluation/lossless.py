"""What a text that is not plain decoding's owes to rounding: both passes at the first difference, side by side.

In half precision a tree pass and a one-token pass round differently. A first difference is within rounding when the
target preferred the reference's token by no more than twice the largest difference between the two passes' logits.

Letters: V vocabulary, T tokens of a text, L MoE layers, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ecospec.inference.decoding.statistics import Run


@dataclass(frozen=True)
class Difference:
    """Where a text first leaves the reference.

    `logit_gap`: by how much plain decoding preferred its own token there; `pass_difference`: the largest difference of
    any logit between the two passes; `expert_flips`: share of the routing choices before it that differ.
    """

    sample_id: str
    position: int
    expected: int
    found: int
    logit_gap: float
    pass_difference: float
    within_rounding: bool | None  # None for sampled texts, where the draw decides too
    expert_flips: float
    dtype: str


class Probe(LogitsProcessor):
    """Keeps the scores [V] that a text's next token is picked from, once the text is `prefix_T`; changes nothing."""

    def __init__(self, prefix_T: Tensor) -> None:
        self.prefix_T = prefix_T
        self.scores_V: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See `LogitsProcessor`."""
        if torch.equal(input_ids[0], self.prefix_T):
            self.scores_V = scores[0].clone()
        return scores


def first_difference(expected: list[int], found: list[int]) -> int:
    """The position at which two texts part. Texts that end do so with a token, so none is a beginning of the other."""
    return next(at for at, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)


def routed(run: Run, row: int, tokens: int) -> Tensor:
    """int64 [T, L, K], ascending: the experts of up to `tokens` new tokens of a text that went through the target."""
    kept = []
    for step in run.steps:
        if row in step.rows:
            place = step.rows.index(row)
            kept.append(step.experts_BNLK[place, step.kept[place]])
    return torch.cat(kept)[:tokens].sort(-1).values if kept else torch.empty(0, 0, 0, dtype=torch.long)


def compare(
    sample_id: str,
    position: int,
    tokens: tuple[int, int],
    scores: list[Tensor],
    experts: list[Tensor],
    dtype: torch.dtype,
    sampled: bool,
) -> Difference:
    """The difference of two passes, the reference first: scores [V] each, routing [T, L, K] each."""
    expected, found = tokens
    gap = float(scores[0][expected] - scores[0][found])
    finite_V = scores[0].isfinite() & scores[1].isfinite()
    largest = float((scores[0] - scores[1])[finite_V].abs().max())
    T = min(len(part) for part in experts)
    flips = float((experts[0][:T] != experts[1][:T]).any(-1).float().mean()) if T else 0.0
    rounding = None if sampled else gap <= 2 * largest
    name = str(dtype).removeprefix("torch.")
    return Difference(sample_id, position, expected, found, gap, largest, rounding, flips, name)
