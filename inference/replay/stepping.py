"""Step through recorded pools as decoding would: every policy, footprint source and γ, without a target.

What most selectors make of a position depends on that position alone, so it is worked out for all positions at once,
pools of one width together; stepping is then a walk over integers: begin at a text's first position, go on as many
positions as the step emits. A selector that learns is asked at one position after the other. Either way it is the very
object that live decoding asks.

Letters: X positions of a file, S steps of a prompt, B positions of one batch, N tree nodes (root first), L MoE layers,
E experts, K experts per token.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ecospec.data.traces import Traces
from ecospec.errors import InputError
from ecospec.inference.footprints import FootprintSource, as_footprints
from ecospec.inference.replay.treefile import PREDICTED, Position, TreeSet
from ecospec.inference.selection.base import Selector, footprints_missing
from ecospec.inference.selection.config import EPSILON, RuleConfig
from ecospec.inference.tree import DraftTrees
from ecospec.predictor.kinds import all_kinds

BATCH_BYTES = 2**21  # of one batch's footprints, to stay in a cache
Sources = Mapping[str, FootprintSource]


@dataclass(frozen=True)
class Combination:
    """What is replayed. `footprints`: `oracle`, a source recorded or in need of no record, None for policies without.

    `options`: further keys of the rule, with their values. Raises InputError for an unknown policy, γ < 1, or
    footprints that are missing.
    """

    policy: str
    gamma: int
    footprints: str | None = None
    epsilon: float = EPSILON
    options: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        if self.footprints is None and self.needs_footprints:
            raise footprints_missing(self.policy)

    @property
    def needs_footprints(self) -> bool:
        return self.build().needs_footprints

    def build(self) -> Selector:
        """The selector that live decoding would ask."""
        return RuleConfig(self.policy, self.gamma, self.epsilon, **dict(self.options)).build()


@dataclass(frozen=True)
class Steps:
    """One prompt's steps: tokens emitted (not cut at the end) and nodes verified, int64 [S]; active experts [S, L]."""

    emitted_S: np.ndarray
    verified_S: np.ndarray
    active_SL: np.ndarray
    measured: Sequence[Mapping[str, object]] = ()  # by a selector that learns, by the keys of its metrics

    def at(self, index_S: np.ndarray) -> "Steps":
        """Some of the steps."""
        return Steps(self.emitted_S[index_S], self.verified_S[index_S], self.active_SL[index_S])


@dataclass(frozen=True)
class Pools:
    """Positions whose pools are equally wide; `numbers_B` are theirs in the file, `ids` expert ids by source.

    `before_BLK`: true experts of the token before the root, -1 where the file has none (a text's first position).
    """

    numbers_B: np.ndarray
    trees: DraftTrees
    accepted_BN: Tensor
    ids: dict[str, Tensor]
    before_BLK: Tensor

    def footprints(self, name: str, sources: Sources, num_experts: int) -> Tensor:
        """bool [B, N, L, E]. Raises InputError for a source that the file lacks and that is not in `sources`."""
        if name in self.ids:
            return as_footprints(self.ids[name].long(), num_experts)
        if name not in sources:
            raise InputError(f"--footprints {name}: {_why_absent(name)}")
        routed = list(self.before_BLK[:, None].long())
        return sources[name].footprints(list(self.trees.tokens_BN[:, :1]), self.trees, routed)


def _why_absent(name: str) -> str:
    """Why a footprint source is not to be had, and the remedy."""
    if name in PREDICTED:
        return "the trees were recorded without it"
    if any(kind.name == name for kind in all_kinds()):
        return "is counted from traces; give --traces DIR"
    return f"is none of oracle, {', '.join(kind.name for kind in all_kinds())}"


def replay_sources(trees: TreeSet, traces: Traces | None = None) -> dict[str, FootprintSource]:
    """The sources that need no record, by name; those that are counted from traces only where these are given."""
    highest = [max([position.root, *position.tokens_M]) for position in trees.positions]
    highest += [] if traces is None else [item.input_ids.max() for item in traces]
    vocab_size = 1 + int(max(highest, default=0))
    found = {k.name: k.replay_source(traces, trees.identity.num_experts, vocab_size) for k in all_kinds()}
    return {name: source for name, source in found.items() if source is not None}


