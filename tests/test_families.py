"""Laws of every mixture-of-experts family of Transformers: it decodes losslessly, or it is refused with the reason."""

from functools import cache

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ecospec.errors import InputError
from ecospec.inference import generate
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.selection.config import selector
from ecospec.inference.target.transformers import verify
from ecospec.inference.tree import stack
from ecospec.tracing.target.loading import MoeShape, shape_of
from ecospec.tracing.target.recorder import NO_EXPERT, RoutingRecorder
from ecospec.tracing.target.routers import find_sites
from tests.stand_ins import GREEDY, EmptyDrafter, NoisyOracle
from tests.test_verification import PARENTS, path_to, prefilled, tree_of
from tests.zoo import INDEXED, LAYERS, REFUSED, TREE_CAPABLE, VOCABULARY, WINDOW, zoo_config, zoo_model

FAMILIES = sorted(TREE_CAPABLE)
SLIDING = [family for family in FAMILIES if "sliding_window" in TREE_CAPABLE[family]]
CHOOSING = [family for family in FAMILIES if "index_topk" in TREE_CAPABLE[family]]
LENGTHS = [(family, 12) for family in FAMILIES if family not in SLIDING]
LENGTHS += [(family, length) for family in SLIDING for length in (5, 20)]
LENGTHS += [(family, INDEXED - 5) for family in CHOOSING]  # the tree needs more columns than the longest text
LEAVES = (4, 7, 8, 9)
DENSE_FIRST = {
    *("afmoe", "axk1", "axk2", "beam", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "hy_v4", "laguna", "mimo_v2_flash"),
}
MOE_LAYERS = {family: (1, 2, 3) if family in DENSE_FIRST else (0, 1, 2, 3) for family in FAMILIES}
MOE_LAYERS |= {"flint": (2, 3), "longcat_flash": (0, 1)}
NEW_TOKENS = 24
PLAIN = {"drafter": EmptyDrafter(), "policy": "confidence", **GREEDY}


@cache
def model_of(family: str) -> nn.Module:
    return zoo_model(family, seed=1)


def text_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def test_every_family_is_either_decoded_or_refused():
    assert len(FAMILIES) == 39
    assert len(REFUSED) == 15
    assert not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_moe_shape_is_read_from_the_configuration_whatever_its_names(family):
    shape = shape_of(zoo_config(family))
    assert shape == MoeShape(family, MOE_LAYERS[family], 8, 2, VOCABULARY, 32, LAYERS)


@pytest.mark.parametrize(("family", "length"), LENGTHS)
@torch.no_grad()
def test_logits_and_routing_of_a_tree_are_those_of_each_path_decoded_token_by_token(family, length):
    model, tree = model_of(family), tree_of(PARENTS, length)
    with RoutingRecorder(model) as recorder:
        _, kept = prefilled(model, length, length)
        recorder.take(length)
        logits_NV = verify(model, kept, stack([tree])).logits[0]
        experts_NLK = recorder.take(len(tree)).sort(-1).values
        assert experts_NLK.shape[1:] == (len(MOE_LAYERS[family]), 2)
        for leaf in LEAVES:
            _, plain = prefilled(model, length, length)
            recorder.take(length)
            for node in path_to(PARENTS, leaf):
                out = model(tree.tokens_N[node].view(1, 1), cache=plain.cache)
                torch.testing.assert_close(logits_NV[node], out.logits[0, -1], atol=1e-3, rtol=1e-3)
                assert torch.equal(recorder.take(1).sort(-1).values[0], experts_NLK[node])


