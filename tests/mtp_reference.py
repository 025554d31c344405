"""A synthetic MTP layer under the published keys, checkpoints that hold it, and its slow reference in plain PyTorch.

Letters: n entries, H hidden width, h heads, d rotary width.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LAYER = 3  # the tiny models have 3 decoder layers
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
BLOCK = (16, 12)  # of the FP8 weights: neither divides every size
ATTENTION_SHAPES = {
    "self_attn.q_a_proj.weight": (16, 32),
    "self_attn.q_a_layernorm.weight": (16,),
    "self_attn.q_b_proj.weight": (64, 16),
    "self_attn.kv_a_proj_with_mqa.weight": (24, 32),
    "self_attn.kv_a_layernorm.weight": (16,),
    "self_attn.kv_b_proj.weight": (64, 16),
    "self_attn.o_proj.weight": (32, 32),
}
SHAPES = {
    **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (32,)),
    **dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (32,)),
    "eh_proj.weight": (32, 64),
    **ATTENTION_SHAPES,
    "mlp.gate.weight": (8, 32),
    "mlp.gate.e_score_correction_bias": (8,),
    "mlp.shared_experts.gate_proj.weight": (16, 32),
    "mlp.shared_experts.up_proj.weight": (16, 32),
    "mlp.shared_experts.down_proj.weight": (32, 16),
    **{f"mlp.experts.{e}.{way}_proj.weight": (16, 32) for e in range(8) for way in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (32, 16) for e in range(8)},
}


def random_layer(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    norms = {key: 1.0 if "norm" in key else 0.0 for key in SHAPES}
    return {key: norms[key] + 0.3 * torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def write_checkpoint(folder: Path, model: nn.Module, *layers: dict[str, Tensor], first: int = LAYER) -> Path:
    """Three shards: the model, and the keys of the layers from `first` on dealt onto two. Returns the folder."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    stored = {
        f"model.layers.{layer}.{key}": tensor
        for layer, tensors in enumerate(layers, first)
        for key, tensor in tensors.items()
    }
    keys = sorted(stored)
    weight_map = {"model.embed_tokens.weight": "model-00001-of-00003.safetensors"}
    for number, part in ((2, keys[::2]), (3, keys[1::2])):
        name = f"model-0000{number}-of-00003.safetensors"
        save_file({key: stored[key].contiguous() for key in part}, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def add_layers_of(donor: Path, folder: Path, count: int) -> None:
    """Adds prediction layers to the single file in `folder`, their decoder layers being the donor's last ones."""
    generator = torch.Generator().manual_seed(0)
    stored, given = load_file(folder / "model.safetensors"), load_file(donor / "model.safetensors")
    for number in range(count):
        source, prefix = f"model.layers.{LAYER - 1 - number}.", f"model.layers.{LAYER + number}."
        stored |= {key.replace(source, prefix): tensor for key, tensor in given.items() if key.startswith(source)}
        for name, shape in {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}.items():
            stored[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(shape, generator=generator)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x_nhd: Tensor, positions_n: Tensor, rotary: nn.Module) -> Tensor:
    """Neighbouring numbers are a complex one, turned by position × frequency."""
    turn = torch.polar(torch.ones(()), positions_n[:, None].float() * rotary.inv_freq) * rotary.attention_scaling
    pairs = torch.view_as_complex(x_nhd.reshape(*x_nhd.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def attend(w: dict[str, Tensor], x_nH: Tensor, positions_n: Tensor, rotary: nn.Module) -> Tensor:
    """Causal multi-head latent attention: 4 heads of 8 plain and 8 rotary numbers."""
    n = len(x_nH)
    query = (rms(x_nH @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T).view(n, 4, 16)
    latent, turned = (x_nH @ w["kv_a_proj_with_mqa.weight"].T).split([16, 8], -1)
    expanded = (rms(latent, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).view(n, 4, 16)
    key_rotated = rotate(turned[:, None], positions_n, rotary).expand(-1, 4, -1)
    key = torch.cat([expanded[..., :8], key_rotated], -1)
    query = torch.cat([query[..., :8], rotate(query[..., 8:], positions_n, rotary)], -1)
    scaling = (0.1 * math.log(YARN["factor"]) + 1) ** 2 / math.sqrt(16)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), expanded[..., 8:])
    return mixed.flatten(1) @ w["o_proj.weight"].T


def swiglu(w: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{part}.{way}_proj.weight"] for way in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(w: dict[str, Tensor], x_H: Tensor) -> Tensor:
    """One token: the 2 best of 4 groups by their 2 best experts, then the 2 best experts of those, scaled by 2.5."""
    scores = (w["mlp.gate.weight"] @ x_H).sigmoid()
    biased = (scores + w["mlp.gate.e_score_correction_bias"]).tolist()
    groups = sorted(range(4), key=lambda g: -sum(biased[2 * g : 2 * g + 2]))[:2]
    best = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -biased[e])[:2]
    total = sum(scores[e] for e in best)
    routed = sum(2.5 * scores[e] / total * swiglu(w, f"mlp.experts.{e}", x_H) for e in best)
    return routed + swiglu(w, "mlp.shared_experts", x_H)


def reference(w: dict[str, Tensor], model: nn.Module, ids_n: Tensor, hidden_nH: Tensor) -> Tensor:
    """The layer's outputs after its last norm for a whole chain of entries, without a cache."""
    embedded_nH = model.get_input_embeddings().weight[ids_n]
    x = torch.cat([rms(embedded_nH, w["enorm.weight"]), rms(hidden_nH, w["hnorm.weight"])], -1) @ w["eh_proj.weight"].T
    attention = {key.removeprefix("self_attn."): w[key] for key in ATTENTION_SHAPES}
    positions = torch.arange(len(ids_n))
    x = x + attend(attention, rms(x, w["input_layernorm.weight"]), positions, model.model.rotary_emb)
    mixed = torch.stack([mixture(w, row) for row in rms(x, w["post_attention_layernorm.weight"])])
    return rms(x + mixed, w["shared_head.norm.weight"])


def reference_draft(
    layers: list[dict[str, Tensor]], model: nn.Module, ids_n: Tensor, hidden_nH: Tensor, path: list[int]
) -> Tensor:
    """[H]: the output from which the children of `path`'s last token come, a path of drafts below a text.

    Layer k reads the text and the path k tokens further ahead, beside what layer k - 1 made; a path longer than there
    are layers is read to its end by the last, beside its own outputs. Every layer reads everything afresh.
    """
    tokens, n = torch.cat([ids_n, torch.tensor(path, dtype=torch.long)]), len(ids_n)
    for number, weights in enumerate(layers[: len(path) + 1]):
        read, last = tokens[number : number + n], hidden_nH
        hidden_nH = reference(weights, model, read, hidden_nH)
    for token in path[len(layers) - 1 :]:
        read, last = torch.cat([read, torch.tensor([token])]), torch.cat([last, hidden_nH[-1:]])
        hidden_nH = reference(layers[-1], model, read, last)
    return hidden_nH[-1]
