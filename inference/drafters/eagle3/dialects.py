"""What an EAGLE-3 checkpoint means: from its config.json and the keys and shapes of its weights to a `HeadSpec`.

Writers mean different things by the same field, so four are told apart:
- **speculators** (RedHat): the configuration has `transformer_layer_config` or `speculators_model_type`;
- **ModelOpt** (NVIDIA): `eagle_config` has `use_aux_hidden_state`;
- **EAGLE-3.1** (SpecForge's newer heads and others for SGLang and vLLM): keys begin with `fc_norm.` or `layers.0.`;
- **SafeAILab** otherwise, which is SpecForge, AngelSlim and GTO too.

`norm_output` is where it matters most. SafeAILab's kind has it only from SpecForge before its change #879, where it
means "norm before lm_head" and is on by default: whatever it says, the next step is fed the output before the norm. For
the other three it means "the next step is fed the normed output", off by default. SpecForge trained its first EAGLE-3.1
heads with the older meaning, which no file tells: for such a head set `norm_output` to false in its config.json.
`norm_before_residual` is on by default for speculators, off for the others.

A published head of SafeAILab's kind has its target's `num_hidden_layers` (40) in its config.json and one layer in its
weights. Nothing reads that field of such heads, so there the weights count; for the other three the field does.

Layer ids have two conventions. `eagle_config.eagle_aux_hidden_state_layer_ids` counts layers: i is the output of layer
i, which is boundary i + 1, unless the largest id is the target's number of layers: then they are boundaries. A
top-level `eagle_aux_hidden_state_layer_ids` holds boundaries. With neither it is SafeAILab's formula, and a note.

Letters: V target vocabulary, L layers of the target.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ecospec.errors import InputError, first_few
from ecospec.inference.drafters.eagle3.head import HeadFlags, default_feature_layers
from ecospec.inference.target.features import FINAL

SPECULATORS, MODELOPT, EAGLE31, SAFEAILAB = "speculators", "ModelOpt", "EAGLE-3.1", "SafeAILab"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OLD_NAMES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
ATTENTION = "midlayer.self_attn."
Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeadSpec:
    """What a checkpoint says, resolved.

    `config` has the widths, the vocabularies and the rotary base; `feature_layers` are boundaries as in `Drafter`;
    `names` maps keys of the files to those of `Eagle3Head`, `shapes` are those of the files; `notes` are for the user.
    """

    folder: Path
    writer: str
    config: LlamaConfig
    flags: HeadFlags
    feature_layers: tuple[int, ...]
    names: dict[str, str]
    shapes: dict[str, Shape]
    notes: tuple[str, ...]


def resolve(
    folder: Path,
    values: dict,
    shapes: dict[str, Shape],
    target: PreTrainedConfig,
    feature_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
) -> HeadSpec:
    """The spec of a configuration (`values`) and of the weights' shapes by key.

    `feature_layers` (boundaries) and `rope_theta` replace what the configuration says. Raises InputError when it is no
    head, a quantized one or made for another target, and when layer ids or rotary settings make no sense.
    """
    values = {**values, **(values.get("transformer_layer_config") or {})}
    names = module_names(shapes)
    source = _Source(folder / "config.json", values, {name: shapes[key] for key, name in names.items()}, target)
    source.require_head()
    source.require_target()
    writer = writer_of(values, shapes)
    layers, layer_notes = source.feature_layers(feature_layers)
    head_dim, head_dim_notes = source.head_dim()
    depth, depth_notes = source.depth(writer)
    config = source.config(head_dim, depth, rope_parameters(source.where, values, rope_theta))
    notes = (*layer_notes, *head_dim_notes, *depth_notes, *_other_notes(values, writer))
    return HeadSpec(folder, writer, config, source.flags(writer, layers), layers, names, shapes, notes)


def module_names(keys: Iterable[str]) -> dict[str, str]:
    """The name in `Eagle3Head` of each key of a checkpoint; where two keys have the same name, only of one."""
    names: dict[str, str] = {}
    for key in sorted(keys, reverse=True):
        name = module_name(key)
        if name not in names.values():
            names[key] = name
    return names


def module_name(key: str) -> str:
    """`layers.0.*` and `midlayer.*` are the first layer; what norms a later layer's input may be its `hidden_norm`."""
    for old, new in OLD_NAMES.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    match = re.match(r"(?:midlayer|layers)\.(\d+)\.(.+)", key)
    if not match:
        return key
    number, rest = int(match[1]), match[2]
    if number == 0:
        return f"midlayer.{rest}"
    return f"extra_layers.{number - 1}.{re.sub('^hidden_norm', 'input_layernorm', rest)}"


def key_of(name: str, first_layer: str) -> str:
    """A checkpoint's key for a name in `Eagle3Head`, where the first layer's keys begin with `first_layer`."""
    name = re.sub(r"^midlayer\.", first_layer, name)
    return re.sub(r"^extra_layers\.(\d+)", lambda match: f"layers.{int(match[1]) + 1}", name)