def combinations(
    policies: Sequence[str],
    sources: Sequence[str],
    gammas: Sequence[int],
    epsilons: Sequence[float] = (EPSILON,),
    options: tuple[tuple[str, object], ...] = (),
) -> list[Combination]:
    """Every policy × footprint source × γ × ε; policies that need no footprints once a γ."""
    found = []
    for gamma in gammas:
        for policy in policies:
            known = {"policy": policy, "gamma": gamma, "options": options}
            if RuleConfig(policy, gamma, **dict(options)).build().needs_footprints:
                pairs = [(source, epsilon) for source in sources for epsilon in epsilons]
                found += [Combination(**known, footprints=source, epsilon=epsilon) for source, epsilon in pairs]
            else:
                found.append(Combination(**known))
    return found


class Replay:
    """Replays the positions of `trees`; `sources`: footprint sources that need no record, as `replay_sources` finds."""

    def __init__(self, trees: TreeSet, sources: Sources | None = None) -> None:
        self.trees = trees
        self.sources = replay_sources(trees) if sources is None else sources
        self._before = _experts_before(trees)
        self.pools = list(_pools(trees, self._before))

    def steps(self, combination: Combination) -> dict[str, Steps]:
        """Each prompt's steps, by prompt id. Raises InputError for a footprint source that is not there."""
        chooser = combination.build()
        if chooser.learns:
            return {name: self._go_along(chooser, combination, span) for name, span in self.trees.spans.items()}
        X, L = len(self.trees.positions), self.trees.identity.num_layers
        every = Steps(np.ones(X, np.int64), np.ones(X, np.int64), np.zeros((X, L), np.int64))
        chooser.reset(X, self.trees.identity.seed)
        for pools in self.pools:
            self._step(every, pools, self._choose(pools, chooser, combination))
        taken = {prompt_id: _walk(every.emitted_S, span) for prompt_id, span in self.trees.spans.items()}
        return {name: every.at(at_S) for name, at_S in taken.items()}

    def _go_along(self, chooser: Selector, combination: Combination, span: range) -> Steps:
        """One prompt's steps one after the other, for a selector that learns from them."""
        X, L = len(span), self.trees.identity.num_layers
        every = Steps(np.ones(X, np.int64), np.ones(X, np.int64), np.zeros((X, L), np.int64))
        chooser.reset(1, self.trees.identity.seed)
        at, taken, measured = 0, [], []
        while at < X:
            number = np.array([span.start + at])
            pools = _stacked(number, [self.trees.positions[span.start + at]], self._before[number])
            chosen_1N = self._choose(pools, chooser, combination)
            self._step(every, replace(pools, numbers_B=np.array([at])), chosen_1N)
            experts_1NLK = pools.ids["oracle"][:, chosen_1N[0]].long()
            kept_N = (pools.accepted_BN & chosen_1N)[chosen_1N].nonzero()[:, 0]
            measured.append(chooser.observe(pools.trees.pack(chosen_1N), experts_1NLK, [kept_N.tolist()]))
            taken.append(at)
            at += int(every.emitted_S[at])
        return replace(every.at(np.array(taken, np.int64)), measured=measured)

    def _choose(self, pools: Pools, chooser: Selector, combination: Combination) -> Tensor:
        """The nodes that would be verified, bool [B, N]: the roots alone where nothing would be drafted."""
        if not chooser.wants_drafts():
            return pools.trees.parents_BN < 0
        footprints = None
        if chooser.needs_footprints:
            footprints = pools.footprints(combination.footprints, self.sources, self.trees.identity.num_experts)
        return chooser.choose(pools.trees, footprints)

    def _step(self, every: Steps, pools: Pools, chosen_BN: Tensor) -> None:
        """Write down what the chosen nodes give at the pools' positions."""
        depth_BN = pools.trees.depth_BN * (pools.accepted_BN & chosen_BN)
        every.emitted_S[pools.numbers_B] = 1 + depth_BN.amax(1).numpy()
        every.verified_S[pools.numbers_B] = chosen_BN.sum(1).numpy()
        every.active_SL[pools.numbers_B] = self._active(pools, chosen_BN).numpy()

    def _active(self, pools: Pools, chosen_BN: Tensor) -> Tensor:
        """Unique experts of the chosen nodes, int64 [B, L]."""
        ids_BNLK = pools.ids["oracle"].long()
        B, N, L, K = ids_BNLK.shape
        padded = ids_BNLK.where(chosen_BN[:, :, None, None], ids_BNLK[:, :1])  # others count as the root
        ids_BLM = padded.transpose(1, 2).reshape(B, L, N * K)
        return as_footprints(ids_BLM, self.trees.identity.num_experts).sum(-1)


