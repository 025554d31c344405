"""Keys of a selection rule, and the one place where a policy's name becomes a selector. Loads no torch."""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from ecospec.errors import InputError

if TYPE_CHECKING:
    from ecospec.inference.selection.base import Selector

EPSILON = 1e-6
Policy = Literal["marginal", "confidence", "global", "random"]


@dataclass(kw_only=True)
class RuleOptions:
    """Keys of single policies, beside those that all know: whoever adds a policy adds its own here.

    `replay` takes them too, and what a selector says of them in `describe` stands in results.
    """

    @property
    def options(self) -> dict[str, object]:
        """These keys alone."""
        return {key.name: getattr(self, key.name) for key in fields(RuleOptions)}


@dataclass
class RuleConfig(RuleOptions):
    policy: Policy = "marginal"
    """Which drafts to verify: `marginal` (EcoSpec), `confidence` (EAGLE), `global` (its static ablation), `random`."""
    gamma: int = 4
    """Tokens verified per step, the root included."""
    epsilon: float = EPSILON
    """Added to the number of new (layer, expert) pairs; larger values approach EAGLE's rule."""
    joint: bool = False
    """In a batch, choose over all texts at once with one shared set of experts; else each text alone."""

    def __post_init__(self) -> None:
        """Raises InputError naming the key and the remedy."""
        known = get_args(Policy)
        rules = {
            "policy": (self.policy in known, f"unknown; choose one of {', '.join(known)}"),
            "gamma": (
                isinstance(self.gamma, int) and self.gamma >= 1,
                "must be a whole number from 1 on (1 verifies the root alone)",
            ),
            "epsilon": (0 < self.epsilon < math.inf, "must be positive and finite"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise InputError(rule, key=f"selection.{name}", value=getattr(self, name))

    def build(self) -> "Selector":
        """A selector of this policy."""
        from ecospec.inference.selection.greedy import SCORES, GreedySelector  # torch loads only here

        return GreedySelector(self.policy, SCORES[self.policy], self.gamma, self.epsilon, self.joint)


def selector(policy: str = "marginal", gamma: int = 4, epsilon: float = EPSILON, joint: bool = False) -> "Selector":
    """A selector by the name of its policy. Raises InputError for an unknown one, γ < 1 or ε <= 0."""
    return RuleConfig(policy, gamma, epsilon, joint).build()