@pytest.mark.parametrize("family", SLIDING)
@torch.no_grad()
def test_the_window_matters(family):
    """The control: past the window the same weights without it give other logits."""
    ids, wide = text_of(20), zoo_model(family, seed=1, sliding_window=200)
    difference = (model_of(family)(ids).logits - wide(ids).logits)[0].abs().amax(-1)
    assert difference[: WINDOW - 1].max() < 1e-4
    assert difference[-1] > 0.05


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_after_a_tree_the_text_goes_on_as_after_a_fresh_prefill(family):
    model = model_of(family)
    ids, kept = prefilled(model, 5, 0)
    text = ids[0].tolist()
    for round_, leaf in enumerate((9, 4, 0, 8)):  # 5 to 18 tokens
        tree, path = tree_of(PARENTS, round_), path_to(PARENTS, leaf)
        found = verify(model, kept, stack([tree])).logits[0, 0]
        fresh = model(torch.tensor([[*text, int(tree.tokens_N[0])]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found, fresh, atol=1e-3, rtol=1e-3)
        kept.keep([path], len(tree))
        text += tree.tokens_N[path].tolist()
    assert kept.cache.get_seq_length() == kept.width == len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_greedy_decodings(family):
    model, ids = model_of(family), text_of(6)
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, **GREEDY)
    method = Method(NoisyOracle(expected[0].tolist(), 0.7), selector("confidence"))
    out, run = generate_with(model, method, ids, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert torch.equal(out, expected)
    assert len(set(expected[0, 6:].tolist())) > 4
    assert 1.2 < run.acceptance_length < 4


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(CHOOSING)))
@torch.no_grad()
def test_a_batch_of_unequal_texts_gives_each_text_as_alone(family):
    model = model_of(family)
    texts = [text_of(length, length)[0] for length in (4, 11, 7)]
    expected = [model.generate(ids_T[None], max_new_tokens=10, **GREEDY)[0].tolist() for ids_T in texts]
    ids = torch.stack([nn.functional.pad(ids_T, (11 - len(ids_T), 0)) for ids_T in texts])
    mask = torch.stack([nn.functional.pad(torch.ones_like(ids_T), (11 - len(ids_T), 0)) for ids_T in texts])
    out = generate(model, ids, attention_mask=mask, max_new_tokens=10, **PLAIN)
    assert [row[11 - len(text) :].tolist() for row, text in zip(out, texts, strict=True)] == expected


@pytest.mark.parametrize("family", CHOOSING)
@torch.no_grad()
def test_the_keys_by_which_sparse_attention_chooses_are_those_of_a_fresh_prefill(family):
    """They change no logits as long as everything is seen, so they are compared themselves."""
    model, tree, path = model_of(family), tree_of(PARENTS, 0), path_to(PARENTS, 9)
    ids, kept = prefilled(model, 5, 0)
    verify(model, kept, stack([tree]))
    kept.keep([path], len(tree))
    fresh = DynamicCache(config=model.config)
    model(torch.cat([ids, tree.tokens_N[None, path]], dim=1), cache=fresh)
    for found, expected in zip(kept.cache.layers, fresh.layers, strict=True):
        if expected.is_indexer_initialized:  # a layer may use the choice of an earlier one
            torch.testing.assert_close(found.indexer_keys, expected.indexer_keys, atol=1e-4, rtol=1e-4)
    assert fresh.layers[0].indexer_keys.shape[:2] == (1, 5 + len(path))


@pytest.mark.parametrize("family", CHOOSING)
def test_sparse_attention_is_decoded_alone_and_as_long_as_it_sees_everything(family):
    model, ids = model_of(family), text_of(INDEXED - 4)
    expected = model.generate(ids, max_new_tokens=4, **GREEDY)
    assert torch.equal(generate(model, ids, max_new_tokens=4, **PLAIN), expected)
    with pytest.raises(InputError, match=f"{family}.* up to {INDEXED} tokens .*make {INDEXED + 1}"):
        generate(model, ids, max_new_tokens=5, **PLAIN)
    with pytest.raises(InputError, match=f"{family}: sparse attention decodes one text at a time"):
        generate(model, ids.expand(2, -1), max_new_tokens=4, **PLAIN)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_decoded_is_refused_by_family_and_reason(family):
    with pytest.raises(InputError, match=f"target family {family}.*{REFUSED[family]}"):
        generate(zoo_model(family), text_of(4), max_new_tokens=2, **PLAIN)


@torch.no_grad()
def test_experts_without_weights_are_recorded_as_none():
    model, chosen = model_of("longcat_flash"), []
    router = find_sites(model)[1].name.replace("experts", "router")
    handle = model.get_submodule(router).register_forward_hook(lambda _module, _args, output: chosen.append(output[2]))
    with RoutingRecorder(model) as recorder:
        model(text_of(40))
        experts_TK = recorder.take(40)[:, 1]
    handle.remove()
    assert (chosen[0] >= 8).any()
    assert torch.equal(experts_TK, chosen[0].where(chosen[0] < 8, NO_EXPERT))
