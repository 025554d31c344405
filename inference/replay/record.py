"""Walk plain decoding's text token by token and note, at each position, what any selection of drafts would have got.

The text is decoded first, by our plain loop, and on past its end as if it had not ended: so live decoding counts its
last step. Then at each position where a step may begin a pool is drafted and predicted for, the target verifies all of
it in one pass, and only the root stays in the cache. Drafts, footprints and experts depend on the text alone, so these
pools are the ones that live decoding would see.

Letters: T tokens of the text, P of them the prompt's, N tree nodes (root first), M = N - 1 drafts, F width of the
drafter's features, V vocabulary, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from ecospec.errors import InputError
from ecospec.inference.decoding.generation import refuse_unsupported
from ecospec.inference.decoding.loop import Method, News, SpeculativeLoop
from ecospec.inference.decoding.picking import Picker, Row
from ecospec.inference.decoding.statistics import StepClock
from ecospec.inference.drafters.base import BatchDrafter, Drafter
from ecospec.inference.footprints import FootprintSource, needs_hidden
from ecospec.inference.replay.treefile import PREDICTED, TARGET, Position
from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.features import FeatureTap
from ecospec.inference.target.verification import check_context, check_tree_support, verify
from ecospec.inference.tree import DraftTree, DraftTrees
from ecospec.tracing.target.recorder import RoutingRecorder


class TreeRecorder:
    """Records the pools of `drafter` along texts of `model`; `depth` bounds the depth of its trees.

    `sources`: what predicts their experts, by the name of the footprints; each is timed, and those of `PREDICTED` are
    kept. `recorder` is entered already. Raises InputError for a target on which no tree can be verified, and for a
    source that the drafter cannot feed.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: RoutingRecorder,
        drafter: Drafter | BatchDrafter,
        depth: int,
        sources: Mapping[str, FootprintSource] | None = None,
    ) -> None:
        check_tree_support(model)
        self.model = model
        self.recorder = recorder
        self.depth = depth
        self.sources = sources or {}
        self.drafter = Method(drafter, "confidence").drafter
        if any(map(needs_hidden, self.sources.values())):
            self.drafter.give_hidden()
        self.tap = FeatureTap(model, tuple(self.drafter.feature_layers))
        self.times: dict[str, list[float]] = {name: [] for name in (TARGET, *self.sources)}
        self.last_answer: list[int] = []  # ids of the text recorded last, without its prompt

    def record(
        self, prompt_id: str, ids_1T: Tensor, generator: torch.Generator | None = None, **generation_kwargs
    ) -> list[Position]:
        """One position for each token after which a step may begin; none where the first token ends the text.

        `ids_1T` int64 [1, P]; `generator` draws the text (by default the global one); the other options are those of
        `model.generate`. Raises InputError for what is not supported and for a tree deeper than `depth`.
        """
        refuse_unsupported(self.model, {"generation_config": None, **generation_kwargs})
        text = _Text(self.model, self.recorder, self.depth, generator)
        out_1T = self.model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), custom_generate=text, **generation_kwargs
        )
        self.last_answer = out_1T[0, ids_1T.shape[1] :].tolist()
        self.times[TARGET] += [step.clock.seconds()["verify"] for step in text.run.steps]
        return self._positions(prompt_id, ids_1T.shape[1], text)

    def seconds(self) -> dict[str, float]:
        """Medians over the positions so far: seconds of each source, and of the target's pass over the root alone."""
        return {name: median(times) for name, times in self.times.items() if times}

    @torch.no_grad()
    def _positions(self, prompt_id: str, prompt_length: int, text: "_Text") -> list[Position]:
        rows = []
        for part in (self.drafter, *self.sources.values()):
            part.reset(1)
        with self.tap:
            cache, news = self._prefill(text.row.ids_T[:prompt_length])
            for place in range(prompt_length, text.length - 1):
                row, news = self._position(prompt_id, place, text.row, cache, news)
                rows.append(row)
        return rows

    def _prefill(self, prompt_P: Tensor) -> tuple[RowCache, News]:
        cache = RowCache(DynamicCache(config=self.model.config.get_text_config()))
        options = {"use_cache": True, "logits_to_keep": 1, **self.tap.options}
        out = self.model(input_ids=prompt_P[None], cache=cache.cache, **options)
        true_PLK = self.recorder.take()
        cache.cache.activate_past_recording()
        cache.keep_first([len(prompt_P)], len(prompt_P))
        return cache, self._news(out, true_PLK, len(prompt_P))

    def _news(self, out: object, true_NLK: Tensor, count: int) -> News:
        """Of a pass over one text, what its first `count` positions tell."""
        features_1NF = self.tap.read(out)
        return News(None if features_1NF is None else [features_1NF[0, :count]], [true_NLK[:count]])

    def _position(self, prompt_id: str, place: int, row: Row, cache: RowCache, news: News) -> tuple[Position, News]:
        """Draft, predict and verify the whole pool after the token at `place`; keep the root."""
        ids_T = row.ids_T[: place + 1]
        trees = self.drafter.draft([ids_T], news.features)
        tree = trees.row(0)
        if int(tree.depth_N.max()) > self.depth:
            raise InputError(f"drafter: its tree is {int(tree.depth_N.max())} levels deep where {self.depth} was said")
        predicted = self._predict(ids_T, trees, news.routed)
        out = verify(self.model, cache, trees, **self.tap.options)
        true_NLK = self.recorder.take(len(tree))
        cache.keep_first([1], len(tree))
        position = Position(
            prompt_id,
            place,
            int(ids_T[-1]),
            **_drafts(tree),
            accepted_M=_accepted(tree, row.ids_T[place:]),
            target_prob_M=_target_prob(tree, ids_T, out.logits[0], row.picker),
            experts_true_NLK=true_NLK.sort(-1).values.cpu().numpy(),
            predicted={name: _ids(name, found, true_NLK.shape[-1]) for name, found in predicted.items()},
        )
        return position, self._news(out, true_NLK, 1)

    def _predict(self, ids_T: Tensor, trees: DraftTrees, routed: list[Tensor]) -> dict[str, Tensor]:
        """Footprints [N, L, E] of the sources that are kept; all are timed."""
        found = {}
        for name, source in self.sources.items():
            clock = StepClock(ids_T.device)
            footprints_1NLE = source.footprints([ids_T], trees, routed)
            self.times[name].append(clock.stop().total())
            if name in PREDICTED:
                found[name] = footprints_1NLE[0]
        return found


