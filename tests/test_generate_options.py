"""Every option of `generate` acts as in Transformers, or is refused by name."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.decoding.generation import CustomGenerate
from ecospec.inference.decoding.method import Method
from ecospec.inference.selection.config import selector
from tests.stand_ins import GREEDY, SAMPLED, EmptyDrafter, NoisyOracle
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer

NEW_TOKENS = 30
OPTIONS = {  # each of the text without it, so that it changes something
    "temperature": lambda text: 0.7,
    "top_k": lambda text: 5,
    "top_p": lambda text: 0.6,
    "min_p": lambda text: 0.1,
    "typical_p": lambda text: 0.7,
    "epsilon_cutoff": lambda text: 0.01,
    "repetition_penalty": lambda text: 1.6,
    "no_repeat_ngram_size": lambda text: 1,
    "bad_words_ids": lambda text: [text[9:10], text[14:16]],
    "suppress_tokens": lambda text: text[5:9],
    "min_new_tokens": lambda text: 12,
    "max_length": lambda text: 19,
}


@pytest.fixture(scope="module")
def model():
    model = tiny_model("qwen3_moe", 1)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))


def stock_ids(model, ids, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(ids, **options)


def both(model, ids, seed=0, **options):
    """Stock ids and ours; the global generator is left in the same state by both."""
    settings = options
    if not {"generation_config", "max_length"} & set(options):
        settings = {"max_new_tokens": NEW_TOKENS, **options}
    expected = stock_ids(model, ids, seed, **settings)
    after = torch.get_rng_state()
    drafter = NoisyOracle(expected[0].tolist(), 0.8)
    torch.manual_seed(seed)
    found = generate(model, ids, drafter=drafter, policy="confidence", **settings)
    assert torch.equal(torch.get_rng_state(), after), "later draws must not notice"
    return expected, found


def with_option(model, ids, name, seed, base):
    """Settings with the option, beside the ids that the same settings give without it."""
    plain = {"max_new_tokens": NEW_TOKENS, **base}
    text = stock_ids(model, ids, seed, **plain)[0, ids.shape[1] :].tolist()
    if name == "no_repeat_ngram_size":
        plain["temperature" if base is SAMPLED else "repetition_penalty"] = 0.3
    if name == "min_new_tokens":
        plain["eos_token_id"] = text[4]
    settings = {**plain, name: OPTIONS[name](text)}
    if name == "max_length":
        del settings["max_new_tokens"]
    return settings, stock_ids(model, ids, seed, **plain)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_stock_generates_under_every_option(model, ids, name, seed):
    settings, without = with_option(model, ids, name, seed, SAMPLED)
    expected, found = both(model, ids, seed, **settings)
    assert torch.equal(expected, found)
    assert not torch.equal(found, without), "the option must matter"
    as_object, found = both(model, ids, seed, generation_config=GenerationConfig(**settings))
    assert torch.equal(expected, found) and torch.equal(expected, as_object)


@pytest.mark.parametrize("count", range(1, 13))
def test_the_number_of_new_tokens_is_exact(model, ids, count):
    expected, found = both(model, ids, **SAMPLED, max_new_tokens=count)
    assert torch.equal(expected, found)
    assert found.shape[1] == ids.shape[1] + count


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", OPTIONS)
def test_stock_generate_with_our_hook_is_stock_generate(model, ids, base, name):
    settings, _ = with_option(model, ids, name, 3, base)
    expected, after = stock_ids(model, ids, 3, **settings), torch.get_rng_state()
    hook = CustomGenerate(Method(NoisyOracle(expected[0].tolist(), 0.8), selector("confidence")))
    assert torch.equal(stock_ids(model, ids, 3, custom_generate=hook, **settings), expected)
    assert torch.equal(torch.get_rng_state(), after)
    assert len(hook.last_run.steps) < hook.last_run.new_tokens * 0.8, "drafts must be accepted"


def test_a_text_ends_at_any_of_its_end_tokens_even_inside_a_step(model, ids):
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)[0, ids.shape[1] :].tolist()
    for place in range(2, 12):
        expected, found = both(model, ids, **GREEDY, eos_token_id=[text[place], VOCABULARY - 1])
        assert torch.equal(expected, found)
        assert found.shape[1] - ids.shape[1] == text.index(text[place]) + 1


@pytest.mark.parametrize("where", ["argument", "configuration", "model's configuration"])
def test_a_text_ends_at_a_stop_string_wherever_it_is_given(ids, where):
    model, tokenizer = tiny_model("qwen3_moe", 1, eos_token_id=None), tiny_tokenizer()
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)
    stop = tokenizer.decode(text[0, ids.shape[1] + 9 :][:2])
    settings = {"stop_strings": [stop], "max_new_tokens": NEW_TOKENS, **GREEDY}
    expected = model.generate(ids, tokenizer=tokenizer, **settings)
    if where == "configuration":
        settings = {"generation_config": GenerationConfig(**settings)}
    if where == "model's configuration":
        model.generation_config.stop_strings = settings.pop("stop_strings")
    method = {"drafter": NoisyOracle(text[0].tolist(), 1.0), "policy": "confidence"}
    assert torch.equal(generate(model, ids, tokenizer=tokenizer, **method, **settings), expected)
    assert expected.shape[1] == ids.shape[1] + 11
    assert model.generation_config.stop_strings == ([stop] if where == "model's configuration" else None)
    with pytest.raises(InputError, match="give the tokenizer too"):
        generate(model, ids, drafter=EmptyDrafter(), policy="confidence", **settings)


class Counter(LogitsProcessor, StoppingCriteria):
    """Notes every text it is shown; plain decoding shows each beginning once."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids[0].tolist())
        if scores is None:
            return torch.tensor([len(self.shown) >= 17])
        return scores


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_what_keeps_state_sees_the_calls_of_plain_decoding(model, ids, options, kind):
    stock, ours = Counter(), Counter()
    settings = {"max_new_tokens": NEW_TOKENS, **options}
    torch.manual_seed(0)
    expected = model.generate(ids, **settings, **{kind: [stock]})
    torch.manual_seed(0)
    drafter = NoisyOracle(expected[0].tolist(), 0.8)
    found = generate(model, ids, drafter=drafter, policy="confidence", **settings, **{kind: [ours]})
    assert torch.equal(expected, found)
    assert ours.shown == stock.shown
    assert len(stock.shown) == (17 if kind == "stopping_criteria" else NEW_TOKENS)


