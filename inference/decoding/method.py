"""How one method decodes: a drafter, a selector, and a source of footprints where the selector asks for them.

Letters: B texts, N tree nodes (root first), n new positions of a text, L MoE layers, K experts per token, F width of
the drafter's features.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.inference.decoding.statistics import StepClock
from ecospec.inference.drafters.base import BatchDrafter, Drafter, EachRow
from ecospec.inference.footprints import FootprintSource, needs_hidden
from ecospec.inference.selection.base import Selector, footprints_missing
from ecospec.inference.selection.config import selector
from ecospec.inference.target.session import Pass
from ecospec.inference.tree import DraftTrees, roots_only


@dataclass
class Method:
    """No drafter: plain decoding. The selector is by default EcoSpec's rule at γ = 4, which takes `footprints`.

    Raises InputError where footprints are needed and not given, or where the
    drafter cannot feed their source.
    """

    drafter: Drafter | BatchDrafter | None = None
    selector: Selector | None = None
    footprints: FootprintSource | None = None

    def __post_init__(self) -> None:
        if self.drafter is None:
            return
        self.selector = selector() if self.selector is None else self.selector
        if not isinstance(self.drafter, BatchDrafter):
            self.drafter = EachRow(self.drafter)
        if self.selector.needs_footprints and self.footprints is None:
            raise footprints_missing(self.selector.describe()["selection"])
        if needs_hidden(self.footprints):
            self.drafter.give_hidden()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.feature_layers) if self.drafter else ()

    def begin(self, rows: int, seed: int = 0) -> "Proposer":
        """What proposes trees along `rows` new texts; `seed` is of the selector's own draws."""
        for part in (self.drafter, self.footprints):
            if part is not None:
                part.reset(rows)
        if self.selector is not None:
            self.selector.reset(rows, seed)
        return Proposer(self, rows)


class Backlog:
    """What a part has not been told yet of each text: rows [n, ...] that wait until the part is asked."""

    def __init__(self, rows: int) -> None:
        self._waiting: list[list[Tensor]] = [[] for _ in range(rows)]

    def add(self, values: list[Tensor]) -> None:
        """New positions of each text."""
        for waiting, value in zip(self._waiting, values, strict=True):
            waiting.append(value)

    def take(self) -> list[Tensor]:
        """All that waits, a tensor a text; nothing waits afterwards."""
        told = [waiting[0] if len(waiting) == 1 else torch.cat(waiting) for waiting in self._waiting]
        self._waiting = [[] for _ in told]
        return told

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all texts but `rows`."""
        self._waiting = [self._waiting[row] for row in rows]


class Proposer:
    """Drafts, predicts and selects along one batch of texts.

    A step may draft nothing. What the drafter or the footprint source was not told then is kept, and told when they
    are asked next.
    """

    def __init__(self, method: Method, rows: int) -> None:
        self.method = method
        asks = method.drafter is not None and method.selector.drafts  # else nobody would ever empty a backlog
        self._features = Backlog(rows) if asks and method.feature_layers else None
        self._routed = Backlog(rows) if asks and method.footprints else None

    def propose(self, texts: list[Tensor], clock: StepClock) -> DraftTrees:
        """The trees to verify, of texts [T] that end with their roots."""
        method = self.method
        if method.drafter is None or not method.selector.wants_drafts():
            return roots_only(torch.stack([ids_T[-1] for ids_T in texts]))
        with clock.phase("draft"):
            trees = method.drafter.draft(texts, self._features.take() if self._features else None)
        footprints = None
        with clock.phase("predict"):
            if method.footprints is not None:
                footprints = method.footprints.footprints(texts, trees, self._routed.take())
        with clock.phase("select"):
            return trees.pack(method.selector.choose(trees, footprints), method.selector.most(trees))

    def observe(self, trees: DraftTrees, experts_BNLK: Tensor, kept: list[list[int]]) -> Mapping[str, object]:
        """Let the selector learn from a step; what it measured, see `Selector`."""
        selector = self.method.selector
        return selector.observe(trees, experts_BNLK, kept) if selector is not None else {}

    def learn(self, told: Pass, rows: list[int], kept: list[list[int]]) -> None:
        """Note what a pass told of the positions `kept` of its texts; texts but `rows` have ended."""
        for backlog, values in ((self._features, told.features_BNF), (self._routed, told.experts_BNLK)):
            if backlog is not None:
                backlog.add([values[row, torch.tensor(kept[row])] for row in range(len(kept))])
        if 0 < len(rows) < len(kept):
            self._keep_rows(rows)

    def _keep_rows(self, rows: list[int]) -> None:
        method = self.method
        parts = (method.drafter, method.footprints, method.selector, self._features, self._routed)
        for part in filter(None, parts):
            part.keep_rows(rows)