class _Text:
    """A `custom_generate` that decodes plainly, `beyond` tokens past the end; `length` is the text's without them.

    `run` holds its steps: passes of the target over a root alone.
    """

    def __init__(
        self, model: nn.Module, recorder: RoutingRecorder, beyond: int, generator: torch.Generator | None
    ) -> None:
        self.loop = SpeculativeLoop(model, Method(), recorder)
        self.beyond = beyond
        self.generator = generator

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Sequence,
        stopping_criteria: Sequence,
        generation_config: GenerationConfig,
        **model_kwargs,
    ) -> Tensor:
        """The ids of the text, `row` and `length` beside it."""
        check_context(model.config, generation_config.max_length + self.beyond)
        if Picker(logits_processor, stopping_criteria, False).keeps_state:
            raise InputError("logits_processor, stopping_criteria: recording takes Transformers' own; leave out others")
        end = _PastTheEnd(stopping_criteria, self.beyond)
        picker = Picker(logits_processor, StoppingCriteriaList([end]), generation_config.do_sample, self.generator)
        self.row = Row(input_ids[0], picker)
        cache: Cache = model_kwargs["cache"]
        self.run = self.loop.decode([self.row], cache)
        self.length = end.length
        return self.row.ids_T[None, : self.length]


class _PastTheEnd(StoppingCriteria):
    """Stops `beyond` tokens after the given criteria first would; `length` is the text's where they did."""

    def __init__(self, criteria: StoppingCriteriaList, beyond: int) -> None:
        self.criteria = criteria
        self.beyond = beyond
        self.length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        """bool [1]."""
        count = input_ids.shape[1]
        if self.length is None and bool(self.criteria(input_ids, scores)):
            self.length = count
        ended = self.length is not None and count >= self.length + self.beyond
        return torch.tensor([ended], device=input_ids.device)