def _walk(emitted_X: np.ndarray, span: range) -> np.ndarray:
    """The positions of `span` at which a step begins, int64 [S]."""
    emitted, at, taken = emitted_X[span.start : span.stop].tolist(), 0, []
    while at < len(emitted):
        taken.append(span.start + at)
        at += emitted[at]
    return np.array(taken, np.int64)


def _pools(trees: TreeSet, before: np.ndarray) -> Iterator[Pools]:
    """All positions in batches of one width and of bounded size."""
    numbers = defaultdict(list)
    for number, position in enumerate(trees.positions):
        numbers[position.width].append(number)
    for width, group in numbers.items():
        node_bytes = trees.identity.num_layers * trees.identity.num_experts
        size = max(1, BATCH_BYTES // (width * node_bytes))
        for start in range(0, len(group), size):
            batch = np.array(group[start : start + size])
            yield _stacked(batch, [trees.positions[number] for number in batch], before[batch])


def _experts_before(trees: TreeSet) -> np.ndarray:
    """int16 [X, L, K]: what the root of the position before used, -1 at a text's first."""
    L, _, K = trees.identity.counts
    roots_XLK = [position.experts_true_NLK[0] for position in trees.positions]
    before_XLK = np.full((len(roots_XLK), L, K), -1, np.int16)
    for span in trees.spans.values():
        if len(span) > 1:
            before_XLK[span.start + 1 : span.stop] = roots_XLK[span.start : span.stop - 1]
    return before_XLK


def _stacked(numbers_B: np.ndarray, positions: list[Position], before_BLK: np.ndarray) -> Pools:
    found = [{"oracle": position.experts_true_NLK, **position.predicted} for position in positions]
    everywhere = [source for source in found[0] if all(source in ids for ids in found)]
    ids = {source: torch.from_numpy(np.stack([ids[source] for ids in found])) for source in everywhere}
    parents_BN = _with_root(positions, "parents_M", -2) + 1
    depth_BN = _with_root(positions, "depth_M", 0)
    trees = DraftTrees(
        torch.cat([torch.tensor([[p.root] for p in positions]), _with_root(positions, "tokens_M", 0)[:, 1:]], dim=1),
        parents_BN,
        _cumulative(parents_BN, _with_root(positions, "prob_M", 1)),
        depth_BN,
        torch.ones_like(depth_BN, dtype=torch.bool),
        int(depth_BN.max()),
    )
    return Pools(numbers_B, trees, _with_root(positions, "accepted_M", True), ids, torch.from_numpy(before_BLK))


def _with_root(positions: list[Position], name: str, root: float) -> Tensor:
    """A column of the positions as [B, N], `root` first; integers as int64."""
    column_BM = torch.from_numpy(np.stack([getattr(position, name) for position in positions]))
    whole = column_BM.dtype in (torch.int16, torch.int32)
    return torch.nn.functional.pad(column_BM.long() if whole else column_BM, (1, 0), value=root)


def _cumulative(parents_BN: Tensor, conditional_BN: Tensor) -> Tensor:
    """float32 [B, N]: products of conditional probabilities from the root, multiplied in the drafters' order."""
    prob_BN = conditional_BN.clone()
    for node in range(1, prob_BN.shape[1]):
        prob_BN[:, node] *= prob_BN.gather(1, parents_BN[:, node, None])[:, 0]
    return prob_BN
