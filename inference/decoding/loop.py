"""The decoding loop: draft, predict, select, verify, accept, over one text or a batch of texts of unequal length.

Verification picks each token exactly as plain decoding would (same processors, same random draws in the same order) and
follows the child that equals it. Drafts are a deterministic function of the text, so this is lossless at every
temperature, and a draft is accepted with the probability the target gives it: the same law as recursive rejection
sampling with point-mass proposals.

The target is a session (`ecospec.inference.target.session`): the loop knows no model, cache or mask.

Letters: B texts, T tokens of a text, N nodes of a tree.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.decoding.method import Method, Proposer
from ecospec.inference.decoding.picking import Row, Walk, walk
from ecospec.inference.decoding.statistics import Run, Step, StepClock
from ecospec.inference.target.session import Pass, TargetSession
from ecospec.inference.tree import DraftTrees, roots_only

Acceptance = Callable[[DraftTrees, Tensor, list[Row]], list[Walk]]  # as `picking.walk`


@dataclass(frozen=True)
class Verified:
    """One step as an observer sees it: the trees verified, and what the pass told of them."""

    trees: DraftTrees
    told: Pass


class SpeculativeLoop:
    """Decodes a batch of texts to their ends.

    `accept` decides how far a tree is followed; `on_tokens` is given the tokens [n] that the first text emits,
    `on_step` each step.
    """

    def __init__(
        self,
        session: TargetSession,
        method: Method,
        accept: Acceptance = walk,
        on_tokens: Callable[[Tensor], object] = lambda tokens: None,
        on_step: Callable[[Verified], object] = lambda step: None,
    ) -> None:
        self.session = session
        self.method = method
        self.accept = accept
        self.on_tokens = on_tokens
        self.on_step = on_step

    @torch.no_grad()
    def decode(self, rows: list[Row], seed: int = 0) -> Run:
        """Extend the rows' texts to their ends; `seed` is of the selector's own draws."""
        run, lengths = Run(), [len(row.ids_T) for row in rows]
        proposer = self.method.begin(len(rows), seed)
        with self.session:
            live = self._prefill(list(enumerate(rows)), proposer, run)
            clock = StepClock(self.session.device)
            while live:
                live = self._step(live, proposer, run)
            run.decode_seconds = clock.stop().total()
        run.new_by_row = [len(row.ids_T) - length for row, length in zip(rows, lengths, strict=True)]
        return run

    def _prefill(self, live: list[tuple[int, Row]], proposer: Proposer, run: Run) -> list[tuple[int, Row]]:
        """The prompts through the target, and the first tokens."""
        rows = [row for _, row in live]
        texts = [row.text_T for row in rows]
        clock = StepClock(self.session.device)
        told = self.session.prefill(texts)
        walks = self.accept(roots_only(torch.stack([text_T[-1] for text_T in texts])), told.logits_BNV, rows)
        run.prefill_seconds = clock.stop().total()
        return self._advance(live, walks, told, [list(range(len(text_T))) for text_T in texts], proposer)

    def _step(self, live: list[tuple[int, Row]], proposer: Proposer, run: Run) -> list[tuple[int, Row]]:
        rows = [row for _, row in live]
        clock = StepClock(self.session.device)
        trees = proposer.propose([row.text_T for row in rows], clock)
        with clock.phase("verify"):
            told = self.session.verify(trees)
        with clock.phase("accept"):
            walks = self.accept(trees, told.logits_BNV, rows)
            self.session.keep([step.kept[: len(step.emitted)] for step in walks])
            kept = [step.kept for step in walks]
            measured = proposer.observe(trees, told.experts_BNLK, kept)
            going = self._advance(live, walks, told, kept, proposer)
        clock.stop()
        emitted, verified = [step.would_emit for step in walks], [step.verified for step in walks]
        numbers = [number for number, _ in live]
        run.steps.append(Step(emitted, verified, kept, told.experts_BNLK, numbers, clock, trees, measured))
        self.on_step(Verified(trees, told))
        return going

    def _advance(
        self, live: list[tuple[int, Row]], walks: list[Walk], told: Pass, kept: list[list[int]], proposer: Proposer
    ) -> list[tuple[int, Row]]:
        """The texts that go on; session and proposer drop the others."""
        if live[0][0] == 0:
            self.on_tokens(torch.tensor(walks[0].emitted))
        going = [place for place, step in enumerate(walks) if not step.ended]
        proposer.learn(told, going, kept)
        if 0 < len(going) < len(live):
            self.session.keep_rows(going)
        return [live[place] for place in going]