def _drafts(tree: DraftTree) -> dict[str, np.ndarray]:
    """The tree's own columns without its root: parents, tokens, conditional probabilities, depths, ranks."""
    parents_M = tree.parents_N[1:].cpu().numpy()
    prob_N = tree.prob_N.float().cpu().numpy()
    same_MM = parents_M[:, None] == parents_M
    return {
        "parents_M": (parents_M - 1).astype(np.int16),
        "tokens_M": tree.tokens_N[1:].cpu().numpy().astype(np.int32),
        "prob_M": conditional(prob_N[1:], prob_N[parents_M]),
        "depth_M": tree.depth_N[1:].cpu().numpy().astype(np.int16),
        "rank_M": np.tril(same_MM, -1).sum(1).astype(np.int16),
    }


def conditional(prob_M: np.ndarray, above_M: np.ndarray) -> np.ndarray:
    """float32 factors that, times their parents' probabilities, give the nodes' back to the last bit.

    A quotient alone may miss by one place in the last bit where `prob_M` is a power of two.
    """
    factor_M = np.divide(prob_M, above_M, out=np.zeros_like(prob_M), where=above_M > 0)
    back_M = factor_M * above_M
    towards_M = np.where(back_M < prob_M, np.float32(np.inf), np.float32(0))
    return np.where(back_M == prob_M, factor_M, np.nextafter(factor_M, towards_M))


def _accepted(tree: DraftTree, going_on_T: Tensor) -> np.ndarray:
    """bool [M]: drafts whose whole path the text follows; `going_on_T` begins with the root."""
    tokens, parents, depths = tree.tokens_N.tolist(), tree.parents_N.tolist(), tree.depth_N.tolist()
    text, accepted = going_on_T.tolist(), [True]
    for token, parent, depth in zip(tokens[1:], parents[1:], depths[1:], strict=True):
        accepted.append(accepted[parent] and text[depth] == token)
    return np.array(accepted[1:], dtype=bool)


def _target_prob(tree: DraftTree, ids_T: Tensor, logits_NV: Tensor, picker: Picker) -> np.ndarray:
    """float32 [M]: the target's probability of each draft given its parent, as the text's own processors make it."""
    prob = logits_NV.new_zeros(len(tree), dtype=torch.float32)
    paths = {0: ids_T[None]}
    for node, parent in enumerate(tree.parents_N.tolist()[1:], 1):
        paths[node] = torch.cat([paths[parent], tree.tokens_N[node].reshape(1, 1)], dim=1)
    for parent in tree.parents_N[1:].unique().tolist():
        scores_1V = picker.logits_processor(paths[parent], logits_NV[parent][None].to(torch.float32, copy=True))
        children = (tree.parents_N == parent).nonzero()[:, 0]
        prob[children] = scores_1V[0].softmax(-1)[tree.tokens_N[children]]
    return prob[1:].cpu().numpy()


def _ids(name: str, footprints_NLE: Tensor, top_k: int) -> np.ndarray:
    """Expert ids [N, L, K], ascending. Raises InputError unless every node has K experts in every layer."""
    if bool((footprints_NLE.sum(-1) != top_k).any()):
        raise InputError(f"{name}: a tree file keeps {top_k} experts a node and layer, as many as the target uses")
    return footprints_NLE.nonzero()[:, -1].reshape(*footprints_NLE.shape[:2], top_k).cpu().numpy()
