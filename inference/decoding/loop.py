"""The decoding loop: draft, predict, select, verify, accept, over one text or a batch of texts of unequal length.

Verification picks each token exactly as plain decoding would (same processors, same random draws in the same order) and
follows the child that equals it. Drafts are a deterministic function of the text, so this is lossless at every
temperature, and a draft is accepted with the probability the target gives it: the same law as recursive rejection
sampling with point-mass proposals.

Letters: B texts, T tokens of a text, n of them new, N nodes of a tree, F width of the drafter's features, L MoE layers,
K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from ecospec.errors import InputError
from ecospec.inference.decoding.picking import Row, walk
from ecospec.inference.decoding.statistics import Run, Step, StepClock
from ecospec.inference.drafters.base import BatchDrafter, Drafter, EachRow
from ecospec.inference.footprints import FootprintSource, needs_hidden
from ecospec.inference.selection.greedy import EPSILON, NEEDS_FOOTPRINTS, check_selection, choose, draw_noise
from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.features import FeatureTap
from ecospec.inference.target.verification import verify
from ecospec.inference.tree import DraftTrees, roots_only
from ecospec.tracing.target.recorder import RoutingRecorder


@dataclass
class Method:
    """How one method decodes: who drafts, what selects, and where footprints come from. No drafter: plain decoding.

    `joint`: a batch shares its budget of γ a text and its experts; else each text is selected for alone.
    """

    drafter: Drafter | BatchDrafter | None = None
    policy: str = "marginal"
    gamma: int = 4
    epsilon: float = EPSILON
    footprints: FootprintSource | None = None
    seed: int = 0  # of the policy `random`, whose draws must not touch those of sampling
    joint: bool = False

    def __post_init__(self) -> None:
        check_selection(self.policy, self.gamma, self.epsilon)
        if self.drafter is not None and not isinstance(self.drafter, BatchDrafter):
            self.drafter = EachRow(self.drafter)
        if self.drafter is not None and self.policy in NEEDS_FOOTPRINTS and self.footprints is None:
            raise InputError(f"--selection.policy {self.policy}: needs footprints; give a predictor or --footprints")
        if self.drafter is not None and needs_hidden(self.footprints):
            self.drafter.give_hidden()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.feature_layers) if self.drafter else ()

    def reset(self, rows: int) -> None:
        """Begin `rows` new texts."""
        self.generator = torch.Generator().manual_seed(self.seed)
        for part in self._parts():
            part.reset(rows)

    def keep_rows(self, rows: list[int]) -> None:
        """The other texts have ended."""
        for part in self._parts():
            part.keep_rows(rows)

    def choose(self, trees: DraftTrees, footprints_BNLE: Tensor | None) -> DraftTrees:
        """The nodes to verify."""
        noise = draw_noise(self.policy, self.gamma, trees.parents_BN, self.generator, self.joint)
        fields = (trees.parents_BN, trees.prob_BN, trees.real_BN, footprints_BNLE)
        chosen_BN = choose(*fields, self.policy, self.gamma, self.epsilon, joint=self.joint, noise_RBN=noise)
        width = int(chosen_BN.sum(1).max()) if self.joint else min(self.gamma, trees.width)
        return trees.pack(chosen_BN, width)

    def _parts(self) -> list:
        return [part for part in (self.drafter, self.footprints) if part is not None]


@dataclass(frozen=True)
class News:
    """What the target's last pass tells of each text's new positions: features [n, F] and true experts [n, L, K]."""

    features: list[Tensor] | None
    routed: list[Tensor] | None


class SpeculativeLoop:
    """Decodes a batch of texts to their ends; `on_tokens` is given the tokens [n] that the first text emits."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        recorder: RoutingRecorder,
        on_tokens: Callable[[Tensor], object] = lambda tokens: None,
    ) -> None:
        self.model = model
        self.method = method
        self.recorder = recorder
        self.on_tokens = on_tokens
        self.tap = FeatureTap(model, method.feature_layers)

    @torch.no_grad()
    def decode(self, rows: list[Row], cache: Cache) -> Run:
        """Extend the rows' texts to their ends. `cache` is empty, and for several texts a plain `DynamicCache`."""
        self.run = Run()
        self.cache = RowCache(cache, [0] * len(rows))
        self.method.reset(len(rows))
        lengths = [len(row.ids_T) for row in rows]
        live = list(enumerate(rows))
        with self.tap:
            live, news = self._prefill(live)
            clock = StepClock(rows[0].ids_T.device)
            while live:
                live, news = self._step(live, news)
            self.run.decode_seconds = clock.stop().total()
        self.run.new_by_row = [len(row.ids_T) - length for row, length in zip(rows, lengths, strict=True)]
        return self.run

    def _prefill(self, live: list[tuple[int, Row]]) -> tuple:
        """The prompts through the target, padded behind, where causal attention hides the padding; the first tokens."""
        rows = [row for _, row in live]
        texts = [row.text_T for row in rows]
        counts, ids_BT = [len(text_T) for text_T in texts], pad_sequence(texts, batch_first=True)
        clock = StepClock(texts[0].device)
        out = self.model(
            input_ids=ids_BT,
            cache=self.cache.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(sorted({count - 1 for count in counts}), device=texts[0].device),
            **self.tap.options,
        )
        experts_BTLK = self.recorder.take().unflatten(0, ids_BT.shape)
        self.cache.cache.activate_past_recording()
        self.cache.keep_first(counts, max(counts))
        ends = [sorted(set(counts)).index(count) for count in counts]
        logits_B1V = out.logits[torch.arange(len(rows)), ends][:, None]
        walks = walk(roots_only(torch.stack([text_T[-1] for text_T in texts])), logits_B1V, rows)
        self.run.prefill_seconds = clock.stop().total()
        return self._advance(live, walks, out, experts_BTLK, [range(count) for count in counts])

    def _step(self, live: list[tuple[int, Row]], news: News) -> tuple:
        rows = [row for _, row in live]
        clock = StepClock(rows[0].ids_T.device)
        trees = self._propose([row.text_T for row in rows], news, clock)
        with clock.phase("verify"):
            out = verify(self.model, self.cache, trees, **self.tap.options)
            experts_BNLK = self.recorder.take().unflatten(0, trees.tokens_BN.shape)
        with clock.phase("accept"):
            walks = walk(trees, out.logits, rows)
            self.cache.keep([step.kept[: len(step.emitted)] for step in walks], trees.width)
            advanced = self._advance(live, walks, out, experts_BNLK, [step.kept for step in walks])
        emitted, verified = [step.uncut for step in walks], [step.verified for step in walks]
        clock.stop()
        kept, numbers = [step.kept for step in walks], [number for number, _ in live]
        self.run.steps.append(Step(emitted, verified, kept, experts_BNLK, numbers, clock))
        return advanced

    def _propose(self, texts: list[Tensor], news: News, clock: StepClock) -> DraftTrees:
        method = self.method
        if method.drafter is None or method.gamma == 1:
            return roots_only(torch.stack([ids_T[-1] for ids_T in texts]))
        with clock.phase("draft"):
            trees = method.drafter.draft(texts, news.features)
        with clock.phase("predict"):
            source = method.footprints
            footprints = source.footprints(texts, trees, news.routed) if source else None
        with clock.phase("select"):
            return method.choose(trees, footprints)

    def _advance(self, live: list, walks: list, out: object, experts_BNLK: Tensor, kept: list) -> tuple:
        """The texts that go on, and the news of their positions `kept`; all parts forget the others."""
        if live[0][0] == 0:
            self.on_tokens(torch.tensor(walks[0].emitted))
        going = [place for place, step in enumerate(walks) if not step.ended]
        if 0 < len(going) < len(live):
            self.cache.keep_rows(going)
            self.method.keep_rows(going)
        index = [torch.tensor(list(kept[place])) for place in going]

        def of(values_BNX: Tensor | None) -> list[Tensor] | None:
            if values_BNX is None:
                return None
            return [values_BNX[place, index_n] for place, index_n in zip(going, index, strict=True)]

        news = News(of(self.tap.read(out)), of(experts_BNLK if self.method.footprints else None))
        return [live[place] for place in going], news
