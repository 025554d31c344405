"""Tiny EAGLE-3 heads in the layout of each writer, built from its documented keys, and how each must compute.

A head is its config.json and its tensors by key; `Meaning` is what the tests' own arithmetic needs to know of it, in
plain numbers and flags, and is written down here by hand for each writer, not derived from the configuration.

Letters: H draft hidden width, D draft vocabulary, V target vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from tests.tiny import tiny_config

V, D, H, MLP, TARGET_LAYERS = 40, 12, 16, 24, 36
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8  # HEADS × HEAD_DIM is not H, as in the heads for gpt-oss and Qwen3-235B
USED = torch.tensor([0, 1, 2, 5, 6, 9, 17, 18, 25, 31, 38, 39])  # the target ids that can be drafted
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Meaning:
    """How a head computes: its layers' key prefixes, the boundaries it is fed, the rotary base, the writer's flags."""

    prefixes: tuple[str, ...] = ("midlayer.",)
    layers: tuple[int, ...] = (2, 18, 33)
    base: float = 10000.0
    residual_normed: bool = False
    input_norm: bool = False
    part_norms: tuple[str, ...] = ()
    entry_norm: bool = True
    feeds_normed: bool = False
    head_norms: bool = False
    later_norm: str = "input_layernorm"  # of the layers after the first
    logit_scale: float = 1.0
    own_embedding: bool = False
    own_output: bool = True


@dataclass(frozen=True)
class TinyHead:
    """A checkpoint: `values` of its config.json, `tensors` by key, the name of its file."""

    values: dict
    tensors: dict[str, Tensor]
    meaning: Meaning = field(default_factory=Meaning)
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.values))
        if self.file.endswith(".bin"):
            torch.save(self.tensors, folder / self.file)
        else:
            save_file(self.tensors, folder / self.file)
        return folder

    def having(self, **values: object) -> "TinyHead":
        """With other values in config.json."""
        return replace(self, values={**self.values, **values})

    def understood(self, **changes: object) -> "TinyHead":
        """With another meaning."""
        return replace(self, meaning=replace(self.meaning, **changes))

    def with_tensors(self, **tensors: Tensor | None) -> "TinyHead":
        """With other tensors (`__` for a dot in a key), None for leaving one out."""
        changed = {**self.tensors, **{key.replace("__", "."): tensor for key, tensor in tensors.items()}}
        return replace(self, tensors={key: tensor for key, tensor in changed.items() if tensor is not None})


def target_config(**changes: object) -> PreTrainedConfig:
    return tiny_config(
        "qwen3_moe", **{"vocab_size": V, "hidden_size": H, "num_hidden_layers": TARGET_LAYERS, **changes}
    )


def numbers(seed: int) -> Callable[..., Tensor]:
    """Draws matrices of moderate size, and norm weights that are not all alike."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return 1 + 0.3 * values if len(shape) == 1 else 0.3 * values

    return draw


def layer_tensors(draw: Callable[..., Tensor], prefix: str, width: int, hidden: int = H) -> dict[str, Tensor]:
    """One decoder layer whose attention takes `width` columns, without the norm of its hidden input."""
    return {
        f"{prefix}self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.o_proj.weight": draw(hidden, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": draw(MLP, hidden),
        f"{prefix}mlp.up_proj.weight": draw(MLP, hidden),
        f"{prefix}mlp.down_proj.weight": draw(hidden, MLP),
        f"{prefix}input_layernorm.weight": draw(hidden),
        f"{prefix}post_attention_layernorm.weight": draw(hidden),
    }


def head_tensors(draw: Callable[..., Tensor], prefix: str) -> dict[str, Tensor]:
    """The keys that all writers have, except for heads that are fed the target's last hidden state."""
    return {
        "fc.weight": draw(H, 3 * H),
        **layer_tensors(draw, prefix, 2 * H),
        f"{prefix}hidden_norm.weight": draw(H),
        "norm.weight": draw(H),
        "lm_head.weight": draw(D, H),
        "d2t": USED - torch.arange(D),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, USED, True),
    }


def llama_values(**values: object) -> dict:
    return {
        "hidden_size": H,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "vocab_size": V,
        **values,
    }


