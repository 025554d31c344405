"""The predictor as a model: cached and tree forwards equal full ones, exports reload equal, no stranger's embedding.

Letters: B batch, T tokens, N tree nodes, L MoE layers, E experts, V vocabulary, D embedding width.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, DynamicCache

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.kinds.loading import load_predictor
from ecospec.predictor.kinds.predictor.model import SMALLEST_BACKBONE, ExpertPredictor, ExpertPredictorConfig
from ecospec.predictor.kinds.routing import embedding_hash
from tests.tiny import tiny_model, tiny_target_folder

L, E, K, V, D = 3, 8, 2, 40, 12
SEEDS = range(3)
SIZES = {
    "vocab_size": 1,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def table_for(seed: int) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1000 + seed))


@torch.no_grad()
def tiny_predictor(seed: int, family: str = "qwen3") -> ExpertPredictor:
    """Its matrices are drawn wide, so that a wrong mask or position is seen in the logits."""
    config = ExpertPredictorConfig(
        backbone=AutoConfig.for_model(family, **SIZES),
        num_layers=L,
        num_experts=E,
        num_experts_per_tok=K,
        moe_layers=[1, 2, 3],
        target="the-target",
        vocab_size=V,
        embedding_size=D,
        embedding_sha256=embedding_hash(table_for(seed)),
    )
    torch.manual_seed(seed)
    predictor = ExpertPredictor(config).eval()
    for parameter in predictor.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.3)
    return predictor.attach_embedding(table_for(seed))


def random_ids(seed: int, T: int, B: int = 1) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_forward_gives_float32_logits_for_each_layer_and_expert(family):
    logits_BTLE = tiny_predictor(0, family)(random_ids(0, T=5, B=2))
    assert logits_BTLE.shape == (2, 5, L, E)
    assert logits_BTLE.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_cached_forward_equals_full_forward(seed):
    predictor, ids = tiny_predictor(seed), random_ids(seed, T=14)
    full = predictor(ids)
    cache = DynamicCache(config=predictor.config.backbone)
    pieces = [predictor(piece, cache=cache) for piece in ids.split([6, 1, 4, 3], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-4, rtol=1e-4)
    alone = predictor(ids[:, 6:])
    assert (alone - full[:, 6:]).abs().max() > 0.1  # the context matters, so the cache was read


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_every_tree_node_is_predicted_as_if_its_path_were_the_text(seed):
    predictor, context = tiny_predictor(seed), random_ids(seed, T=7)
    parents, nodes = [-1, 0, 0, 1, 1, 2, 3], random_ids(50 + seed, T=7)
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    past, N = context.shape[1], len(parents)
    mask = torch.full((1, 1, N, past + N), torch.finfo(torch.float32).min)
    mask[..., :past] = 0
    for node, path in enumerate(paths):
        mask[..., node, [past + member for member in path]] = 0
    depths = torch.tensor([[len(path) - 1 for path in paths]])
    cache = DynamicCache(config=predictor.config.backbone)
    predictor(context, cache=cache)
    tree = predictor(nodes, cache=cache, attention_mask=mask, position_ids=past + depths)
    for node, path in enumerate(paths):
        text = torch.cat([context, nodes[:, path]], dim=1)
        torch.testing.assert_close(tree[:, node], predictor(text)[:, -1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_padding_at_the_end_changes_no_logit_before_it(seed):
    predictor, ids = tiny_predictor(seed), random_ids(seed, T=6)
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(predictor(padded)[:, :6], predictor(ids), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_left_padding_with_a_mask_changes_no_logit():
    predictor, ids = tiny_predictor(0), random_ids(0, T=6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    positions = torch.tensor([[0] * 4 + list(range(6))])
    masked = predictor(padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(masked[:, 4:], predictor(ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_an_export_reloads_to_equal_logits_and_says_what_it_is(seed, tmp_path):
    predictor, ids = tiny_predictor(seed), random_ids(seed, T=9)
    predictor.save_pretrained(tmp_path)
    for load in (ExpertPredictor.from_pretrained, load_predictor):
        assert torch.equal(load(tmp_path).attach_embedding(table_for(seed))(ids), predictor(ids))
    saved = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "num_layers": L,
        "num_experts": E,
        "num_experts_per_tok": K,
        "moe_layers": [1, 2, 3],
        "target": "the-target",
        "vocab_size": V,
        "embedding_size": D,
        "split": "train",
        "embedding_sha256": embedding_hash(table_for(seed)),
    }
    assert expected.items() <= saved.items()


def test_a_predictor_is_tiny_unless_told_otherwise_and_reloads(tmp_path):
    predictor = ExpertPredictor(ExpertPredictorConfig())
    assert predictor.num_parameters() < 1000
    predictor.save_pretrained(tmp_path)
    loaded = load_predictor(tmp_path)
    assert SMALLEST_BACKBONE.items() <= loaded.config.backbone.to_dict().items()
    assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in predictor.state_dict().items())


@pytest.mark.parametrize("values", [{"model_type": "llama"}, {}, []])
def test_a_folder_of_something_else_is_no_predictor(values, tmp_path):
    tiny_predictor(0).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match="is no expert predictor; give the folder that ecospec-train predictor wrote"):
        load_predictor(tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda weights: weights.pop("head.bias"), "missing keys head.bias"),
        (lambda weights: weights.update(stranger=torch.ones(1)), "unexpected keys stranger"),
        (lambda weights: weights.update({"head.bias": torch.ones(1)}), "mismatched keys .*head.bias"),
    ],
)
def test_weights_that_are_not_the_configurations_are_refused(change, problem, tmp_path):
    tiny_predictor(0).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=problem):
        load_predictor(tmp_path)


@pytest.mark.parametrize("size", [None, 0, 5, 3000])
def test_absent_and_truncated_weights_are_refused(size, tmp_path):
    tiny_predictor(0).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    assert len(content) > 3000
    path.unlink() if size is None else path.write_bytes(content[:size])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_predictor(tmp_path)


def test_no_embedding_table_is_saved_or_counted(tmp_path):
    predictor = tiny_predictor(0)
    hidden, inner, heads, kv_heads, head_dim = 32, 48, 4, 2, predictor.config.backbone.head_dim
    attention = 2 * hidden * head_dim * (heads + kv_heads) + 2 * head_dim
    layer = attention + 3 * hidden * inner + 2 * hidden
    expected = D * hidden + 2 * layer + hidden + (hidden + 1) * L * E
    assert predictor.num_parameters() == sum(p.numel() for p in predictor.parameters()) == expected
    predictor.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - no mapping
    assert sum(torch.Size(shape).numel() for shape in shapes) == expected
    assert all(V not in shape for shape in shapes)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_same_table_in_another_float_type_gives_equal_logits(dtype):
    predictor, ids = tiny_predictor(0), random_ids(0, T=6)
    table_VD = table_for(0).bfloat16().float()
    predictor.config.embedding_sha256 = embedding_hash(table_VD)
    logits = predictor.attach_embedding(table_VD)(ids)
    embedding = nn.Embedding.from_pretrained(table_VD.to(dtype))
    assert torch.equal(predictor.attach_embedding(embedding)(ids), logits)


def test_training_leaves_the_borrowed_table_alone():
    predictor, embedding = tiny_predictor(0), nn.Embedding.from_pretrained(table_for(0), freeze=False)
    predictor.attach_embedding(embedding)
    predictor(random_ids(0, T=4)).sum().backward()
    assert embedding.weight.grad is None
    assert predictor.projection.weight.grad.abs().max() > 0


@pytest.mark.parametrize("stranger", [table_for(1), table_for(0)[:, :-1], table_for(0)[:-1]])
def test_another_targets_embedding_is_refused_by_name(stranger):
    with pytest.raises(InputError, match="trained for target the-target"):
        tiny_predictor(0).attach_embedding(stranger)


def test_one_changed_value_changes_the_hash_and_the_float_type_does_not():
    table_VD = table_for(0).bfloat16()
    changed = table_VD.clone()
    changed[V - 1, D - 1] += 1
    assert embedding_hash(table_VD) == embedding_hash(table_VD.float()) != embedding_hash(changed)


def test_a_forward_without_embedding_says_what_to_call():
    predictor = ExpertPredictor(tiny_predictor(0).config)
    with pytest.raises(RuntimeError, match="attach_embedding"):
        predictor(random_ids(0, T=2))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_embedding_is_read_from_single_and_sharded_checkpoints(family, tmp_path):
    model = tiny_model(family, seed=3)
    expected = model.get_input_embeddings().weight.detach()
    for name, shard_size in (("single", "1GB"), ("sharded", "40KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        assert torch.equal(load_embedding(TargetConfig(name=str(tmp_path / name))), expected)
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()


def test_a_tied_embedding_is_found(tmp_path):
    folder = tiny_target_folder(tmp_path / "tied", tie_word_embeddings=True)
    expected = tiny_model("qwen3_moe", tie_word_embeddings=True).get_output_embeddings().weight
    assert torch.equal(load_embedding(TargetConfig(name=str(folder))), expected)


def test_a_checkpoint_without_the_table_is_refused(tmp_path):
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"target .* holds no weights"):
        load_embedding(TargetConfig(name=str(folder)))
