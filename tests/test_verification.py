"""Laws of tree verification and cache compaction, on the three families of the paper's targets."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ecospec.errors import InputError
from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.support import check_cache, check_tree_support
from ecospec.inference.target.transformers import verify
from ecospec.inference.tree import DraftTree, ancestors_of, depths_of, stack
from ecospec.tracing.target.recorder import RoutingRecorder
from tests.tiny import VOCABULARY, tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
LENGTHS = (3, 7, 8, 12, 25)  # gpt_oss here has a sliding window of 8
PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6])
DEEP = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2])  # deeper than the window


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
@pytest.mark.parametrize("parents", [PARENTS, DEEP], ids=["wide", "deep"])
@torch.no_grad()
def test_tree_logits_are_those_of_each_path_decoded_token_by_token(family, length, parents):
    model, tree = tiny_model(family), tree_of(parents, length)
    _, cache = prefilled(model, length, length)
    logits_NV = verify(model, cache, stack([tree])).logits[0]
    for node in range(len(tree)):
        _, plain = prefilled(model, length, length)
        for token in tree.tokens_N[path_to(parents, node)]:
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


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@torch.no_grad()
def test_every_way_to_compute_gives_the_same_logits(family, experts):
    model, tree = tiny_model(family), tree_of(PARENTS, 5)
    found = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        _, cache = prefilled(model, 9, 9)
        found.append(verify(model, cache, stack([tree])).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


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


def prefilled_rows(model, lengths):
    """Several texts in one cache, padded behind, as the decoding loop reads them."""
    texts = [prefilled(model, length, length)[0][0] for length in lengths]
    cache = RowCache(DynamicCache(), [0] * len(texts))
    model(pad_sequence(texts, batch_first=True), cache=cache.cache)
    cache.keep_first(list(lengths), max(lengths))
    return [text_T.tolist() for text_T in texts], cache


def alone(model, text, tree):
    """The tree's logits after `text` in a batch of one, with windowed layers where the model has them."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([text]), cache=cache)
    cache.activate_past_recording()
    return verify(model, RowCache(cache, [len(text)]), stack([tree])).logits[0]


def assert_rows_are_as_alone(model, texts, cache, trees):
    logits_BNV = verify(model, cache, stack(trees)).logits
    for logits_NV, text, tree in zip(logits_BNV, texts, trees, strict=True):
        torch.testing.assert_close(logits_NV[: len(tree)], alone(model, text, tree), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(3, 12, 7), (20, 2, 9), (5, 5, 5)], ids=str)
@torch.no_grad()
def test_texts_of_unequal_length_in_one_cache_are_verified_as_alone(family, lengths):
    """Over rounds with trees of several sizes, of which every text keeps another number of nodes; then some leave."""
    model = tiny_model(family)
    texts, cache = prefilled_rows(model, lengths)
    for round_, leaves in enumerate([(9, 0, 2), (1, 5, 3), (0, 8, 0), (4, 1, 6)]):
        sizes = [max(leaf + 1, smallest) for leaf, smallest in zip(leaves, (10, 6, 1), strict=True)]
        trees = [tree_of(PARENTS[:size], 10 * round_ + row) for row, size in enumerate(sizes)]
        assert_rows_are_as_alone(model, texts, cache, trees)
        kept = [path_to(PARENTS, leaf) for leaf in leaves]
        cache.keep(kept, max(sizes))
        for text, tree, path in zip(texts, trees, kept, strict=True):
            text += tree.tokens_N[path].tolist()
        assert cache.lengths == [len(text) for text in texts]
        assert cache.cache.get_seq_length() == cache.width
    for rows in ([2, 0], [1]):
        cache.keep_rows(rows)
        texts = [texts[row] for row in rows]
        trees = [tree_of(PARENTS, 100 + row) for row in rows]
        assert_rows_are_as_alone(model, texts, cache, trees)
        cache.keep([[] for _ in rows], len(PARENTS))


@torch.no_grad()
def test_a_wrong_node_kept_in_one_text_of_a_batch_is_noticed():
    """The control: the tolerances tell right entries from wrong ones in a batch too."""
    model = tiny_model("qwen3_moe")
    texts, cache = prefilled_rows(model, (3, 12))
    trees = [tree_of(PARENTS, 0), tree_of(PARENTS, 1)]
    verify(model, cache, stack(trees))
    cache.keep([[0, 2], [0, 1]], len(PARENTS))
    for text, tree in zip(texts, trees, strict=True):
        text += tree.tokens_N[[0, 1]].tolist()
    with pytest.raises(AssertionError, match="not close"):
        assert_rows_are_as_alone(model, texts, cache, trees)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_makes_no_expert_active_that_the_root_does_not(family):
    model = tiny_model(family)
    _, cache = prefilled_rows(model, (3, 12, 7))
    trees = stack([tree_of(PARENTS, 0), tree_of(PARENTS[:1], 1), tree_of(PARENTS[:4], 2)])
    with RoutingRecorder(model) as recorder:
        verify(model, cache, trees)
        experts_BNLK = recorder.take().unflatten(0, trees.tokens_BN.shape).sort(-1).values
    assert (~trees.real_BN).sum(1).tolist() == [0, 9, 6]
    for experts_NLK, real_N in zip(experts_BNLK, trees.real_BN, strict=True):
        assert torch.equal(experts_NLK[~real_N], experts_NLK[:1].expand(int((~real_N).sum()), -1, -1))
    assert len(experts_BNLK[0].unique(dim=0)) > 5  # nodes of a tree do differ


def test_what_cannot_verify_a_tree_is_refused_with_the_reason():
    model = tiny_model("qwen3_moe")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2: a tree mask needs"):
        check_tree_support(model)
    cache = DynamicCache(config=model.config)
    cache.layers[0] = object()
    with pytest.raises(InputError, match="cache layer object"):
        check_cache(cache)


@pytest.mark.parametrize("experts", ["batched_mm", "deepgemm", "sonicmoe", "deepgemm_megamoe"])
def test_experts_kernels_that_read_weights_for_every_token_are_refused(experts):
    model = tiny_model("qwen3_moe")
    check_tree_support(model)
    model.config._experts_implementation_internal = experts
    with pytest.raises(InputError, match=f"target experts {experts}: .*experts_implementation eager or grouped_mm"):
        check_tree_support(model)


class Mxfp4GptOssMLP(nn.Module):
    """Stands for the block of that name, whose kernel routes by itself; on a GPU only."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts


def test_native_mxfp4_is_refused_unless_its_experts_are_split_over_processes():
    model = tiny_model("gpt_oss")
    model.model.layers[1].mlp = Mxfp4GptOssMLP(model.model.layers[1].mlp.experts)
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp: MXFP4 kernels .*dequantize"):
        check_tree_support(model)
    model.model.layers[1].mlp.experts._is_hooked = True
    check_tree_support(model)


def test_kernels_of_the_hub_are_refused():
    model = tiny_model("gpt_oss")
    model._use_kernels = True
    with pytest.raises(InputError, match="use_kernels"):
        check_tree_support(model)
