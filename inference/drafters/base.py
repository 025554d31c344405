"""The drafter interface: for one text (a stand-in is a few lines), and for several texts at once.

Letters: B texts, T tokens of a text, n new positions, F width of the target's features, N tree nodes, D draft
vocabulary, H hidden width of a draft head, S cached positions.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache

from ecospec.errors import InputError
from ecospec.inference.drafters.kind import no_hidden
from ecospec.inference.tree import DraftTree, DraftTrees, stack


class Drafter(Protocol):
    """Proposes continuations of one text that grows.

    `feature_layers`: which of the target's hidden states it is fed, concatenated: 0 the embeddings, j the output of the
    j-th decoder layer (the last one's before the final norm), `FINAL` the last hidden state after the final norm.
    """

    feature_layers: Sequence[int]

    def reset(self) -> None:
        """Forget the text: a new one begins."""

    def draft(self, ids_T: Tensor, features_nF: Tensor | None) -> DraftTree:
        """A tree rooted at the last of the ids.

        `ids_T` int64 [T]: the whole text so far; its last token, the root, has not been through the target yet.
        `features_nF` [n, F]: the target's features of the n positions before the root that are new since the last
        call; None without feature layers.
        """


class BatchDrafter(ABC):
    """Proposes continuations of B texts in one go; `feature_layers` as in `Drafter`."""

    feature_layers: Sequence[int] = ()

    @abstractmethod
    def reset(self, rows: int) -> None:
        """Forget everything: `rows` new texts begin."""

    @abstractmethod
    def draft(self, texts: list[Tensor], features: list[Tensor] | None) -> DraftTrees:
        """The trees of all texts; `texts` and `features` hold what `Drafter.draft` takes, a row each."""

    @abstractmethod
    def keep_rows(self, rows: list[int]) -> None:
        """Drop all texts but `rows`: from now on these are drafted, in this order."""

    def give_hidden(self) -> None:
        """From now on trees have `hidden_BNH`. Raises InputError for a drafter without hidden input."""
        raise no_hidden()


class EachRow(BatchDrafter):
    """Several texts for a drafter of one text: a shallow copy of it drafts each."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.rows: list[Drafter] = []

    def reset(self, rows: int) -> None:
        """See `BatchDrafter`."""
        self.rows = [copy.copy(self.drafter) for _ in range(rows)]
        for row in self.rows:
            row.reset()

    def draft(self, texts: list[Tensor], features: list[Tensor] | None) -> DraftTrees:
        """See `BatchDrafter`. Raises InputError for a tree that is not rooted at its text's last token."""
        given = features or [None] * len(texts)
        drafts = [row.draft(*pair) for row, *pair in zip(self.rows, texts, given, strict=True)]
        if not all(isinstance(tree, DraftTree) for tree in drafts):
            raise InputError("drafter: `draft` must return a DraftTree; where nothing is to be drafted, its root alone")
        trees = stack(drafts)
        roots_B = torch.stack([ids_T[-1] for ids_T in texts])
        if not (torch.equal(trees.tokens_BN[:, 0], roots_B) and bool((trees.parents_BN[:, 0] == -1).all())):
            raise InputError("drafter: a tree must begin with its root, the last token of the text, with parent -1")
        return trees

    def keep_rows(self, rows: list[int]) -> None:
        """See `BatchDrafter`."""
        self.rows = [self.rows[row] for row in rows]


class DraftHead(Protocol):
    """A neural draft module that `TreeDrafter` drives: one forward per level, its own cache, top-k of its logits.

    `first_token`: 1 where entry i of its cache pairs the target's features of token i with token i + 1 (EAGLE-3, MTP),
    0 where it reads tokens alone (a draft language model). `feature_layers` as in `Drafter`.
    """

    feature_layers: Sequence[int]
    first_token: int

    def new_cache(self) -> Cache:
        """An empty cache for its own attention."""

    def enter(self, features_BTF: Tensor) -> Tensor:
        """The target's features as the head's hidden input [B, T, H]. Not called without feature layers."""

    def forward(
        self, ids_BT: Tensor, hidden_BTH: Tensor | None, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache
    ) -> Tensor:
        """Output [B, T, H] for tokens and hidden input, appending T entries to `cache`.

        `seen_BTS` bool: which of the cached and appended entries each position sees; None: causal, the cache is empty.
        """

    def feedback(self, out_BTH: Tensor) -> Tensor | None:
        """What the children of a node get as hidden input when its output is `out_BTH`."""

    def logits(self, out_BTH: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., D], float32."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft-vocabulary ids."""
