"""Targets spread over devices, stored in other formats, and drafters that only the hub has."""

from types import SimpleNamespace

import pytest
import torch

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.inference.cli import main
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.tracing.target import loading
from ecospec.tracing.target.names import part_folder
from tests.tiny import tiny_config


def test_a_target_placed_by_a_device_map_decodes_the_same_text(tiny_target):
    ids = torch.arange(5, 12)[None]
    texts = []
    for device_map in (None, "auto"):
        target = loading.load_target(TargetConfig(name=str(tiny_target), dtype="float32", device_map=device_map))
        out, _ = generate_with(target.model, Method(), ids, max_new_tokens=8, do_sample=False)
        texts.append(out.tolist())
    assert texts[0] == texts[1]


def test_plain_weights_cannot_be_dequantised(tiny_target):
    with pytest.raises(InputError, match=r"dequantize: .* holds plain weights"):
        loading.load_target(TargetConfig(name=str(tiny_target), dequantize=True))


@pytest.mark.parametrize(("method", "kind"), [("mxfp4", "Mxfp4Config"), ("fp8", "FineGrainedFP8Config")])
def test_quantised_weights_are_loaded_as_plain_ones_when_asked(tiny_target, monkeypatch, method, kind):
    """The loader itself needs a real checkpoint; what it is told is checked here."""
    config, told = tiny_config("qwen3_moe"), {}
    config.quantization_config = {"quant_method": method}
    monkeypatch.setattr(loading, "load_target_config", lambda _: config)
    monkeypatch.setattr(loading, "shape_of", lambda *_: SimpleNamespace(vocab_size=264))

    def loader(*_, **options):
        told.update(options)
        raise InputError("stop here")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", loader)
    with pytest.raises(InputError, match="stop here"):
        loading.load_target(TargetConfig(name=str(tiny_target), dequantize=True))
    assert type(told["quantization_config"]).__name__ == kind
    assert told["quantization_config"].dequantize


def test_a_placement_that_does_not_exist_is_refused_before_anything_is_loaded(tiny_target, capsys):
    command = ["check", "--target", str(tiny_target), "--methods", '[{"label": "plain", "drafter": "none"}]']
    assert main([*command, "--target.device_map", "nonsense"]) == 2
    assert "--target.device_map nonsense: give auto" in capsys.readouterr().err
    assert main([*command, "--target.dequantize", "true"]) == 2
    assert "holds plain weights" in capsys.readouterr().err


def test_the_target_may_be_its_own_draft_model(tiny_target, capsys):
    command = ["--target", str(tiny_target), "--drafter.kind", "draft_lm", "--selection", "confidence"]
    assert main(["check", *command, "--drafter.path", str(tiny_target)]) == 0
    assert main(["check", *command, "--drafter.path", str(tiny_target / "nowhere")]) == 2
    assert "cannot read a draft model there" in capsys.readouterr().err


def test_a_drafter_that_is_neither_here_nor_on_the_hub_is_named(monkeypatch):
    def offline(name, **_):
        raise OSError("offline")

    monkeypatch.setattr("ecospec.tracing.target.names.snapshot_download", offline)
    with pytest.raises(InputError, match=r"drafter nobody/nothing: no such folder, and not to be had"):
        part_folder("nobody/nothing", "drafter")
