"""Every option of `generate` acts as in Transformers, or is refused by name."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from ecospec.configs.errors import InputError
from ecospec.inference import generate
from tests.test_decoder import GREEDY, SAMPLED, EmptyDrafter, NoisyOracle
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer

NEW_TOKENS = 30
OPTIONS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], [20, 21]]},
    {"suppress_tokens": [3, 4, 5, 6]},
    {"min_new_tokens": 12},
    {"max_length": 19, "max_new_tokens": None},
    {"generation_config": GenerationConfig(max_new_tokens=9, temperature=0.8, do_sample=True, top_k=0)},
]


@pytest.fixture(scope="module")
def model():
    model = tiny_model("qwen3_moe", 1)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))


def both(model, ids, seed=0, **options):
    """Stock ids and ours, and the state of the global generator after each."""
    settings = {"max_new_tokens": NEW_TOKENS, **options}
    if "generation_config" in options:
        settings = options
    torch.manual_seed(seed)
    expected = model.generate(ids, **settings)
    after = torch.get_rng_state()
    drafter = NoisyOracle(expected[0].tolist(), 0.8)
    torch.manual_seed(seed)
    found = generate(model, ids, drafter=drafter, policy="confidence", **settings)
    assert torch.equal(torch.get_rng_state(), after), "later draws must not notice"
    return expected, found


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_stock_generates(model, ids, options, seed):
    base = {} if "generation_config" in options else SAMPLED
    expected, found = both(model, ids, seed, **{**base, **options})
    assert torch.equal(expected, found)


def test_a_text_ends_at_any_of_its_end_tokens_even_inside_a_step(model, ids):
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)[0, ids.shape[1] :].tolist()
    for place in range(2, 12):
        expected, found = both(model, ids, **GREEDY, eos_token_id=[text[place], VOCABULARY - 1])
        assert torch.equal(expected, found)
        assert found.shape[1] - ids.shape[1] == text.index(text[place]) + 1


def test_a_text_ends_at_a_stop_string(model, ids):
    tokenizer = tiny_tokenizer()
    text = model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)[0, ids.shape[1] :]
    stop = tokenizer.decode(text[9:11])
    options = {"stop_strings": [stop], "tokenizer": tokenizer, **GREEDY}
    expected, found = both(model, ids, **options)
    assert torch.equal(expected, found)
    assert found.shape[1] < ids.shape[1] + NEW_TOKENS
    with pytest.raises(InputError, match="give the tokenizer too"):
        generate(model, ids, drafter=EmptyDrafter(), policy="confidence", stop_strings=[stop])


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
    assert ours.shown[: len(stock.shown)] == stock.shown  # our last step goes on to its end


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
