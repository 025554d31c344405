"""A tiny target whose drafter and footprints are pure functions of the text: recorded and live, they are the same.

Letters: L MoE layers, E experts, K experts per token, H width of the drafts' hidden input.
"""

import hashlib
from dataclasses import replace
from functools import cache

import torch

from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.statistics import Run
from ecospec.inference.drafters.base import EachRow
from ecospec.inference.footprints import as_footprints
from ecospec.inference.replay.record import TreeRecorder
from ecospec.inference.replay.stepping import Combination
from ecospec.inference.replay.treefile import Identity, TreeSet
from ecospec.inference.tree import root_only, tree_from_levels
from ecospec.predictor.kinds.draft_mlp.source import DraftMLPFootprints
from ecospec.predictor.kinds.last_step.source import LastStepFootprints
from ecospec.predictor.kinds.linear.source import LinearFootprints
from tests.stand_ins import GREEDY, SAMPLED, DraftMLPStandIn, LinearStandIn
from tests.tiny import VOCABULARY, tiny_model

E, K, L, H = 8, 2, 3, 6
DEPTH, WIDTH = 3, 7  # of the drafter's trees
NEW_TOKENS, END_PLACE = 28, 15  # where a text is to end by an end token, counted from its prompt
PROMPTS = {"maths/0": 4, "maths/1": 6, "code/0": 9}  # lengths


class HashedOracle:
    """Drafts the text's true continuation two times in three, beside a wrong token: a pure function of the text."""

    feature_layers = (2,)

    def __init__(self, truth: list[int]) -> None:
        self.truth = truth

    def reset(self) -> None:
        self.seen = 0

    def draft(self, ids_T, features_nF):
        self.seen += len(features_nF)
        assert self.seen == len(ids_T) - 1, "features of every token before the root, once each"
        levels, parent = [], 0
        for depth in range(DEPTH):
            at = len(ids_T) + depth
            dice = hashlib.sha256(f"{at} {ids_T[-1]} {depth}".encode()).digest()
            good = (self.truth[at] + (dice[0] % 3 == 0)) % VOCABULARY
            bad = (good + 7) % VOCABULARY
            pair = [good, bad] if dice[1] % 2 else [bad, good]
            prob = torch.tensor([0.5 + dice[2] / 600, dice[3] / 600])
            levels.append((torch.tensor(pair), torch.tensor([parent, parent]), prob))
            parent = 1 + 2 * depth + pair.index(good)
        return tree_from_levels(ids_T[-1], levels)


class Shrinking(HashedOracle):
    """As its base, at every third place the root alone: pools of unequal width."""

    def draft(self, ids_T, features_nF):
        tree = super().draft(ids_T, features_nF)
        return tree if len(ids_T) % 3 else root_only(ids_T[-1])


class WithHidden(EachRow):
    """Gives each node a hidden input that depends on its token and its text's length."""

    def give_hidden(self) -> None:
        """It always does."""

    def draft(self, texts, features):
        trees = super().draft(texts, features)
        seed_BN = trees.tokens_BN + torch.tensor([[len(ids_T)] for ids_T in texts])
        return replace(trees, hidden_BNH=torch.sin(seed_BN[..., None] * torch.arange(1.0, H + 1)))


class HashedFootprints:
    """Two different experts a layer, from the token's id alone."""

    def reset(self, rows) -> None: ...

    def keep_rows(self, rows) -> None: ...

    def footprints(self, texts, trees, routed):
        first = trees.tokens_BN[..., None] + torch.arange(L)
        return as_footprints(torch.stack([first, first + 1 + trees.tokens_BN[..., None] // E % 7], -1) % E, E)


SOURCES = {
    "predictor": HashedFootprints,
    "linear": lambda: LinearFootprints(LinearStandIn((L, E, K))),
    "draft_mlp": lambda: DraftMLPFootprints(DraftMLPStandIn((L, E, K), H)),
    "last_step": lambda: LastStepFootprints(E),
}


@cache
def target(family: str = "qwen3_moe"):
    model = tiny_model(family, seed=1)
    model.generation_config.eos_token_id = None
    return model


def ids_of(prompt_id: str):
    length = PROMPTS[prompt_id]
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def draws(prompt_id: str):
    return torch.Generator().manual_seed(PROMPTS[prompt_id])


class Session:
    """A model with a drafter that knows each prompt's text; decodes live, and records. `extra`: options by name."""

    def __init__(
        self, sampled: bool, ends: bool, family: str = "qwen3_moe", drafter=HashedOracle, extra: tuple = ()
    ) -> None:
        self.model, self.drafter = target(family), drafter
        self.options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **(SAMPLED if sampled else GREEDY)}
        self.options |= dict(extra)
        self.temperature = float(sampled)
        self.truth = {prompt_id: self.long_text(prompt_id) for prompt_id in PROMPTS}
        self.eos = {name: text[PROMPTS[name] + END_PLACE] if ends else None for name, text in self.truth.items()}

    def long_text(self, prompt_id: str) -> list[int]:
        longer = {**self.options, "max_new_tokens": NEW_TOKENS + 2 * DEPTH}
        parts = {"generators": [draws(prompt_id)]}
        return generate_with(self.model, Method(), ids_of(prompt_id), **parts, **longer)[0][0].tolist()

    def live(self, prompt_id: str, one: Combination) -> Run:
        source = SOURCES[one.footprints]() if one.footprints else None
        method = Method(WithHidden(self.drafter(self.truth[prompt_id])), one.build(), source)
        parts = {"generators": [draws(prompt_id)], "eos_token_id": self.eos[prompt_id]}
        return generate_with(self.model, method, ids_of(prompt_id), **parts, **self.options)[1]

    def record(self) -> TreeSet:
        positions, datasets = [], {name: name.split("/")[0] for name in PROMPTS}
        for prompt_id, truth in self.truth.items():
            sources = {name: make() for name, make in SOURCES.items()}
            trees = TreeRecorder(self.model, WithHidden(self.drafter(truth)), DEPTH, sources)
            parts = {"generator": draws(prompt_id), "eos_token_id": self.eos[prompt_id]}
            positions += trees.record(prompt_id, ids_of(prompt_id), **parts, **self.options)
        folders = {"linear": "hashed/linear", "draft_mlp": "hashed/mlp"}
        parts = ("hashed", "hashed", self.temperature, 0, L, E, K, {"steps": DEPTH, "topk": 2}, datasets, folders)
        return TreeSet(Identity("tiny", "0" * 64, *parts), positions, trees.seconds())


@cache
def session(*args, **kwargs) -> Session:
    return Session(*args, **kwargs)


@cache
def recorded(*args, **kwargs) -> TreeSet:
    return session(*args, **kwargs).record()


@cache
def live(at: Session, prompt_id: str, one: Combination) -> Run:
    return at.live(prompt_id, one)
