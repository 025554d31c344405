"""Laws of selectors along a text: they may skip drafting, choose fewer nodes, and learn, live and in replay alike."""

import pytest
import torch

from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.replay.stepping import Combination, Replay
from ecospec.inference.selection.base import Selector
from ecospec.inference.selection.config import selector
from ecospec.inference.tree import tree_from_levels
from ecospec.predictor.kinds.predictor.source import PredictorFootprints
from tests.recording import PROMPTS, SOURCES, WithHidden, draws, ids_of, recorded, session
from tests.stand_ins import GREEDY, SAMPLED, NoisyOracle, tiny_predictor
from tests.tiny import VOCABULARY, tiny_model


class Moody(Selector):
    """EcoSpec's rule, but at two steps in three nothing is drafted."""

    needs_footprints = learns = True

    def __init__(self, every: int = 3) -> None:
        self.every, self.rule, self.steps = every, selector("marginal", 5), 0

    def reset(self, rows, seed=0):
        self.rule.reset(rows, seed)
        self.steps = 0

    def wants_drafts(self):
        self.steps += 1
        return self.steps % self.every == 0

    def choose(self, trees, footprints_BNLE=None, covered_BLE=None):
        return self.rule.choose(trees, footprints_BNLE, covered_BLE)

    def describe(self):
        return {"selection": "moody", "gamma": None}


class Wary(Selector):
    """EcoSpec's rule with two nodes after a step that accepted no draft, and with six otherwise."""

    needs_footprints = learns = True

    def __init__(self) -> None:
        self.rules, self.bold = {False: selector("marginal", 2), True: selector("marginal", 6)}, [True]

    def reset(self, rows, seed=0):
        self.bold = [True] * rows

    def keep_rows(self, rows):
        self.bold = [self.bold[row] for row in rows]

    def choose(self, trees, footprints_BNLE=None, covered_BLE=None):
        chosen = {bold: rule.choose(trees, footprints_BNLE) for bold, rule in self.rules.items()}
        return torch.stack([chosen[bold][row] for row, bold in enumerate(self.bold)])

    def observe(self, trees, experts_BNLK, kept):
        assert experts_BNLK.shape[:2] == trees.tokens_BN.shape
        self.bold = [len(path) > 1 for path in kept]

    def describe(self):
        return {"selection": "wary", "gamma": None}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_step_that_drafts_nothing_loses_nothing(source, options):
    """The drafter asserts that it is fed every position once; text and experts are plain decoding's."""
    model = tiny_model("qwen3_moe", seed=2)
    ids = torch.randint(3, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 40, "pad_token_id": 0, **options}
    torch.manual_seed(5)
    expected = model.generate(ids, **settings)
    drafter = WithHidden(NoisyOracle(expected[0].tolist(), 0.7))
    torch.manual_seed(5)
    out, run = generate_with(model, Method(drafter, Moody(), SOURCES[source]()), ids, **settings)
    assert torch.equal(out, expected)
    verified = [step.verified[0] for step in run.steps]
    assert {1} < set(verified), "some steps draft, some do not"


class Noting(PredictorFootprints):
    """Keeps what it said after each length of the text."""

    def __init__(self, predictor):
        super().__init__(predictor)
        self.said = {}

    def footprints(self, texts, trees, routed=None):
        found = super().footprints(texts, trees, routed)
        self.said[len(texts[0])] = trees.tokens_BN, found
        return found


def test_a_predictor_that_was_skipped_says_what_it_would_have_said():
    """Its cache catches up: footprints are those of a source asked at every step."""
    model = tiny_model("qwen3_moe", seed=2)
    predictor = tiny_predictor(model.get_input_embeddings())
    ids = torch.randint(3, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(0))
    truth = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    always, seldom = Noting(predictor), Noting(predictor)
    for source, every in ((always, 1), (seldom, 3)):
        method = Method(Straight(truth), Moody(every), source)
        generate_with(model, method, ids, max_new_tokens=40, pad_token_id=0, **GREEDY)
    both = sorted(always.said.keys() & seldom.said.keys())
    assert len(both) > 3
    for at in both:
        assert all(torch.equal(*pair) for pair in zip(always.said[at], seldom.said[at], strict=True)), at


class Straight:
    """Drafts one wrong token, always: every step emits one token."""

    feature_layers = (2,)

    def __init__(self, truth):
        self.truth = truth

    def reset(self):
        self.seen = 0

    def draft(self, ids_T, features_nF):
        self.seen += len(features_nF)
        assert self.seen == len(ids_T) - 1
        wrong = (self.truth[len(ids_T)] + 1) % VOCABULARY if len(ids_T) < len(self.truth) else 5
        return tree_from_levels(ids_T[-1], [(torch.tensor([wrong]), torch.tensor([0]), torch.tensor([0.5]))])


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("made", [Wary, Moody])
def test_a_selector_that_learns_or_skips_drafting_replays_as_it_decodes(sampled, made, monkeypatch):
    at, trees = session(sampled, True), recorded(sampled, True)
    monkeypatch.setattr(Combination, "build", lambda self: made())
    replayed = Replay(trees).steps(Combination("marginal", 6, "predictor"))
    plain = Replay(trees)
    for prompt_id in PROMPTS:
        method = Method(WithHidden(at.drafter(at.truth[prompt_id])), made(), SOURCES["predictor"]())
        parts = {"generators": [draws(prompt_id)], "eos_token_id": at.eos[prompt_id]}
        _, run = generate_with(at.model, method, ids_of(prompt_id), **parts, **at.options)
        found = replayed[prompt_id]
        live = [(step.emitted[0], step.verified[0], step.active_by_layer()) for step in run.steps]
        assert live == list(
            zip(found.emitted_S.tolist(), found.verified_S.tolist(), found.active_SL.tolist(), strict=True)
        )
    monkeypatch.undo()
    careless = plain.steps(Combination("marginal", 6, "predictor"))
    assert any(careless[name].active_SL.tolist() != replayed[name].active_SL.tolist() for name in PROMPTS), (
        "what was learnt must matter somewhere"
    )
