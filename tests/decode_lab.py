"""A tiny target with a head, a predictor, prompts and traces, and the options of `ecospec-decode` that name them."""

import json
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ecospec.configs.schema import TargetConfig
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.kinds import loading
from ecospec.predictor.kinds.predictor.config import BackboneConfig
from ecospec.tracing.cli import main as trace
from ecospec.tracing.target.loading import config_hash, load_target_config, shape_of
from tests.learnable import fresh_predictor
from tests.stand_ins import DraftMLPStandIn, LinearStandIn
from tests.tiny import VOCABULARY, tiny_target_folder

PROMPTS = ["What is two and two?", "Name a colour.", "Say why."]
BASELINES = '{"label": "plain", "drafter": "none"}, {"label": "stock", "drafter": "hf_greedy"}'


def save_head(folder, vocab_size=VOCABULARY, hidden_size=32, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        max_position_embeddings=256,
    )
    Eagle3Head(config).save(folder)
    (folder / "provenance.json").write_text("{}")


def save_predictor(folder, target):
    config = TrainPredictorConfig(target=TargetConfig(name=str(target)), backbone=BackboneConfig(hidden_size=32))
    model_config = load_target_config(config.target)
    shape = shape_of(model_config)
    predictor = fresh_predictor(config, shape, config_hash(model_config), load_embedding(config.target))
    predictor.save_pretrained(folder)
    metrics = {"overlap": 0.5, "ladder": {"token": {"overlap": 0.4}}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "provenance.json").write_text("{}")


def save_rung(folder, lab, kind, **changes):
    """What is read of a trained rung before it is loaded; it belongs to the lab's target."""
    known = json.loads((lab.root / "predictor" / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known | {"model_type": kind, "draft_size": 32} | changes))
    save_file({"weight": torch.zeros(3, 4)}, folder / "model.safetensors")
    (folder / "metrics.json").write_text('{"overlap": 0.25}')
    return folder


def make_rungs(lab, tmp_path, monkeypatch):
    """A method for every footprint source, as YAML; the trained rungs are random stand-ins."""
    stand_ins = {"linear": LinearStandIn((6, 8, 2)), "draft_mlp": DraftMLPStandIn((6, 8, 2))}
    load, kind_of = loading.load_predictor, loading.kind_of
    monkeypatch.setattr(loading, "load_predictor", lambda path: stand_ins.get(kind_of(path).name) or load(path))
    folders = {
        "predictor": lab.root / "predictor",
        "linear": save_rung(tmp_path / "probe", lab, "ecospec_linear_predictor"),
        "draft_mlp": save_rung(tmp_path / "mlp", lab, "ecospec_draft_mlp"),
    }
    rows = [
        {"label": name, "selection": {"footprints": name}, "predictor": str(folders.get(name, "nowhere"))}
        for name in (*folders, "last_step", "token", "frequency")
    ]
    return f"[{BASELINES}, {json.dumps(rows)[1:]}"


def make_lab(root):
    """A tiny target of six layers, its head, predictor, prompts and traces."""
    target = tiny_target_folder(root / "target", num_hidden_layers=6)
    save_head(root / "head")
    save_predictor(root / "predictor", target)
    prompts = root / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS * 3) + "\n")
    command = ["run", "--target", str(target), "--prompts", str(prompts), "--max-new-tokens", "8"]
    assert trace([*command, "--output", str(root / "traces")]) == 0
    return SimpleNamespace(root=root, target=target, prompts=prompts)


def options(lab, **changes):
    values = {
        "target": lab.target,
        "drafter": lab.root / "head",
        "predictor": lab.root / "predictor",
        "prompts": lab.prompts,
        "samples": 2,
        "max-new-tokens": 24,
        "threads": 1,
    } | changes
    return [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]


def methods(*names):
    rows = [f'{{"label": "{name}", "selection": {{"policy": "{name}"}}}}' for name in names]
    return f"[{BASELINES}, {', '.join(rows)}]"