def writer_of(values: dict, keys: Iterable[str]) -> str:
    """Whose meanings the configuration's fields have, as the module's docstring says."""
    if {"transformer_layer_config", "speculators_model_type"} & values.keys():
        return SPECULATORS
    if "use_aux_hidden_state" in (values.get("eagle_config") or {}):
        return MODELOPT
    return EAGLE31 if any(key.startswith(("fc_norm.", *OLD_NAMES, "layers.0.")) for key in keys) else SAFEAILAB


@dataclass(frozen=True)
class _Source:
    """A configuration, the weights' shapes by their names in `Eagle3Head`, and the target's configuration."""

    where: Path
    values: dict
    found: Mapping[str, Shape]
    target: PreTrainedConfig

    def option(self, name: str, default: object = None) -> object:
        """A field of the configuration or of its `eagle_config`; null counts as absent."""
        for group in (self.values, self.values.get("eagle_config") or {}):
            if group.get(name) is not None:
                return group[name]
        return default

    @property
    def target_width(self) -> int:
        return self.option("target_hidden_size") or self.values["hidden_size"]

    @property
    def takes_last_hidden(self) -> bool:
        return self.option("use_aux_hidden_state") is False

    @property
    def draft_vocab_size(self) -> int:
        return self.option("draft_vocab_size", self.found.get("lm_head.weight", (self.target.vocab_size,))[0])

    def require_head(self) -> None:
        """Raises InputError unless this is a head, not quantized, with attention as llama and qwen3 have it."""
        if self.values.get("quantization_config"):
            raise InputError(f"{self.where}: quantization_config: quantized heads cannot be loaded; take a plain one")
        if f"{ATTENTION}q_proj.weight" not in self.found:
            raise InputError(f"{self.where.parent}: not an EAGLE-3 head (no midlayer. or layers.0. self_attn.q_proj)")
        needed = ("hidden_size", "intermediate_size", "num_attention_heads")
        absent = [name for name in needed if not isinstance(self.values.get(name), int)]
        if absent:
            raise InputError(f"{self.where}: missing, or not a whole number: {first_few(absent)}")

    def require_target(self) -> None:
        """Raises InputError unless vocabulary and width are the target's."""
        V, width = self.target.vocab_size, self.target.hidden_size
        sizes = {"vocab_size": self.values.get("vocab_size")}
        sizes |= {
            f"rows of {name}": self.found[name][0] for name in ("t2d", "embed_tokens.weight") if name in self.found
        }
        wrong = [f"{name} {size}" for name, size in sizes.items() if size not in (None, V)]
        if self.target_width != width:
            wrong.append(f"width of the target {self.target_width}")
        if wrong:
            raise InputError(
                f"{self.where.parent}: is not this target's head ({first_few(wrong)}); "
                f"the target has {V} embeddings of width {width}"
            )

    def feature_layers(self, override: Sequence[int] | None) -> tuple[tuple[int, ...], list[str]]:
        """The boundaries that the head is fed, and notes.

        Raises InputError when the target has no such layers, or when they are more or fewer than the head takes.
        """
        name, layers, notes = ("feature_layers", tuple(override), []) if override else self._named_layers()
        L, width = self.target.num_hidden_layers, self.target_width
        if any(not FINAL <= layer <= L for layer in layers):
            raise InputError(f"{self.where}: {name} {list(layers)}: the target has hidden states 0 to {L}")
        taken = self.found.get("fc.weight", (0, len(layers) * width))[1]
        if self.takes_last_hidden:
            taken = self.values["hidden_size"]
        if taken != len(layers) * width:
            raise InputError(
                f"{self.where}: {name} {list(layers)}: the head takes {taken} features, but these layers give "
                f"{len(layers)} times {width}"
            )
        return layers, notes

    def _named_layers(self) -> tuple[str, tuple[int, ...], list[str]]:
        """What names the boundaries, the boundaries, and notes."""
        if self.takes_last_hidden:
            return "use_aux_hidden_state", (FINAL,), []
        L = self.target.num_hidden_layers
        nested, top = (group.get(LAYER_IDS) for group in (self.values.get("eagle_config") or {}, self.values))
        if nested:
            layers = tuple(nested if max(nested) == L else [layer + 1 for layer in nested])
            note = f"took hidden states {list(layers)} from eagle_config.{LAYER_IDS}, not {top} from the top level"
            return f"eagle_config.{LAYER_IDS}", layers, [note] if top and tuple(top) != layers else []
        if top:
            return LAYER_IDS, tuple(top), []
        layers = default_feature_layers(L)
        note = (
            f"config.json does not say which of the target's layers the head is fed; took hidden states {list(layers)} "
            "(0: embeddings), as SafeAILab trains; should few drafts be accepted, give feature_layers"
        )
        return LAYER_IDS, layers, [note]

    def head_dim(self) -> tuple[int, list[str]]:
        """The width of an attention head, from the weights, and notes. Raises InputError when it is not whole."""
        columns, heads = self.found.get(f"{ATTENTION}o_proj.weight", (0, 0))[1], self.values["num_attention_heads"]
        if columns % heads:
            raise InputError(
                f"{self.where}: num_attention_heads {heads} does not divide the {columns} columns of o_proj"
            )
        head_dim, said = columns // heads, self.values.get("head_dim")
        note = f"config.json says head_dim {said}; took {head_dim}, which the weights have"
        return head_dim, [] if said in (None, head_dim) else [note]

    def depth(self, writer: str) -> tuple[int, list[str]]:
        """The number of the head's own layers, and notes."""
        said = self.option("num_hidden_layers", 1)
        if writer != SAFEAILAB:
            return said, []
        stored = 1 + len({name.split(".")[1] for name in self.found if name.startswith("extra_layers.")})
        note = f"config.json says num_hidden_layers {said}; took {stored}, which the weights have"
        return stored, [] if said == stored else [note]

    def flags(self, writer: str, layers: tuple[int, ...]) -> HeadFlags:
        """Every flag; what the configuration does not say, the keys do."""
        found, option = self.found, self.option
        features = 0 if self.takes_last_hidden else len(layers)
        own_embedding = "embed_tokens.weight" in found or self.target_width != self.values["hidden_size"]
        shares_output = self.draft_vocab_size == self.target.vocab_size and not own_embedding
        normed_entry = features and option("use_input_layernorm_in_first_layer", True)
        fed_normed = option("return_hidden_post_norm") or (writer != SAFEAILAB and option("norm_output"))
        biased = any(f"{ATTENTION}{part}_proj.bias" in found for part in "qkv")
        qwen3 = writer == SPECULATORS and self.values.get("model_type") == "qwen3"
        return HeadFlags(
            features=features,
            fc_bias="fc.bias" in found,
            norm_before_fc=bool(option("norm_before_fc", "input_norm.weight" in found)),
            fc_norm=bool(option("fc_norm", option("use_aux_norm", "fc_norm.0.weight" in found))),
            hidden_norm=bool(normed_entry or "midlayer.hidden_norm.weight" in found),
            norm_before_residual=bool(option("norm_before_residual", writer == SPECULATORS)),
            qk_norm=qwen3 or f"{ATTENTION}q_norm.weight" in found,
            qkv_bias=bool(biased or (writer != SAFEAILAB and option("attention_bias"))),
            o_bias=f"{ATTENTION}o_proj.bias" in found,
            last_norm=bool(option("use_last_layernorm", True)),
            post_norm_feedback=bool(fed_normed),
            own_embedding=own_embedding,
            own_output="lm_head.weight" in found or not shares_output,
            logit_scale=float(option("logit_scale", 1.0)),
        )

    def config(self, head_dim: int, depth: int, rotary: dict) -> LlamaConfig:
        """Widths, vocabularies and rotary settings. Raises InputError where a value is of the wrong kind."""
        names = ("num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings")
        given = {name: self.values[name] for name in names if self.values.get(name) is not None}
        try:
            return LlamaConfig(
                **given,
                hidden_size=self.values["hidden_size"],
                intermediate_size=self.values["intermediate_size"],
                num_hidden_layers=depth,
                head_dim=head_dim,
                mlp_bias=bool(self.values.get("mlp_bias")),
                vocab_size=self.target.vocab_size,
                draft_vocab_size=self.draft_vocab_size,
                target_hidden_size=self.target_width,
                rope_parameters=rotary,
                tie_word_embeddings=False,
            )
        except (StrictDataclassError, KeyError) as error:
            raise InputError(f"{self.where}: {' '.join(str(error).split())}") from None


