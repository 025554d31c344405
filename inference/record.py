"""Walk plain decoding's text token by token and note, at each position, what any selection of drafts would have got.

The text is decoded first, by our plain loop, and on past its end as if it had not ended: so live decoding counts its
last step. Then at each position where a step may begin a pool is drafted and predicted for, the target verifies all of
it in one pass, and only the root stays in the cache. Drafts, footprints and experts depend on the text alone, so these
pools are the ones that live decoding would see.

Letters: T tokens of the text, P of them the prompt's, N tree nodes (root first), M = N - 1 drafts, F width of the
drafter's features, V vocabulary, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from ecospec.configs.errors import InputError
from ecospec.inference.cache import RowCache
from ecospec.inference.decoder import Method, SpeculativeLoop
from ecospec.inference.drafters.base import BatchDrafter, Drafter
from ecospec.inference.features import FeatureTap
from ecospec.inference.footprints import FootprintSource
from ecospec.inference.generation import refuse_unsupported
from ecospec.inference.picking import Picker, Row
from ecospec.inference.tree import DraftTree, stack
from ecospec.inference.treefile import Position
from ecospec.inference.verification import check_context, check_tree_support, verify
from ecospec.tracing.recorder import RoutingRecorder


class TreeRecorder:
    """Records the pools of `drafter` along texts of `model`; `depth` bounds the depth of its trees.

    `recorder` is entered already. Raises InputError for a target on which no tree can be verified.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: RoutingRecorder,
        drafter: Drafter | BatchDrafter,
        depth: int,
        footprints: FootprintSource | None = None,
    ) -> None:
        check_tree_support(model)
        self.model = model
        self.recorder = recorder
        self.depth = depth
        self.method = Method(drafter, "confidence", footprints=footprints)
        self.tap = FeatureTap(model, self.method.feature_layers)
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
        return self._positions(prompt_id, ids_1T.shape[1], text)

    @torch.no_grad()
    def _positions(self, prompt_id: str, prompt_length: int, text: "_Text") -> list[Position]:
        rows = []
        self.method.reset(1)
        with self.tap:
            cache, features = self._prefill(text.row.ids_T[:prompt_length])
            for place in range(prompt_length, text.length - 1):
                row, features = self._position(prompt_id, place, text.row, cache, features)
                rows.append(row)
        return rows

    def _prefill(self, prompt_P: Tensor) -> tuple[RowCache, list[Tensor] | None]:
        cache = RowCache(DynamicCache(config=self.model.config.get_text_config()))
        options = {"use_cache": True, "logits_to_keep": 1, **self.tap.options}
        out = self.model(input_ids=prompt_P[None], cache=cache.cache, **options)
        self.recorder.take()
        cache.cache.activate_past_recording()
        cache.keep_first([len(prompt_P)], len(prompt_P))
        return cache, self._features(out, len(prompt_P))

    def _features(self, out: object, count: int) -> list[Tensor] | None:
        features_1NF = self.tap.read(out)
        return None if features_1NF is None else [features_1NF[0, :count]]

    def _position(
        self, prompt_id: str, place: int, row: Row, cache: RowCache, features: list[Tensor] | None
    ) -> tuple[Position, list[Tensor] | None]:
        """Draft, predict and verify the whole pool after the token at `place`; keep the root."""
        ids_T, method = row.ids_T[: place + 1], self.method
        tree = method.drafter.draft([ids_T], features).row(0)
        if int(tree.depth_N.max()) > self.depth:
            raise InputError(f"drafter: its tree is {int(tree.depth_N.max())} levels deep where {self.depth} was said")
        trees = stack([tree])
        footprints = method.footprints.footprints([ids_T], trees)[0] if method.footprints else None
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
            experts_pred_NLK=None if footprints is None else _ids(footprints, true_NLK.shape[-1]),
        )
        return position, self._features(out, 1)


class _Text:
    """A `custom_generate` that decodes plainly, `beyond` tokens past the end; `length` is the text's without them."""

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
        self.loop.decode([self.row], cache)
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


def _ids(footprints_NLE: Tensor, top_k: int) -> np.ndarray:
    """Expert ids [N, L, K], ascending. Raises InputError unless every node has K experts in every layer."""
    if bool((footprints_NLE.sum(-1) != top_k).any()):
        raise InputError(f"predictor: a tree file keeps {top_k} experts a node and layer, as many as the target uses")
    return footprints_NLE.nonzero()[:, -1].reshape(*footprints_NLE.shape[:2], top_k).cpu().numpy()
