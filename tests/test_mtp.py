"""The MTP layer read from a checkpoint computes what its keys say, step by step, with caches and tree masks or without.

Letters: n entries, H hidden width.
"""

import math

import pytest
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from ecospec.errors import InputError
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.drafters.mtp.head import inspect_mtp, load_mtp_head
from ecospec.inference.target.features import FINAL
from ecospec.tracing.target.fp8 import dequantize_blocks
from tests.fp8_folders import dequantized_by_hand, quantized
from tests.mtp_reference import (
    BLOCK,
    LAYER,
    SHAPES,
    YARN,
    add_layers_of,
    random_layer,
    reference,
    reference_draft,
    write_checkpoint,
)
from tests.tiny import VOCABULARY, tiny_model

DEEPSEEK = {"rope_parameters": YARN}
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}


@pytest.fixture
def deepseek():
    return tiny_model("deepseek_v3", **DEEPSEEK)


@torch.no_grad()
def target_text(model, length, seed=0):
    """ids and the target's hidden states after its final norm."""
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return ids, model.model(ids[None], use_cache=False).last_hidden_state[0]


@torch.no_grad()
def run(head, ids, hidden_nH, cache, positions=None, seen=None):
    positions = torch.arange(len(ids)) if positions is None else positions
    seen = None if seen is None else seen[None]
    return head.forward(ids[None], head.enter(hidden_nH[None]), positions[None], seen, cache)[0]


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("seed", range(3))
def test_both_steps_are_what_the_keys_say(tmp_path, deepseek, seed, experts):
    deepseek.set_experts_implementation(experts)
    weights = random_layer(seed)
    head = load_mtp_head(write_checkpoint(tmp_path, deepseek, weights), deepseek)
    assert (tuple(head.feature_layers), head.first_token) == ((FINAL,), 1)
    ids, hidden = target_text(deepseek, 9, seed)
    cache = head.new_cache()
    first = run(head, ids[1:], hidden[:-1], cache)  # pairs (hidden state of token i, token i + 1)
    expected = reference(weights, deepseek, ids[1:], hidden[:-1])
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
    logits = head.logits(first)
    torch.testing.assert_close(logits, expected @ deepseek.lm_head.weight.T, rtol=1e-4, atol=1e-3)
    child = head.target_ids(logits[-1:].argmax(-1))
    second = run(head, child, head.feedback(first[-1:]), cache, torch.tensor([8]), torch.ones(1, 9).bool())
    chain = reference(weights, deepseek, torch.cat([ids[1:], child]), torch.cat([hidden[:-1], expected[-1:]]))
    torch.testing.assert_close(second, chain[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "options"), [("deepseek_v3", DEEPSEEK), ("glm4_moe", {})])
def test_the_first_step_is_that_of_transformers_own_loader(tmp_path, family, options):
    model = tiny_model(family, num_mtp_layers=1, **options)
    donor = tiny_model(family, 1, **{**options, "first_k_dense_replace": 0})
    donor.save_pretrained(tmp_path / "donor")  # Transformers writes experts one by one, as checkpoints have them
    model.save_pretrained(tmp_path)
    add_layers_of(tmp_path / "donor", tmp_path, 1)
    model.config.name_or_path, model.config.dtype = str(tmp_path), torch.float32
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYER}.*"]
    oracle = MtpModel.from_pretrained(model).eval()
    head = load_mtp_head(tmp_path, model)
    ids, hidden = target_text(model, 12)
    out = run(head, ids[1:], hidden[:-1], head.new_cache())
    with torch.no_grad():
        expected = oracle.forward_layer(0, hidden[None, :-1], torch.arange(1, 12)[None], MtpCache(), ids[None, 1:])[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "options"), [("deepseek_v3", DEEPSEEK), ("glm4_moe", {})])
