"""Any small decoder becomes a predictor's backbone, and is fed at the scale that it knows."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.evaluation.evaluate import measure_beside_baselines
from ecospec.predictor.kinds.predictor.backbone import backbone_config
from ecospec.predictor.kinds.predictor.config import BackboneConfig
from ecospec.predictor.kinds.predictor.model import ExpertPredictor, ExpertPredictorConfig
from ecospec.predictor.kinds.routing import embedding_hash
from ecospec.predictor.training.fit import fit
from tests.learnable import TABLE, V, learnable_traces, new_predictor, options, trained
from tests.tiny import random_model

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "pad_token_id": 49,
}
FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "gemma3_text": {},
    "granite": {"embedding_multiplier": 12.0},
}


def backbone_folder(family: str, folder: Path) -> nn.Module:
    """A random model of the family, saved to `folder`."""
    torch.manual_seed(7)
    model = AutoModel.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    model.save_pretrained(folder)
    return model


def fed_rms(backbone: nn.Module, **inputs: torch.Tensor) -> float:
    """RMS of what the first decoder layer is fed."""
    seen: list[torch.Tensor] = []
    handle = backbone.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        backbone(**inputs)
    handle.remove()
    return float(seen[0].square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_backbone_keeps_its_weights_loses_its_vocabulary_and_learns(family, tmp_path):
    pretrained = backbone_folder(family, tmp_path)
    config = options(backbone=BackboneConfig(path=str(tmp_path)), max_steps=40)
    predictor = new_predictor(config)
    expected = {name: weight for name, weight in pretrained.state_dict().items() if "embed_tokens" not in name}
    found = predictor.backbone.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    predictor.save_pretrained(tmp_path / "exported")
    reloaded = ExpertPredictor.from_pretrained(tmp_path / "exported").attach_embedding(TABLE)
    ids = torch.arange(V)[None]
    assert torch.equal(reloaded(ids), predictor.eval()(ids))
    metrics = measure_beside_baselines(trained(learnable_traces(0), config)[0], learnable_traces(0))
    assert metrics.numbers.overlap > metrics.others["frequency"].overlap + 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_its_layers_are_fed_at_the_scale_they_know(family, tmp_path):
    own = fed_rms(backbone_folder(family, tmp_path), input_ids=torch.arange(50)[None])
    predictor = new_predictor(options(backbone=BackboneConfig(path=str(tmp_path))))
    embeds = predictor.projection(TABLE.bfloat16().float())[None]
    assert fed_rms(predictor.backbone, inputs_embeds=embeds) == pytest.approx(own, rel=0.3)


def test_a_configuration_alone_gives_a_fresh_backbone_where_that_is_asked_for(tmp_path):
    pretrained = backbone_folder("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    fresh = new_predictor(options(backbone=BackboneConfig(path=str(tmp_path), pretrained=False)))
    expected = {name: weight.shape for name, weight in pretrained.state_dict().items() if "embed_tokens" not in name}
    assert {name: weight.shape for name, weight in fresh.backbone.state_dict().items()} == expected
    with pytest.raises(InputError, match=r"backbone .*pretrained false"):
        new_predictor(options(backbone=BackboneConfig(path=str(tmp_path))))


def test_an_encoder_decoder_is_refused(tmp_path):
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="t5 is no decoder-only"):
        backbone_config(BackboneConfig(path=str(tmp_path)))


def test_a_backbone_that_sees_later_tokens_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    AutoConfig.for_model("bert", vocab_size=50, **sizes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="bert sees later tokens"):
        new_predictor(options(backbone=BackboneConfig(path=str(tmp_path), pretrained=False)))


def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing_else():
    states, calls = [], []
    for on in (False, True):
        config = options(max_steps=5, gradient_checkpointing=on)
        predictor, count = new_predictor(config), [0]
        predictor.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        fit(predictor, learnable_traces(0), config)
        states.append(predictor.state_dict().values())
        calls.append(sum(count))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*states, strict=True))
    assert calls == [5, 10]


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_a_target_that_scales_its_embeddings_shows_the_predictor_the_same_plain_rows_everywhere(family, tmp_path):
    """GraniteMoE multiplies by 12 after the lookup: neither training nor decoding looks beyond the table."""
    scales = {"embedding_multiplier": 12.0, "num_local_experts": 4} if family == "granitemoe" else {"num_experts": 4}
    sizes = {**SIZES, **scales, "num_experts_per_tok": 2}
    target = random_model(AutoConfig.for_model(family, **sizes), seed=3, spread=0.3)
    target.save_pretrained(tmp_path)
    table = load_embedding(TargetConfig(name=str(tmp_path)))
    assert torch.equal(table, target.get_input_embeddings().weight)
    config = ExpertPredictorConfig(vocab_size=50, embedding_size=32, embedding_sha256=embedding_hash(table))
    predictor = ExpertPredictor(config).eval()
    ids, loaded = torch.arange(50)[None], AutoModelForCausalLM.from_pretrained(tmp_path)
    trained_on = predictor.attach_embedding(table)(ids)
    assert torch.equal(predictor.attach_embedding(loaded.get_input_embeddings())(ids), trained_on)


def test_the_embedding_table_is_read_where_all_other_shards_are_absent(tmp_path):
    target = random_model(AutoConfig.for_model("qwen3_moe", **SIZES, num_experts=4), seed=3, spread=0.3)
    target.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = {path.name for path in tmp_path.glob("*.safetensors")}
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {weight_map["model.embed_tokens.weight"]}
    assert len(shards) > 3
    for name in shards - kept:
        (tmp_path / name).unlink()
    table = load_embedding(TargetConfig(name=str(tmp_path)))
    assert torch.equal(table, target.get_input_embeddings().weight)
