"""A draft language model behind the head interface says what the model itself says of every path, or is refused."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from ecospec.errors import InputError
from ecospec.inference.drafters.draft_lm.head import (
    LanguageModelHead,
    check_language_model,
    load_language_model_head,
)
from tests.tiny import VOCABULARY, tiny_config, tiny_model, tiny_target_folder, tiny_tokenizer

DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


@torch.no_grad()
def dense(family="qwen3", seed=0, attention="sdpa", **overrides):
    """A tiny dense model whose weights are drawn wide."""
    generator = torch.Generator().manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**DENSE, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3, generator=generator)
    return model.requires_grad_(False)


def random_ids(length, seed=0):
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(head, ids, cache, positions, seen):
    return head.forward(ids[None], None, positions[None], None if seen is None else seen[None], cache)[0]


MODELS = {
    "dense, sdpa": lambda seed: dense(seed=seed),
    "dense, eager": lambda seed: dense("llama", seed, attention="eager"),
    "sparse": lambda seed: tiny_model("qwen3_moe", seed).requires_grad_(False),
    "latent": lambda seed: tiny_model("deepseek_v3", seed).requires_grad_(False),
    "window wider than any text": lambda seed: dense("mistral", seed, sliding_window=256),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_cached_trees_say_what_the_model_says_of_each_path(kind, seed):
    model = MODELS[kind](seed)
    head = LanguageModelHead(model, VOCABULARY)
    assert (tuple(head.feature_layers), head.first_token) == ((), 0)
    ids, cache, stable = random_ids(12, seed), head.new_cache(), 0
    for new in (6, 1, 5):
        seen = None if stable == 0 else torch.ones(new, stable + new).tril(stable).bool()
        out = run(head, ids[stable : stable + new], cache, torch.arange(stable, stable + new), seen)
        stable += new
        same(head.logits(out), model, ids[:stable], new)
        grow_and_compare(head, model, cache, ids[:stable])
        cache.crop(-4)
        assert cache.get_seq_length() == stable


def grow_and_compare(head, model, cache, text):
    """Two nodes below the text and one below each; every node sees the text, its parent and itself."""
    past, own = torch.ones(2, len(text)).bool(), torch.eye(2).bool()
    fathers, children = torch.tensor([11, 200]), torch.tensor([7, 7])
    at = torch.full((2,), len(text))
    above = run(head, fathers, cache, at, torch.cat([past, own], 1))
    below = run(head, children, cache, at + 1, torch.cat([past, own, own], 1))
    assert head.feedback(above) is None
    assert not torch.allclose(below[0], below[1], atol=1e-2)  # one token, two contexts
    for node in range(2):
        path = torch.cat([text, fathers[node : node + 1]])
        same(head.logits(above[node : node + 1]), model, path, 1)
        same(head.logits(below[node : node + 1]), model, torch.cat([path, children[:1]]), 1)


def same(logits, model, ids, last):
    """`logits` are the model's own at the last positions of `ids`, without a cache."""
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0, -last:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sizes", [(264, 270), (270, 264)], ids=["target padded", "draft padded"])
def test_ids_that_only_one_model_has_are_never_drafted_and_never_end_a_text(sizes):
    ours, theirs = sizes
    tokenizers = (tiny_tokenizer(), tiny_tokenizer())
    model = dense(vocab_size=ours)
    head = LanguageModelHead(model, theirs, tokenizers)
    ids = torch.tensor([5, theirs - 1, 9])
    out = run(head, ids, head.new_cache(), torch.arange(3), None)
    assert head.logits(out).shape == (3, 264)
    torch.testing.assert_close(head.logits(out[:1])[0], model(ids[None, :1]).logits[0, 0, :264], rtol=1e-4, atol=1e-4)
    assert torch.equal(head.target_ids(torch.arange(264)), torch.arange(264))


def test_another_vocabulary_is_refused():
    with pytest.raises(InputError, match="264 ids, the target's 270"):
        LanguageModelHead(dense(), 270)
    with pytest.raises(InputError, match="ids up to 256, but one of the models has only 200"):
        LanguageModelHead(dense(vocab_size=200), VOCABULARY, (tiny_tokenizer(), tiny_tokenizer()))


def test_another_tokenizer_is_refused_by_both_names(tmp_path):
    tiny_target_folder(tmp_path / "target")
    folder = tiny_target_folder(tmp_path / "draft")
    changed = tiny_tokenizer()
    changed.add_tokens(["<|more|>"])
    changed.save_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match=r"draft.*and.*target.*differ in 1 tokens.*<\|more\|>"):
        load_language_model_head(folder, target, theirs)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIG_MAPPING["mistral"](**DENSE, sliding_window=64), "DynamicSlidingWindowLayer"),
        (tiny_config("gpt_oss"), "DynamicSlidingWindowLayer"),
        (CONFIG_MAPPING["qwen3_next"](vocab_size=VOCABULARY, num_hidden_layers=4), "Linear"),
        (CONFIG_MAPPING["gpt2"](vocab_size=VOCABULARY), "rotary"),
        (CONFIG_MAPPING["mamba"](vocab_size=VOCABULARY), "rotary"),
    ],
    ids=["window", "windows in turn", "recurrent in turn", "learned positions", "recurrent"],
)
def test_a_model_that_cannot_drop_a_trees_entries_is_refused_by_its_configuration(config, reason):
    with pytest.raises(InputError, match=reason):
        check_language_model(config, VOCABULARY)


def test_logits_that_are_not_plainly_the_output_matrix_are_refused():
    scaled = dense("granite", logits_scaling=4.0)
    with pytest.raises(InputError, match="scaled or capped"):
        LanguageModelHead(scaled, VOCABULARY)


def test_an_attention_without_tree_masks_is_refused():
    model = dense()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="sdpa"):
        LanguageModelHead(model, VOCABULARY)


def test_a_loaded_head_is_the_saved_model_in_the_targets_dtype(tmp_path):
    model = dense()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    target = tiny_model("qwen3_moe")
    head = load_language_model_head(tmp_path, target, tiny_tokenizer())
    ids = random_ids(7)
    same(head.logits(run(head, ids, head.new_cache(), torch.arange(7), None)), model, ids, 7)
    assert load_language_model_head(tmp_path, target.bfloat16(), tiny_tokenizer()).model.dtype == torch.bfloat16
    with pytest.raises(InputError, match="cannot read a draft model"):
        load_language_model_head(tmp_path / "nowhere", target, tiny_tokenizer())