def test_a_chain_drawn_by_several_layers_is_that_of_transformers_own_loader(tmp_path, family, options):
    N = 3
    model = tiny_model(family, num_mtp_layers=N, **options)
    tiny_model(family, 1, **{**options, "first_k_dense_replace": 0}).save_pretrained(tmp_path / "donor")
    model.save_pretrained(tmp_path)
    add_layers_of(tmp_path / "donor", tmp_path, N)
    model.config.name_or_path, model.config.dtype = str(tmp_path), torch.float32
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[345]\..*"]
    oracle = MtpModel.from_pretrained(model).eval()
    drafter = TreeDrafter(load_mtp_head(tmp_path, model), steps=N, topk=1)
    ids, hidden = target_text(model, 14)
    read = 0
    for length in (6, 7, 10, 14):  # the drafter's caches go on, the oracle reads the text afresh
        with torch.no_grad():
            given = (ids[None, 1:length], hidden[None, : length - 1], None, torch.arange(1, length)[None], MtpCache())
            tokens, logits, _ = oracle(*given)
        tree = drafter.draft([ids[:length]], [hidden[read : length - 1]])
        assert tree.tokens_BN[0, 1:].tolist() == tokens[0].tolist()
        likely = logits[0].softmax(-1).max(-1).values
        torch.testing.assert_close(tree.prob_BN[0, 1:], likely.cumprod(0), rtol=1e-3, atol=1e-6)
        read = length - 1


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_each_layer_of_several_draws_its_own_level_and_the_last_all_further_ones(tmp_path, count, shared):
    model = tiny_model("deepseek_v3", num_mtp_layers=count, **DEEPSEEK)
    layers = [random_layer(seed) for seed in range(count)]
    own = [{} if shared else {"shared_head.head.weight": torch.randn(VOCABULARY, 32)} for _ in layers]
    stored = [weights | extra for weights, extra in zip(layers, own, strict=True)]
    head = load_mtp_head(write_checkpoint(tmp_path, model, *stored), model)
    assert inspect_mtp(tmp_path, model.config).layers == f"layers {LAYER} to {LAYER + count - 1}"
    drafter = TreeDrafter(head, steps=count + 2, topk=2)
    drafter.reset(2)
    texts = [target_text(model, length, seed) for seed, length in enumerate((13, 9))]
    read = [0, 0]
    for lengths in ([2, 6], [4, 7], [13, 9]):  # texts shorter than there are layers, and one that ends before the other
        trees = drafter.draft(
            [ids[:length] for (ids, _), length in zip(texts, lengths, strict=True)],
            [hidden[a : b - 1] for (_, hidden), a, b in zip(texts, read, lengths, strict=True)],
        )
        read = [length - 1 for length in lengths]
        for row, ((ids, hidden), length) in enumerate(zip(texts, lengths, strict=True)):
            for path, prob in paths_of(trees.row(row)):
                out_H = reference_draft(layers, model, ids[1:length], hidden[: length - 1], path[:-1])
                output_VH = own[min(len(path), count) - 1].get("shared_head.head.weight", model.lm_head.weight)
                likely = (output_VH @ out_H).softmax(-1)[path[-1]]
                torch.testing.assert_close(prob, likely, rtol=1e-3, atol=1e-5)


def paths_of(tree):
    """For each draft its path from the first level down, and its probability given its parent."""
    paths = [[]]
    for token, parent, prob in zip(tree.tokens_N[1:], tree.parents_N[1:], tree.prob_N[1:], strict=True):
        paths.append([*paths[int(parent)], int(token)])
        yield paths[-1], prob / tree.prob_N[int(parent)]


def test_a_layer_that_the_configuration_names_and_the_checkpoint_lacks_is_named(tmp_path):
    model = tiny_model("deepseek_v3", num_mtp_layers=2)
    folder = write_checkpoint(tmp_path, model, random_layer())
    for attempt in (lambda: load_mtp_head(folder, model), lambda: inspect_mtp(folder, model.config)):
        with pytest.raises(InputError, match=rf"holds no key model.layers.{LAYER + 1}.*num_nextn_predict_layers"):
            attempt()


