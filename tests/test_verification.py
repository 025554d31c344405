"""Laws of tree verification and cache compaction, on the three families of the paper's targets."""

import pytest
import torch
from transformers import DynamicCache

from ecospec.configs.errors import InputError
from ecospec.inference.cache import RowCache
from ecospec.inference.tree import DraftTree, ancestors_of, depths_of, stack
from ecospec.inference.verification import check_cache, check_tree_support, verify
from tests.tiny import VOCABULARY, tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
LENGTHS = (3, 7, 8, 12, 25)  # gpt_oss here has a sliding window of 8
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6])


def tree_of(parents: torch.Tensor, seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (len(parents),), generator=generator)
    return DraftTree(tokens, parents, torch.ones(len(parents)), depths_of(parents))


def path_to(parents: torch.Tensor, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def prefilled(model, length: int, seed: int):
    ids = torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    cache = DynamicCache(config=model.config)
    model(ids, cache=cache)
    cache.activate_past_recording()
    return ids, RowCache(cache, [length])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_tree_logits_are_those_of_each_path_decoded_token_by_token(family, length):
    model, tree = tiny_model(family), tree_of(PARENTS, length)
    _, cache = prefilled(model, length, length)
    logits_NV = verify(model, cache, stack([tree])).logits[0]
    for node in range(len(tree)):
        _, plain = prefilled(model, length, length)
        for token in tree.tokens_N[path_to(PARENTS, node)]:
            out = model(token.view(1, 1), cache=plain.cache)
        torch.testing.assert_close(logits_NV[node], out.logits[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("leaf", [0, 4, 8, 9])
@torch.no_grad()
def test_after_compaction_the_text_goes_on_as_after_a_fresh_prefill(family, leaf):
    """Compared after every round, for at least 60 tokens; the root of the next tree is where the logits are read."""
    model = tiny_model(family)
    ids, cache = prefilled(model, 6, leaf)
    text, kept = ids[0].tolist(), path_to(PARENTS, leaf)
    for round_ in range(60 // len(kept) + 1):
        tree = tree_of(PARENTS, 100 * leaf + round_)
        found = verify(model, cache, stack([tree])).logits[0, 0]
        fresh = model(torch.tensor([[*text, int(tree.tokens_N[0])]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(found, fresh, atol=1e-4, rtol=1e-4)
        cache.keep([kept], len(tree))
        text += tree.tokens_N[kept].tolist()
        assert cache.cache.get_seq_length() == cache.width == len(text)


@torch.no_grad()
def test_keeping_the_wrong_nodes_is_noticed():
    """The control: these tolerances do tell a right cache from a wrong one."""
    model = tiny_model("qwen3_moe")
    ids, cache = prefilled(model, 6, 0)
    tree = tree_of(PARENTS, 1)
    verify(model, cache, stack([tree]))
    cache.keep([[0, 1, 3]], len(tree))
    text = torch.cat([ids[0], tree.tokens_N[[0, 2, 5]], torch.tensor([7])])[None]
    found = model(torch.tensor([[7]]), cache=cache.cache).logits[0, -1]
    assert (found - model(text, use_cache=False).logits[0, -1]).abs().max() > 0.1


def test_a_node_sees_itself_and_the_nodes_above_it_only():
    seen = ancestors_of(PARENTS)
    for node in range(len(PARENTS)):
        assert seen[node].nonzero().squeeze(1).tolist() == path_to(PARENTS, node)
    assert depths_of(PARENTS).tolist() == [len(path_to(PARENTS, node)) - 1 for node in range(len(PARENTS))]


def test_a_subtree_keeps_tokens_parents_and_depths():
    tree = tree_of(PARENTS, 3)
    chosen_1N = torch.zeros(1, len(tree), dtype=torch.bool)
    chosen_1N[0, [0, 2, 5, 8]] = True
    sub = stack([tree]).pack(chosen_1N, 4).row(0)
    assert sub.parents_N.tolist() == [-1, 0, 1, 2]
    assert sub.tokens_N.tolist() == tree.tokens_N[[0, 2, 5, 8]].tolist()
    assert sub.depth_N.tolist() == [0, 1, 2, 3]


def test_what_cannot_verify_a_tree_is_refused_with_the_reason():
    model = tiny_model("qwen3_moe")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2: a tree mask needs"):
        check_tree_support(model)
    cache = DynamicCache(config=model.config)
    cache.layers[0] = object()
    with pytest.raises(InputError, match="cache layer object"):
        check_cache(cache)