def test_the_returned_cache_goes_on_where_the_text_ends(model, ids):
    settings = {"max_new_tokens": 11, "return_dict_in_generate": True, **GREEDY}
    stock = model.generate(ids, **settings)
    drafter = NoisyOracle(stock.sequences[0].tolist(), 0.8)
    ours = generate(model, ids, drafter=drafter, policy="confidence", **settings)
    assert torch.equal(stock.sequences, ours.sequences)
    assert ours.cache.get_seq_length() == stock.cache.get_seq_length()
    last = stock.sequences[:, -1:]
    logits = [model(last, cache=out.cache).logits for out in (stock, ours)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


REFUSED = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "assistant_model": object(),
    "output_scores": True,
    "output_hidden_states": True,
    "use_cache": False,
    "cache_implementation": "static",
    "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
    "inputs_embeds": torch.zeros(1, 3, 32),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model, ids, name):
    with pytest.raises(InputError, match=name):
        generate(model, ids, drafter=EmptyDrafter(), policy="confidence", max_new_tokens=4, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "output_scores", "cache_implementation"])
def test_it_is_refused_in_a_configuration_too_the_models_own_or_a_given_one(ids, name):
    given = GenerationConfig(max_new_tokens=4, **{name: REFUSED[name]})
    model = tiny_model("qwen3_moe", 1)
    with pytest.raises(InputError, match=name):
        generate(model, ids, drafter=EmptyDrafter(), policy="confidence", generation_config=given)
    setattr(model.generation_config, name, REFUSED[name])
    for config in (None, GenerationConfig(max_new_tokens=4)):
        with pytest.raises(InputError, match=name):
            generate(model, ids, drafter=EmptyDrafter(), policy="confidence", generation_config=config)


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "output_scores", "watermarking_config"])
def test_the_hook_refuses_it_too(model, ids, name):
    hook = CustomGenerate(Method(EmptyDrafter(), selector("confidence")))
    extra = {"do_sample": name == "num_return_sequences", "return_dict_in_generate": name == "output_scores"}
    with pytest.raises(InputError, match=name):
        model.generate(ids, custom_generate=hook, max_new_tokens=4, **{name: REFUSED[name]}, **extra)


class Silent(BaseStreamer):
    def put(self, value): ...

    def end(self): ...


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 6), {"streamer": Silent()}, "streamer: it takes one text"),
        ((1, 6), {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}, "pad on the left"),
        ((1, 6), {"attention_mask": torch.ones(1, 5)}, r"attention_mask of shape \[1, 5\]"),
        ((1, 0), {}, r"input_ids of shape \[1, 0\]"),
        ((6,), {}, r"input_ids of shape \[6\]"),
        ((2, 6), {"generators": [torch.Generator()]}, "generators: 1 for 2 texts"),
    ],
)
def test_input_of_another_shape_is_refused(model, shape, options, message):
    with pytest.raises(InputError, match=message):
        ids = torch.ones(shape, dtype=torch.long)
        generate(model, ids, drafter=EmptyDrafter(), policy="confidence", max_new_tokens=4, **options)