def _other_notes(values: dict, writer: str) -> list[str]:
    notes = []
    if writer == SAFEAILAB and values.get("norm_output") is not None:
        notes.append("norm_output was read as SpecForge means it: the next step is fed the output before the norm")
    if "sliding_attention" in (values.get("layer_types") or ()):
        notes.append("the head's sliding window is not applied: its attention sees the whole text")
    return notes


def rope_parameters(where: Path, values: dict, rope_theta: float | None = None) -> dict:
    """The head's own rotary settings, as Transformers wants them; `rope_theta` replaces the base.

    Raises InputError for two different bases, for an unknown kind, and for settings of a part of a head or by layer.
    """
    given = {**(values.get("rope_parameters") or {}), **(values.get("rope_scaling") or {})}
    bases = {float(base) for base in (given.pop("rope_theta", None), values.get("rope_theta")) if base is not None}
    if rope_theta is None and len(bases) > 1:
        raise InputError(f"{where}: the rotary base is {' and '.join(map(str, sorted(bases)))}; give rope_theta")
    base = float(rope_theta) if rope_theta is not None else next(iter(bases), 10000.0)
    part = given.pop("partial_rotary_factor", values.get("partial_rotary_factor"))
    if part not in (None, 1) or any(isinstance(value, dict) for value in given.values()):
        raise InputError(f"{where}: rotary settings of a part of a head, or by layer, are not supported")
    kind = given.pop("rope_type", None) or given.get("type") or "default"
    given.pop("type", None)
    if kind in ("default", "mrope"):  # the sections of mrope differ only for images
        return {"rope_type": "default", "rope_theta": base}
    if kind not in ROPE_INIT_FUNCTIONS:
        raise InputError(f"{where}: rope_type {kind}: unknown; known are default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    return {"rope_type": kind, "rope_theta": base, **given}
