"""What surrounds the ids in `generate`: caches, streamers, generators, padding, and functions that know their text."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache, TextStreamer

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.decoding.generation import CustomGenerate
from ecospec.inference.decoding.method import Method
from ecospec.inference.selection.config import selector
from tests.stand_ins import GREEDY, SAMPLED, EmptyDrafter, NoisyOracle
from tests.tiny import VOCABULARY, tiny_model, tiny_tokenizer

NEW_TOKENS = 30


@pytest.fixture(scope="module")
def model():
    model = tiny_model("qwen3_moe", 1)
    model.generation_config.eos_token_id = None
    return model


def prompt(length=7, seed=1):
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def ours(model, ids, expected=None, **options):
    drafter = EmptyDrafter() if expected is None else NoisyOracle(expected[0].tolist(), 0.8)
    if "generation_config" not in options:
        options = {"max_new_tokens": NEW_TOKENS, **options}
    return generate(model, ids, drafter=drafter, policy="confidence", **options)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("end", [False, True], ids=["by-length", "inside-a-step"])
def test_the_returned_cache_decodes_on_as_stocks_does(family, end):
    model, ids = tiny_model(family, 2), prompt()
    options = {"max_new_tokens": 17, "return_dict_in_generate": True, **GREEDY}
    text = model.generate(ids, **options, eos_token_id=None).sequences[0].tolist()
    options["eos_token_id"] = text[-4] if end else None
    stock = model.generate(ids, **options)
    mine = ours(model, ids, torch.tensor([text]), **options)
    assert torch.equal(stock.sequences, mine.sequences)
    assert mine.cache.get_seq_length() == stock.sequences.shape[1] - 1
    for token in [*stock.sequences[0, -1:].tolist(), 5, 6, 7]:
        logits = [model(torch.tensor([[token]]), cache=out.cache).logits for out in (stock, mine)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_a_cache_that_is_given_is_the_one_that_is_filled(model):
    cache = DynamicCache(config=model.config)
    out = ours(model, prompt(), cache=cache, **GREEDY)
    assert cache.get_seq_length() == out.shape[1] - 1
    with pytest.raises(InputError, match="cache: it already holds tokens"):
        ours(model, prompt(), cache=cache, **GREEDY)
    with pytest.raises(InputError, match="StaticLayer cannot drop"):
        ours(model, prompt(), cache=StaticCache(config=model.config, max_cache_len=64), **GREEDY)
    with pytest.raises(InputError, match="cache: a batch is decoded with its own"):
        ours(model, prompt().repeat(2, 1), cache=DynamicCache(config=model.config), **GREEDY)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_prints_what_stocks_prints(model, capsys, skip_prompt):
    tokenizer, ids = tiny_tokenizer(), prompt()
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, streamer=TextStreamer(tokenizer, skip_prompt), **GREEDY)
    printed = capsys.readouterr().out
    ours(model, ids, expected, streamer=TextStreamer(tokenizer, skip_prompt), **GREEDY)
    assert capsys.readouterr().out == printed != ""


def test_a_greedy_batch_draws_no_random_numbers_and_a_sampled_one_repeats_with_the_seed(model):
    ids = torch.cat([prompt(seed=3), prompt(seed=4)])
    state = torch.get_rng_state()
    assert torch.equal(ours(model, ids, pad_token_id=0, **GREEDY), model.generate(ids, max_new_tokens=30, **GREEDY))
    assert torch.equal(torch.get_rng_state(), state)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(ours(model, ids, **SAMPLED))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("as_config", [False, True])
def test_padding_is_inferred_from_the_pad_token_as_stock_does(model, as_config):
    long, short = prompt(9, 5), prompt(4, 6)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], dim=1)])
    options = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": VOCABULARY - 1, **GREEDY}
    if as_config:
        options = {"generation_config": GenerationConfig(**options)}
    found = ours(model, ids, **options)
    assert torch.equal(found, model.generate(ids, **options))
    unmasked = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert not torch.equal(found, unmasked), "padding must matter here"


def test_a_pad_token_that_also_ends_texts_is_a_token_like_any_other(model):
    ids = torch.cat([torch.full((1, 3), 9), prompt()], dim=1)
    options = {"max_new_tokens": 12, "pad_token_id": 9, "eos_token_id": [9, 11], **GREEDY}
    assert torch.equal(ours(model, ids, **options), model.generate(ids, **options))


def test_a_function_of_the_allowed_tokens_is_told_which_text_it_sees(model):
    ids = torch.cat([prompt(seed=3), prompt(seed=4), prompt(seed=5)])

    def allowed(row, ids_T):
        return [3 + row, 13 + row, 23 + row, 33 + (row + len(ids_T)) % 3]

    options = {"max_new_tokens": 12, "prefix_allowed_tokens_fn": allowed, "pad_token_id": 0, **GREEDY}
    expected = model.generate(ids, **options)
    assert torch.equal(ours(model, ids, **options), expected)
    with pytest.raises(InputError, match=r"PrefixConstrainedLogitsProcessor in a batch"):
        model.generate(ids, custom_generate=CustomGenerate(Method(EmptyDrafter(), selector("confidence"))), **options)


def test_a_seed_that_follows_a_text_is_the_one_that_follows_stocks(model):
    """Two texts in a row from one seed: the second sees whatever the first left behind."""
    ids, options = prompt(), {"max_new_tokens": 11, **SAMPLED}
    torch.manual_seed(5)
    expected = [model.generate(ids, **options) for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(ours(model, ids, text, **options), text) for text in expected)
