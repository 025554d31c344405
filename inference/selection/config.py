"""Keys of a selection rule, and the one place where a policy's name becomes a selector. Loads no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ecospec.errors import InputError

if TYPE_CHECKING:
    from ecospec.inference.selection.base import Selector

Policy = Literal["marginal", "confidence", "global", "random"]


@dataclass
class RuleConfig:
    policy: Policy = "marginal"
    """Which drafts to verify: `marginal` (EcoSpec), `confidence` (EAGLE), `global` (its static ablation), `random`."""
    gamma: int = 4
    """Tokens verified per step, the root included."""
    epsilon: float = 1e-6
    """Added to the number of new (layer, expert) pairs; larger values approach EAGLE's rule."""
    joint: bool = False
    """In a batch, choose over all texts at once with one shared set of experts; else each text alone."""

    def __post_init__(self) -> None:
        """Raises InputError naming the key and the remedy."""
        if self.policy not in get_args(Policy):
            raise InputError(f"--selection.policy {self.policy}: unknown; choose one of {', '.join(get_args(Policy))}")
        if not isinstance(self.gamma, int) or self.gamma < 1:
            rule = "must be a whole number from 1 on (1 verifies the root alone)"
            raise InputError(f"--selection.gamma {self.gamma}: {rule}")
        if not 0 < self.epsilon < math.inf:
            raise InputError(f"--selection.epsilon {self.epsilon}: must be positive and finite")

    def build(self) -> "Selector":
        """A selector of this policy."""
        from ecospec.inference.selection.greedy import SCORES, GreedySelector  # torch loads only here

        return GreedySelector(self.policy, SCORES[self.policy], self.gamma, self.epsilon, self.joint)


def selector(policy: str = "marginal", gamma: int = 4, epsilon: float = 1e-6, joint: bool = False) -> "Selector":
    """A selector by the name of its policy. Raises InputError for an unknown one, γ < 1 or ε <= 0."""
    return RuleConfig(policy, gamma, epsilon, joint).build()
