"""The red line: whatever drafts and whatever selects, the text is plain decoding's, greedy and sampled."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.decoding.generation import CustomGenerate, generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.picking import Picker, Row, walk
from ecospec.inference.selection.config import selector
from ecospec.inference.tree import DraftTree, stack
from ecospec.tracing.target.recorder import RoutingRecorder
from tests.selecting import POLICIES
from tests.stand_ins import GREEDY, SAMPLED, EmptyDrafter, HashedFootprints, NoisyOracle
from tests.tiny import VOCABULARY, tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
NEW_TOKENS = 60


def plain(model, ids, seed, **options):
    torch.manual_seed(seed)
    return model.generate(ids, max_new_tokens=NEW_TOKENS, **options)


def speculative(model, ids, seed, drafter, policy="marginal", gamma=4, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW_TOKENS, **options}
    return generate(model, ids, drafter=drafter, predictor=HashedFootprints(), policy=policy, gamma=gamma, **options)


def model_and_prompt(family, seed, length=6):
    model = tiny_model(family, seed)
    model.generation_config.eos_token_id = None
    return model, torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings_for_good_and_bad_drafters(family, seed, options):
    model, ids = model_and_prompt(family, seed)
    expected = plain(model, ids, seed, **options)
    for skill in (0.0, 0.6, 1.0):
        drafter = NoisyOracle(expected[0].tolist(), skill, seed)
        assert torch.equal(speculative(model, ids, seed, drafter, **options), expected)
    assert torch.equal(speculative(model, ids, seed, EmptyDrafter(), **options), expected)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
def test_the_text_is_plain_decodings_under_every_policy_and_budget(policy, gamma):
    model, ids = model_and_prompt("qwen3_moe", 1)
    for options in (GREEDY, SAMPLED):
        expected = plain(model, ids, 3, **options)
        drafter = NoisyOracle(expected[0].tolist(), 0.7)
        assert torch.equal(speculative(model, ids, 3, drafter, policy, gamma, **options), expected)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_processors_and_stops_act_as_in_generate(options):
    model, ids = model_and_prompt("qwen3_moe", 2)
    middle = int(plain(model, ids, 0, **options)[0, 30])
    cases = [
        {"eos_token_id": [middle, 3]},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": [middle]},
        *({"max_new_tokens": count} for count in range(1, 8)),
    ]
    for case in cases:
        settings = {"max_new_tokens": NEW_TOKENS, **options, **case}
        torch.manual_seed(0)
        expected = model.generate(ids, **settings)
        drafter = NoisyOracle(expected[0].tolist(), 0.9)
        assert torch.equal(speculative(model, ids, 0, drafter, **settings), expected), case


def test_a_perfect_drafter_fills_every_step_and_a_hostile_one_none():
    model, ids = model_and_prompt("qwen3_moe", 0)
    truth = plain(model, ids, 0, **GREEDY)[0].tolist()
    for skill, emitted in ((1.0, 4), (0.0, 1)):
        method = Method(NoisyOracle(truth, skill), selector("confidence", 7))
        _, run = generate_with(model, method, ids, max_new_tokens=NEW_TOKENS, **GREEDY)
        assert {tuple(step.emitted) for step in run.steps[:-1]} == {(emitted,)}
        assert run.new_tokens == NEW_TOKENS


def test_active_experts_are_those_that_the_routers_chose_for_the_verified_tokens():
    model, ids = model_and_prompt("qwen3_moe", 0)
    method = Method(EmptyDrafter(), selector("confidence"))
    out, run = generate_with(model, method, ids, max_new_tokens=20, **GREEDY)
    with RoutingRecorder(model) as recorder:
        model(out)
        experts_TLK = recorder.take()
    traced = torch.cat([step.experts_BNLK[0] for step in run.steps])
    assert torch.equal(traced.sort(-1).values, experts_TLK[ids.shape[1] : -1].sort(-1).values)
    assert run.active_experts == 2.0  # one token, top-2
    assert run.acceptance_length == 1.0


def test_the_streamer_receives_every_token_once():
    class Collector:
        def __init__(self):
            self.ids, self.ended = [], False

        def put(self, value):
            self.ids += value.reshape(-1).tolist()

        def end(self):
            self.ended = True

    model, ids = model_and_prompt("qwen3_moe", 0)
    expected = plain(model, ids, 0, **GREEDY)[0].tolist()
    collector = Collector()
    method = Method(NoisyOracle(expected, 0.7), selector("confidence"))
    generate_with(model, method, ids, streamer=collector, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert collector.ids == expected
    assert collector.ended


def ends_with(token):
    return StoppingCriteriaList([EosTokenCriteria(token)])


def never_ending():
    return Picker(LogitsProcessorList(), ends_with(-1), False)


class Script:
    """Never, always or sometimes: logits whose argmax at node i is `choices[i]`."""

    def __init__(self, choices):
        self.logits = torch.nn.functional.one_hot(torch.tensor(choices), 10).float()[None]


@pytest.mark.parametrize(
    ("choices", "expected", "kept"),
    [([9, 9, 9, 9, 9], [9], [0]), ([1, 3, 9, 4, 5], [1, 3, 4, 5], [0, 1, 3, 4]), ([2, 3, 7, 4, 5], [2, 7], [0, 2])],
    ids=["never", "always", "sometimes"],
)
def test_the_walk_follows_the_targets_choices(choices, expected, kept):
    tree = DraftTree(
        torch.tensor([0, 1, 2, 3, 4]), torch.tensor([-1, 0, 0, 1, 3]), torch.ones(5), torch.tensor([0, 1, 1, 2, 3])
    )
    row = Row(torch.tensor([0]), never_ending())
    (step,) = walk(stack([tree]), Script(choices).logits, [row])
    assert row.ids_T[1:].tolist() == step.emitted == expected
    assert step.kept == kept
    assert (step.would_emit, step.ended, step.verified) == (len(expected), False, 5)


def test_a_text_that_ends_inside_a_step_is_cut_there_but_the_step_counts_in_full():
    tree = DraftTree(torch.tensor([0, 1, 3]), torch.tensor([-1, 0, 1]), torch.ones(3), torch.tensor([0, 1, 2]))
    row = Row(torch.tensor([0]), Picker(LogitsProcessorList(), ends_with(1), False))
    (step,) = walk(stack([tree]), Script([1, 3, 5]).logits, [row])
    assert (row.ids_T.tolist(), step.emitted, step.would_emit, step.ended) == ([0, 1], [1], 3, True)


def test_what_is_not_supported_is_refused_by_name():
    with pytest.raises(InputError, match="needs footprints"):
        Method(EmptyDrafter(), selector("marginal"))


def test_return_dict_gives_the_sequences_and_the_cache_of_all_but_the_last_token():
    model, ids = model_and_prompt("qwen3_moe", 0)
    config = GenerationConfig(max_new_tokens=5, return_dict_in_generate=True, do_sample=False)
    hook = CustomGenerate(Method(EmptyDrafter(), selector("confidence")))
    out = model.generate(ids, generation_config=config, custom_generate=hook)
    assert out.sequences.shape == (1, 11)
    assert out.cache.get_seq_length() == 10
    assert hook.last_run.new_tokens == 5