def safeailab(seed: int = 0, **values: object) -> TinyHead:
    """SafeAILab's, as GTO and others publish too: a `.bin`, no head_dim, no layer ids."""
    common = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "tie_word_embeddings": False}
    tensors = head_tensors(numbers(seed), "midlayer.")
    return TinyHead(llama_values(**common, **values), tensors, file="pytorch_model.bin")


def specforge(seed: int = 0, **values: object) -> TinyHead:
    """SpecForge's for Qwen3: safetensors, head_dim, both places for the rotary base, layer ids nested and by layer."""
    given = {
        "head_dim": HEAD_DIM,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": None,
        "eagle_config": {LAYER_IDS: [1, 17, 33]},
    }
    meaning = Meaning(layers=(2, 18, 34), base=1e6)
    return replace(safeailab(seed, **given, **values), file="model.safetensors", meaning=meaning)


def eagle31(seed: int = 0, **values: object) -> TinyHead:
    """EAGLE-3.1 in SpecForge's layout: each layer's features normed, the next step fed the normed output."""
    draw = numbers(seed + 100)
    head = specforge(seed, fc_norm=True, norm_output=True, **values)
    names = tuple(f"fc_norm.{part}.weight" for part in range(3))
    meaning = replace(head.meaning, part_norms=names, feeds_normed=True)
    return replace(head, tensors=head.tensors | {name: draw(H) for name in names}, meaning=meaning)


def eagle31_old_names(seed: int = 0) -> TinyHead:
    """The same with the names that SGLang still reads."""
    head = eagle31(seed)
    old = {f"fc_norm.{part}.": f"aux_norm_{level}." for part, level in enumerate(("low", "mid", "high"))}
    names = {name: old[name[:10]] + name[10:] for name in head.meaning.part_norms}
    tensors = {names.get(key, key): tensor for key, tensor in head.tensors.items()}
    values = {key: value for key, value in head.values.items() if key != "fc_norm"} | {"use_aux_norm": True}
    return TinyHead(values, tensors, replace(head.meaning, part_norms=tuple(names.values())))


def speculators(seed: int = 0, kind: str = "llama", **values: object) -> TinyHead:
    """RedHat's: the draft's numbers nested, its own embedding, ids as boundaries, the residual normed by default."""
    draw = numbers(seed + 200)
    tensors = head_tensors(numbers(seed), "layers.0.") | {"embed_tokens.weight": draw(V, H)}
    layer = llama_values(
        model_type=kind, head_dim=HEAD_DIM, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    given = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": D,
        "target_hidden_size": None,
        LAYER_IDS: [2, 18, 33],
        "transformer_layer_config": layer,
    }
    meaning = Meaning(prefixes=("layers.0.",), base=5e5, residual_normed=True, own_embedding=True)
    if kind == "qwen3":
        tensors |= {f"layers.0.self_attn.{name}_norm.weight": draw(HEAD_DIM) for name in "qk"}
        meaning = replace(meaning, head_norms=True)
    return TinyHead({**given, **values}, tensors, meaning)


def speculators_normed(seed: int = 0) -> TinyHead:
    """RedHat's with one norm over all features, normed feedback, and a residual that is not normed."""
    head = speculators(seed, norm_before_fc=True, norm_output=True, norm_before_residual=False)
    tensors = head.tensors | {"input_norm.weight": numbers(seed + 300)(3 * H)}
    meaning = replace(head.meaning, input_norm=True, feeds_normed=True, residual_normed=False)
    return replace(head, tensors=tensors, meaning=meaning)


def modelopt(seed: int = 0, eagle_config: dict | None = None, **values: object) -> TinyHead:
    """NVIDIA's long-context head for gpt-oss: no t2d, options in eagle_config, ids by layer."""
    options = {
        LAYER_IDS: [1, 17, 32],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        **(eagle_config or {}),
    }
    tensors = head_tensors(numbers(seed), "layers.0.")
    del tensors["t2d"]
    given = llama_values(draft_vocab_size=D, head_dim=HEAD_DIM, eagle_config=options, **values)
    return TinyHead(given, tensors, Meaning(prefixes=("layers.0.",), layers=(2, 18, 33)))


