"""Walk plain decoding's text token by token and note, at each position, what any selection of drafts would have got.

The text is decoded first, by our plain loop, and on past its end as if it had not ended: so live decoding counts its
last step. Then at each position where a step may begin a pool is drafted and predicted for, the target verifies all of
it in one pass, and only the root stays in the cache. Drafts, footprints and experts depend on the text alone, so these
pools are the ones that live decoding would see.

Letters: T tokens of the text, P of them the prompt's, N tree nodes (root first), M = N - 1 drafts, F width of the
drafter's features, V vocabulary, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from ecospec.errors import InputError
from ecospec.inference.decoding.generation import refuse_unsupported
from ecospec.inference.decoding.loop import SpeculativeLoop, Verified
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.picking import Picker, Row, Walk
from ecospec.inference.decoding.statistics import Run, StepClock
from ecospec.inference.drafters.base import BatchDrafter, Drafter
from ecospec.inference.footprints import FootprintSource, needs_hidden
from ecospec.inference.replay.treefile import PREDICTED, TARGET, Position
from ecospec.inference.selection.base import WholePool
from ecospec.inference.target.opening import open_session
from ecospec.inference.target.support import check_context, check_tree_support
from ecospec.inference.tree import DraftTree, DraftTrees


class TreeRecorder:
    """Records the pools of `drafter` along texts of `model`; `depth` bounds the depth of its trees.

    `sources`: what predicts their experts, by the name of the footprints; each is timed, and those of `PREDICTED` are
    kept. Raises InputError for a target on which no tree can be verified, and for a source that the drafter cannot
    feed.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter | BatchDrafter,
        depth: int,
        sources: Mapping[str, FootprintSource] | None = None,
    ) -> None:
        check_tree_support(model)
        self.model = model
        self.depth = depth
        self.sources = AllSources(sources or {})
        self.method = Method(drafter, WholePool(), self.sources)
        self.target_times: list[float] = []
        self.last_answer: list[int] = []  # ids of the text recorded last, without its prompt

    def record(
        self, prompt_id: str, ids_1T: Tensor, generator: torch.Generator | None = None, **generation_kwargs
    ) -> list[Position]:
        """One position for each token after which a step may begin; none where the first token ends the text.

        `ids_1T` int64 [1, P]; `generator` draws the text (by default the global one); the other options are those of
        `model.generate`. Raises InputError for what is not supported and for a tree deeper than `depth`.
        """
        refuse_unsupported(self.model, {"generation_config": None, **generation_kwargs})
        text = _Text(self.depth, generator)
        out_1T = self.model.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), custom_generate=text, **generation_kwargs
        )
        self.last_answer = out_1T[0, ids_1T.shape[1] :].tolist()
        self.target_times += [step.clock.seconds()["verify"] for step in text.decoded.run.steps]
        return self._positions(prompt_id, ids_1T[0], text.decoded)

    def seconds(self) -> dict[str, float]:
        """Medians over the positions so far: seconds of each source, and of the target's pass over the root alone."""
        times = {TARGET: self.target_times, **self.sources.times}
        return {name: median(found) for name, found in times.items() if found}

    def _positions(self, prompt_id: str, prompt_P: Tensor, text: "Plain") -> list[Position]:
        """Go along the text a token a step, with the whole pool verified at each."""
        positions: list[Position] = []

        def note(step: Verified) -> None:
            place = len(prompt_P) + len(positions)
            tree = step.trees.row(0)
            if int(tree.depth_N.max()) > self.depth:
                depth = int(tree.depth_N.max())
                raise InputError(f"drafter: its tree is {depth} levels deep where {self.depth} was said")
            known = {"prompt_id": prompt_id, "position": place, "root": int(text.ids_T[place])}
            found = {**_drafts(tree), **_truth(tree, step, text, place)}
            positions.append(Position(**known, **found, predicted=_predicted(self.sources.last, step)))

        cache = DynamicCache(config=self.model.config.get_text_config())
        session = open_session(self.model, cache, self.method.feature_layers)
        along = Along(text.ids_T[: text.length])
        SpeculativeLoop(session, self.method, along, on_step=note).decode([Row(prompt_P, text.picker)])
        return positions


