"""FP8 weights are read by the block size that their checkpoint names, partial last blocks included."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.predictor.embedding import load_embedding
from ecospec.tracing.target.checkpoint import Checkpoint
from ecospec.tracing.target.fp8 import BlockDequantize, BlockQuantizer, FineGrainedFP8Config, dequantize_blocks
from ecospec.tracing.target.loading import config_hash, load_model, load_target, load_target_config
from tests.fp8_folders import SCALE, dequantized_by_hand, quantize_folder, rewrite
from tests.tiny import tiny_target_folder

TARGETS = {
    "blocks that divide no matrix": ("deepseek_v3", {}, (20, 12)),
    "576 rows in blocks of 128": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, (128, 128)),
    "blocks that divide no expert": ("qwen3_moe", {}, (12, 20)),
    "192 rows in blocks of 128": ("qwen3_moe", {"head_dim": 48}, (128, 128)),
}
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU of today computes in FP8")


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def folders(request, tmp_path):
    """An FP8 target, and the model that it is with weights dequantized by hand."""
    family, sizes, block = request.param
    return quantize_folder(tiny_target_folder(tmp_path / "fp8", family, **sizes), tmp_path / "by hand", block)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(5, 40)[None]).logits


@pytest.mark.parametrize("asked", [True, pytest.param(False, marks=ON_CPU)], ids=["asked", "automatic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dequantized_target_is_the_model_of_its_weights_dequantized_by_hand(folders, asked, dtype):
    target = load_target(TargetConfig(name=str(folders), dtype=dtype, dequantize=asked))
    plain = load_target(TargetConfig(name=str(folders.parent / "by hand"), dtype=dtype)).model
    assert target.model.dtype == getattr(torch, dtype)
    for (name, got), expected in zip(target.model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(got, expected), name
    assert torch.equal(logits_of(target.model), logits_of(plain))
    assert getattr(target.model.config, "quantization_config", None) is None


def test_every_tensor_of_a_checkpoint_is_read_as_dequantized_by_hand(folders):
    expected = load_file(folders.parent / "by hand" / "model.safetensors")
    got = Checkpoint(folders).read_all()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert torch.equal(load_embedding(TargetConfig(name=str(folders))), expected["model.embed_tokens.weight"])


@ON_CPU
def test_nobody_else_s_loading_is_changed(tmp_path):
    folder = quantize_folder(tiny_target_folder(tmp_path / "fp8"), tmp_path / "by hand", (16, 16))
    config = load_target_config(TargetConfig(name=str(folder)))
    target = load_target(TargetConfig(name=str(folder), dtype="float32"))
    assert target.config_sha256 == config_hash(config)
    assert config.quantization_config["quant_method"] == "fp8"
    assert AUTO_QUANTIZER_MAPPING["fp8"] is FineGrainedFP8HfQuantizer
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits_of(target.model), logits_of(theirs)), "whole blocks are read alike"
    assert FineGrainedFP8HfQuantizer(FineGrainedFP8Config()).get_load_operations() == {"dequantize": Fp8Dequantize}
    assert BlockQuantizer(FineGrainedFP8Config(quant_method="ecospec_fp8")).quantization_config.quant_method == "fp8"


@ON_CPU
@pytest.mark.parametrize("quantization", [{}, {"weight_block_size": None}])
def test_without_a_block_size_the_scales_divide_the_weights_evenly(tmp_path, quantization):
    folder = quantize_folder(tiny_target_folder(tmp_path / "fp8", head_dim=48), tmp_path / "by hand", (24, 8))
    rewrite(folder, load_file(folder / "model.safetensors"), {"quant_method": "fp8", **quantization})
    key = "model.layers.0.self_attn.q_proj.weight"
    expected = load_file(tmp_path / "by hand" / "model.safetensors")[key]
    assert torch.equal(Checkpoint(folder).read(key), expected)
    model = load_target(TargetConfig(name=str(folder), dtype="float32")).model
    assert torch.equal(model.state_dict()[key], expected)


@pytest.mark.parametrize("block", [(24, 8), None])
def test_scales_that_do_not_fit_are_refused_by_name(tmp_path, block):
    folder = quantize_folder(tiny_target_folder(tmp_path / "fp8"), tmp_path / "by hand", (24, 8))
    stored = load_file(folder / "model.safetensors")
    keys = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(3)]
    for key in keys:
        stored[key + SCALE] = torch.ones(5, 3)
    rewrite(folder, stored, {"quant_method": "fp8", "weight_block_size": block})
    with pytest.raises(InputError, match=rf"{keys[0]}: .*5 × 3.*weight_block_size"):
        Checkpoint(folder).read(keys[0])
    if block is not None:
        with pytest.raises(InputError, match=r"target .*\[24, 8\].*o_proj.weight \[32, 32\] with \[5, 3\]"):
            load_target(TargetConfig(name=str(folder), dtype="float32", dequantize=True))


def test_a_weight_in_fp8_without_scales_is_refused_by_name(tmp_path):
    folder = quantize_folder(tiny_target_folder(tmp_path / "fp8"), tmp_path / "by hand", (24, 8))
    stored = load_file(folder / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.weight"
    del stored[key + SCALE]
    rewrite(folder, stored, {"quant_method": "fp8", "weight_block_size": [24, 8]})
    with pytest.raises(InputError, match=rf"model.safetensors: holds no tensor {key}{SCALE}|holds no tensor {key}"):
        Checkpoint(folder).read(key)


def test_scales_as_exponents_and_one_scale_for_a_whole_weight_are_understood():
    weight = torch.randn(5, 3).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[126, 128], [127, 130]], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 2.0], [1.0, 8.0]])
    assert torch.equal(dequantize_blocks(weight, exponents, (3, 2)), dequantized_by_hand(weight, scales, (3, 2)))
    for scale in (torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([[3.0]])):
        assert torch.equal(dequantize_blocks(weight, scale, None), weight.float() * 3)


def test_packed_fp4_stays_transformers_own(tmp_path):
    """DeepSeek-V4's experts have blocks of 1 × 32 of their own beside a weight_block_size of 128 × 128."""
    quantizer = BlockQuantizer(FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True))
    packed = torch.randint(-128, 128, (8, 32), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    given = {"weight": [packed], "weight_scale_inv": [torch.rand(8, 2)]}
    got, theirs = (kind(quantizer).convert(dict(given))["weight"] for kind in (BlockDequantize, Fp8Dequantize))
    assert torch.equal(got, theirs)


@pytest.mark.parametrize("folders", [TARGETS["576 rows in blocks of 128"]], indirect=True)
def test_where_a_gpu_computes_in_fp8_weights_and_scales_stay_as_they_are(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = load_target_config(TargetConfig(name=str(folders)))
    model = load_model(folders, "the target", config, device_map={"": "cpu"})
    stored, state = load_file(folders / "model.safetensors"), model.state_dict()
    key = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert state[key].dtype == torch.float8_e4m3fn
    assert torch.equal(state[key].float(), stored[key].float())
    assert torch.equal(state[f"{key}_scale_inv"].float(), stored[key + SCALE])
    assert model.config.quantization_config.quant_method == "fp8"