@pytest.mark.parametrize("seed", range(2))
def test_cached_trees_equal_a_recomputation_of_every_path(tmp_path, deepseek, seed):
    weights = random_layer(seed)
    head = load_mtp_head(write_checkpoint(tmp_path, deepseek, weights), deepseek)
    ids, hidden = target_text(deepseek, 16, seed)
    cache, stable = head.new_cache(), 0
    for new in (5, 1, 4):  # entries that the text gains
        seen = None if stable == 0 else torch.ones(new, stable + new).tril(stable).bool()
        part = slice(stable, stable + new)
        out = run(head, ids[1:][part], hidden[part], cache, torch.arange(stable, stable + new), seen)
        stable += new
        chain = reference(weights, deepseek, ids[1 : stable + 1], hidden[:stable])
        torch.testing.assert_close(out, chain[-new:], rtol=1e-4, atol=1e-4)
        grow_and_compare(head, weights, deepseek, cache, ids[1 : stable + 1], hidden[:stable], out[-1])
        cache.crop(-4)
        assert cache.get_seq_length() == stable


def grow_and_compare(head, weights, model, cache, ids, hidden, last_H):
    """Two nodes below the text and one below each; every node sees the text, its parent and itself."""
    stable = len(ids)
    text = torch.ones(2, stable).bool()
    fathers, children = torch.tensor([11, 200]), torch.tensor([7, 7])
    own = torch.eye(2).bool()
    at = torch.full((2,), stable)
    above = run(head, fathers, last_H.expand(2, -1), cache, at, torch.cat([text, own], 1))
    below = run(head, children, head.feedback(above), cache, at + 1, torch.cat([text, own, own], 1))
    assert not torch.allclose(below[0], below[1], atol=1e-2)  # one token, two contexts
    for node in range(2):
        path_ids = torch.cat([ids, fathers[node : node + 1]])
        path_hidden = torch.cat([hidden, last_H[None]])
        outs = reference(weights, model, path_ids, path_hidden)
        torch.testing.assert_close(above[node], outs[-1], rtol=1e-4, atol=1e-4)
        path_ids, path_hidden = torch.cat([path_ids, children[:1]]), torch.cat([path_hidden, outs[-1:]])
        torch.testing.assert_close(
            below[node], reference(weights, model, path_ids, path_hidden)[-1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(("shape", "block"), [((300, 200), (128, 128)), ((24, 32), BLOCK), ((5, 3), (128, 128))])
def test_a_dequantized_weight_is_its_value_times_its_blocks_scale(shape, block):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand([math.ceil(size / step) for size, step in zip(shape, block, strict=True)])
    got = dequantize_blocks(weight, scale, block)
    values = weight.float()
    for row in range(shape[0]):
        for column in range(shape[1]):
            assert got[row, column] == values[row, column] * scale[row // block[0], column // block[1]]


def test_an_fp8_checkpoint_is_the_head_of_its_dequantized_weights(tmp_path, deepseek):
    stored = quantized(random_layer(), BLOCK)
    deepseek.config.quantization_config = FP8_CONFIG
    write_checkpoint(tmp_path, deepseek, stored)
    del deepseek.config.quantization_config  # as Transformers does where it dequantizes the target
    head = load_mtp_head(tmp_path, deepseek)
    plain = {
        key: dequantized_by_hand(tensor, stored[f"{key}_scale_inv"], BLOCK) if f"{key}_scale_inv" in stored else tensor
        for key, tensor in stored.items()
        if not key.endswith("_scale_inv")
    }
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == 5 + 3 + 24
    ids, hidden = target_text(deepseek, 7)
    out = run(head, ids[1:], hidden[:-1], head.new_cache())
    torch.testing.assert_close(out, reference(plain, deepseek, ids[1:], hidden[:-1]), rtol=1e-4, atol=1e-4)
    assert inspect_mtp(tmp_path, deepseek.config).dtypes == ("F32", "F8_E4M3")


def test_only_the_shards_that_hold_the_layer_are_opened(tmp_path, deepseek):
    folder = write_checkpoint(tmp_path, deepseek, random_layer())
    (folder / "model-00001-of-00003.safetensors").unlink()
    head = load_mtp_head(folder, deepseek)
    summary = inspect_mtp(folder, deepseek.config)
    assert (summary.numbers, summary.layers) == ((LAYER,), f"layer {LAYER}")
    assert summary.weights == sum(math.prod(shape) for shape in SHAPES.values())
    assert summary.weights == sum(tensor.numel() for tensor in head.state_dict().values())
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="model-00003-of-00003"):
        inspect_mtp(folder, deepseek.config)


def test_every_missing_unused_and_misshapen_key_is_named_at_once(tmp_path, deepseek):
    weights = quantized(random_layer(), BLOCK)
    gone = ["mlp.experts.5.up_proj.weight", "hnorm.weight", "self_attn.o_proj.weight_scale_inv"]
    extra = {"mlp.experts.8.up_proj.weight": torch.ones(2), "rotary.inv_freq": torch.ones(2)}
    stored = {key: tensor for key, tensor in weights.items() if key not in gone} | extra
    stored["eh_proj.weight"] = torch.ones(32, 32)
    deepseek.config.quantization_config = FP8_CONFIG
    folder = write_checkpoint(tmp_path, deepseek, stored)
    for attempt in (lambda: load_mtp_head(folder, deepseek), lambda: inspect_mtp(folder, deepseek.config)):
        with pytest.raises(InputError) as error:
            attempt()
        missing, unused, wrong = str(error.value).split("; ")[1:]
        assert missing.startswith("missing keys") and all(key in missing for key in gone)
        assert unused.startswith("unused keys") and all(key in unused for key in extra)
        assert "mlp.experts.5.up_proj.weight_scale_inv" in unused
        assert "eh_proj.weight [32, 32] instead of [32, 64]" in wrong


@pytest.mark.parametrize(
    ("family", "options", "layer", "message"),
    [
        ("deepseek_v3", {"num_mtp_layers": 0}, LAYER, "num_nextn_predict_layers"),
        ("deepseek_v3", {}, LAYER + 1, f"holds no key model.layers.{LAYER}"),
        ("qwen3_moe", {}, LAYER, "qwen3_moe"),
    ],
)
def test_what_has_no_such_layer_is_refused(tmp_path, family, options, layer, message):
    model = tiny_model(family, **options)
    folder = write_checkpoint(tmp_path, model, random_layer(), first=layer)
    with pytest.raises(InputError, match=message):
        load_mtp_head(folder, model)


def test_an_own_embedding_and_output_count_and_copies_are_shared(tmp_path, deepseek):
    own = {"embed_tokens.weight": torch.randn(VOCABULARY, 32), "shared_head.head.weight": torch.randn(VOCABULARY, 32)}
    copies = {
        "embed_tokens.weight": deepseek.get_input_embeddings().weight.detach(),
        "shared_head.head.weight": deepseek.lm_head.weight.detach(),
    }
    ids, hidden = target_text(deepseek, 6)
    plain, copied, other = (
        load_mtp_head(write_checkpoint(tmp_path / name, deepseek, random_layer() | extra), deepseek)
        for name, extra in (("plain", {}), ("copied", copies), ("own", own))
    )
    out = {head: run(head, ids[1:], hidden[:-1], head.new_cache()) for head in (plain, copied, other)}
    assert torch.equal(out[plain], out[copied])
    assert copied.layers[0]._attached[1].data_ptr() == deepseek.lm_head.weight.data_ptr()
    torch.testing.assert_close(other.logits(out[other]), out[other] @ own["shared_head.head.weight"].T)
    deepseek.get_input_embeddings().weight.data.copy_(own["embed_tokens.weight"])
    torch.testing.assert_close(out[other], run(plain, ids[1:], hidden[:-1], plain.new_cache()))
