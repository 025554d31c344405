"""The drafter interface. A stand-in for tests or a new kind of drafter is these two methods and one attribute."""

from typing import Protocol

from torch import Tensor

from ecospec.inference.tree import DraftTree


class Drafter(Protocol):
    """Proposes continuations of a text that grows.

    `feature_layers`: indices into the target's `hidden_states` (0: the embeddings) whose concatenation it is fed.
    """

    feature_layers: tuple[int, ...]

    def reset(self) -> None:
        """Forget the text: a new one begins."""

    def draft(self, ids_T: Tensor, features_nF: Tensor) -> DraftTree:
        """A tree rooted at the last of the ids.

        `ids_T` int64 [T]: the whole text so far; its last token, the root, has not been through the target yet.
        `features_nF` [n, F]: the target's features of the n positions before the root that are new since the last call.
        """