def modelopt_short(seed: int = 0) -> TinyHead:
    """NVIDIA's short-context head: fed the target's last hidden state, without fc, hidden_norm, maps or lm_head."""
    head = modelopt(seed, {LAYER_IDS: [], "use_aux_hidden_state": False, "has_lm_head": False})
    absent = ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight", "d2t")
    tensors = {key: tensor for key, tensor in head.tensors.items() if key not in absent}
    meaning = replace(head.meaning, layers=(-1,), entry_norm=False, own_output=False)
    return TinyHead(head.values | {"draft_vocab_size": None}, tensors, meaning)


def modelopt_v3(seed: int = 0) -> TinyHead:
    """NVIDIA's v3 head for gpt-oss-120b: boundaries that end at the last layer, one norm over all features."""
    head = modelopt(seed, {LAYER_IDS: [24, 30, 36], "norm_before_fc": True})
    tensors = head.tensors | {"input_norm.weight": numbers(seed + 300)(3 * H)}
    return replace(head, tensors=tensors, meaning=replace(head.meaning, layers=(24, 30, 36), input_norm=True))


def angelslim(seed: int = 0) -> TinyHead:
    """AngelSlim's, whose config.json states a head_dim that the weights do not have."""
    return replace(safeailab(seed, head_dim=80), file="model.safetensors")


def full_vocabulary(seed: int = 0) -> TinyHead:
    """A head that drafts every token of the target: no maps, an output matrix of its own."""
    head = safeailab(seed).with_tensors(d2t=None, t2d=None, lm_head__weight=numbers(seed + 400)(V, H))
    return head.having(draft_vocab_size=V)


def two_layers(seed: int = 0, norm: str = "input_layernorm") -> TinyHead:
    """Two layers, of which only the first is fed embeddings; SGLang calls the norm of the second `hidden_norm`."""
    second = layer_tensors(numbers(seed + 500), "layers.1.", H)
    second[f"layers.1.{norm}.weight"] = second.pop("layers.1.input_layernorm.weight")
    head = modelopt(seed, num_hidden_layers=2)
    meaning = replace(head.meaning, prefixes=("layers.0.", "layers.1."), later_norm=norm)
    return replace(head, tensors=head.tensors | second, meaning=meaning)


def narrow(seed: int = 0) -> TinyHead:
    """Narrower than its target, so with embeddings of its own: H is 8, the target's width 16; fc has a bias."""
    draw, hidden = numbers(seed), 8
    tensors = {
        **head_tensors(draw, "midlayer."),
        "fc.weight": draw(hidden, 3 * H),
        "fc.bias": 0.3 * draw(1, hidden)[0],
        **layer_tensors(draw, "midlayer.", 2 * hidden, hidden),
        "midlayer.hidden_norm.weight": draw(hidden),
        "norm.weight": draw(hidden),
        "lm_head.weight": draw(D, hidden),
        "embed_tokens.weight": draw(V, hidden),
    }
    values = safeailab(seed, target_hidden_size=H).values | {"hidden_size": hidden}
    return TinyHead(values, tensors, Meaning(own_embedding=True))


def biased(seed: int = 0) -> TinyHead:
    """Attention biases and a logit scale, as vLLM reads them."""
    draw = numbers(seed + 600)
    head = speculators(seed, logit_scale=0.5)
    head.values["transformer_layer_config"]["attention_bias"] = True
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": H}
    biases = {f"layers.0.self_attn.{name}_proj.bias": draw(1, size)[0] for name, size in rows.items()}
    return replace(head, tensors=head.tensors | biases, meaning=replace(head.meaning, logit_scale=0.5))


DIALECTS: dict[str, Callable[[int], TinyHead]] = {
    "SafeAILab and GTO": safeailab,
    "SpecForge": specforge,
    "EAGLE-3.1": eagle31,
    "EAGLE-3.1, old names": eagle31_old_names,
    "speculators, llama": speculators,
    "speculators, qwen3": lambda seed: speculators(seed, "qwen3"),
    "speculators, normed": speculators_normed,
    "ModelOpt, long context": modelopt,
    "ModelOpt, short context": modelopt_short,
    "ModelOpt, v3": modelopt_v3,
    "AngelSlim": angelslim,
    "full vocabulary": full_vocabulary,
    "two layers": two_layers,
    "two layers, SGLang": lambda seed: two_layers(seed, "hidden_norm"),
    "narrower than its target": narrow,
    "biases and scale": biased,
}