class AllSources:
    """A `FootprintSource` that asks several at once: `last` has what each said, `times` the seconds that each took."""

    def __init__(self, sources: Mapping[str, FootprintSource]) -> None:
        self.sources = sources
        self.needs_hidden = any(map(needs_hidden, sources.values()))
        self.last: dict[str, Tensor] = {}
        self.times: dict[str, list[float]] = {name: [] for name in sources}

    def reset(self, rows: int) -> None:
        """See `FootprintSource`."""
        for source in self.sources.values():
            source.reset(rows)

    def keep_rows(self, rows: list[int]) -> None:
        """See `FootprintSource`."""
        for source in self.sources.values():
            source.keep_rows(rows)

    def footprints(self, texts: list[Tensor], trees: DraftTrees, routed: list[Tensor]) -> Tensor:
        """Ask every source; nothing is selected by what they say, so nobody's footprints [B, N, 0, 0] are returned."""
        for name, source in self.sources.items():
            clock = StepClock(texts[0].device)
            self.last[name] = source.footprints(texts, trees, routed)
            self.times[name].append(clock.stop().total())
        return trees.real_BN[..., None, None][..., :0, :0]


class Along:
    """Follows a text that is known: one token a step, whatever the target would pick. Stands in for `picking.walk`."""

    def __init__(self, text_T: Tensor) -> None:
        self.text_T = text_T

    def __call__(self, trees: DraftTrees, logits_BNV: Tensor, rows: list[Row]) -> list[Walk]:
        """See `picking.walk`, for one row."""
        (row,) = rows
        row.ids_T = self.text_T[: len(row.ids_T) + 1]
        ended = len(row.ids_T) == len(self.text_T)
        return [Walk([int(row.ids_T[-1])], [0], 1, ended, trees.width)]


@dataclass(frozen=True)
class Plain:
    """A text decoded plainly: `ids_T` with what lies past its end, and its own `length` without that.

    `picker`: how it was picked; `run`: its steps, passes of the target over a root alone.
    """

    ids_T: Tensor
    length: int
    picker: Picker
    run: Run


class _Text:
    """A `custom_generate` that decodes plainly, `beyond` tokens past the end; `decoded` is what came of it."""

    def __init__(self, beyond: int, generator: torch.Generator | None) -> None:
        self.beyond = beyond
        self.generator = generator
        self.decoded: Plain | None = None

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Sequence,
        stopping_criteria: Sequence,
        generation_config: GenerationConfig,
        **model_kwargs,
    ) -> Tensor:
        """The ids of the text."""
        check_context(model.config, generation_config.max_length + self.beyond)
        if Picker(logits_processor, stopping_criteria, False).keeps_state:
            raise InputError("logits_processor, stopping_criteria: recording takes Transformers' own; leave out others")
        end = _PastTheEnd(stopping_criteria, self.beyond)
        picker = Picker(logits_processor, StoppingCriteriaList([end]), generation_config.do_sample, self.generator)
        row = Row(input_ids[0], picker)
        run = SpeculativeLoop(open_session(model, model_kwargs["cache"]), Method()).decode([row])
        self.decoded = Plain(row.ids_T, end.length, picker, run)
        return row.ids_T[None, : end.length]


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


def _truth(tree: DraftTree, step: Verified, text: Plain, place: int) -> dict[str, np.ndarray]:
    """What the target made of the pool: drafts its text follows, their probabilities, every node's experts."""
    experts_NLK = step.told.experts_BNLK[0]
    return {
        "accepted_M": _accepted(tree, text.ids_T[place:]),
        "target_prob_M": _target_prob(tree, text.ids_T[: place + 1], step.told.logits_BNV[0], text.picker),
        "experts_true_NLK": experts_NLK.sort(-1).values.cpu().numpy(),
    }


def _predicted(last: Mapping[str, Tensor], step: Verified) -> dict[str, np.ndarray]:
    """Expert ids [N, L, K] of the sources that a tree file keeps."""
    top_k = step.told.experts_BNLK.shape[-1]
    return {name: _ids(name, found[0], top_k) for name, found in last.items() if name in PREDICTED}


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
