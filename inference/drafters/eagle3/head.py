"""EAGLE-3 draft heads: decoder layers fed with a token's embedding and the target's features of the token before it.

Entry i of the cache is the pair (target features of token i, embedding of token i + 1), which predicts token i + 2. At
the first step of a draft the hidden input comes from the target's features, after that from the head's own output.
`HeadFlags` says what distinguishes the heads of different writers; `eagle3_checkpoint` reads it from a checkpoint.

Letters: B texts, T tokens of a text, H draft hidden width, F width of the target's features, W width of a layer's
attention input, D draft vocabulary, V target vocabulary, S cached and appended entries.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ecospec.errors import InputError
from ecospec.files import replace_file, write_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadFlags:
    """How a head is built and used; the defaults are SafeAILab's.

    `features`: how many layers of the target it is fed; 0: the target's last hidden state as it is, without `fc`.
    `fc_bias`, `qkv_bias`, `o_bias`: which projections have one. `qk_norm`: queries and keys are normed by head.
    `norm_before_fc`: one norm over all features; `fc_norm`: one for each layer's. `hidden_norm`: the hidden half of the
    attention's input is normed; `norm_before_residual`: and the residual is that normed half. `last_norm`: outputs are
    normed before `lm_head`; `post_norm_feedback`: and so is what the next step is fed. `own_embedding`, `own_output`:
    it has embeddings or an output matrix of its own, otherwise they are the target's. `logit_scale` multiplies logits.
    """

    features: int = 3
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    hidden_norm: bool = True
    norm_before_residual: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    last_norm: bool = True
    post_norm_feedback: bool = False
    own_embedding: bool = False
    own_output: bool = True
    logit_scale: float = 1.0


PLAIN = HeadFlags()


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Hidden-state indices (0: embeddings) that SafeAILab's heads are trained on: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def norm_or_nothing(wanted: bool, width: int, config: LlamaConfig) -> nn.Module:
    return LlamaRMSNorm(width, config.rms_norm_eps) if wanted else nn.Identity()


class Eagle3Attention(nn.Module):
    """Grouped-query attention whose input is W wide: in the first layer [embedding; feature], 2H."""

    def __init__(self, config: LlamaConfig, flags: HeadFlags = PLAIN, first: bool = True) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        W = (2 if first else 1) * config.hidden_size
        queries, keys = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(W, queries, bias=flags.qkv_bias)
        self.k_proj = nn.Linear(W, keys, bias=flags.qkv_bias)
        self.v_proj = nn.Linear(W, keys, bias=flags.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=flags.o_bias)
        self.q_norm = norm_or_nothing(flags.qk_norm, self.head_dim, config)
        self.k_norm = norm_or_nothing(flags.qk_norm, self.head_dim, config)

    def project(self, inputs_BTW: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [B, heads, T, head_dim]."""
        shape = (*inputs_BTW.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(inputs_BTW).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(inputs_BTW).view(shape)).transpose(1, 2)
        value = self.v_proj(inputs_BTW).view(shape).transpose(1, 2)
        return *apply_rotary_pos_emb(query, key, *positions), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output [B, T, H]; `mask` bool, True where a query may look, None for plain causal."""
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """One decoder layer; only the first is fed embeddings, the others are plain ones."""

    def __init__(self, config: LlamaConfig, flags: HeadFlags = PLAIN, first: bool = True) -> None:
        super().__init__()
        self.first = first
        self.norm_before_residual = first and flags.norm_before_residual
        self.self_attn = Eagle3Attention(config, flags, first)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = norm_or_nothing(first and flags.hidden_norm, config.hidden_size, config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embeds_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        """The attention's input [B, T, W]."""
        if not self.first:
            return self.input_layernorm(hidden_BTH)
        return torch.cat([self.input_layernorm(embeds_BTH), self.hidden_norm(hidden_BTH)], dim=-1)

    def finish(self, hidden_BTH: Tensor, attended_BTH: Tensor) -> Tensor:
        """The layer's output [B, T, H] from its hidden input and what its attention made of it."""
        residual_BTH = self.hidden_norm(hidden_BTH) if self.norm_before_residual else hidden_BTH
        out_BTH = residual_BTH + attended_BTH
        return out_BTH + self.mlp(self.post_attention_layernorm(out_BTH))


class Eagle3Head(nn.Module):
    """The draft head, a `DraftHead`; embedding and output matrix may be the target's: attached, frozen, never saved.

    `d2t` int64 [D] is an offset: draft id i stands for target id i + d2t[i]; `t2d` bool [V] marks those ids.
    """

    first_token = 1

    def __init__(self, config: LlamaConfig, flags: HeadFlags = PLAIN, feature_layers: Sequence[int] = ()) -> None:
        super().__init__()
        self.config, self.flags, self.feature_layers = config, flags, tuple(feature_layers)
        H, D, V = config.hidden_size, config.draft_vocab_size, config.vocab_size
        width = getattr(config, "target_hidden_size", None) or H
        normed_parts = range(flags.features if flags.fc_norm else 0)
        self.input_norm = norm_or_nothing(flags.norm_before_fc, flags.features * width, config)
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in normed_parts)
        self.fc = nn.Linear(flags.features * width, H, flags.fc_bias) if flags.features else nn.Identity()
        self.midlayer = Eagle3Layer(config, flags)
        others = range(1, config.num_hidden_layers)
        self.extra_layers = nn.ModuleList(Eagle3Layer(config, flags, first=False) for _ in others)
        self.norm = norm_or_nothing(flags.last_norm, H, config)
        if flags.own_output:
            self.lm_head = nn.Linear(H, D, bias=False)
        if flags.own_embedding:
            self.embed_tokens = nn.Embedding(V, H).requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(D, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(V, dtype=torch.bool))
        # What follows is in lists to stay out of the module tree: it is not saved, and no cast rounds the frequencies.
        with torch.device("cpu"):
            self._rotary = [LlamaRotaryEmbedding(config)]
        self._embedding: list[nn.Module] = [self.embed_tokens] if flags.own_embedding else []
        self._output: list[nn.Module] = [self.lm_head] if flags.own_output else []
        self._noticed_length = False

    @property
    def dtype(self) -> torch.dtype:
        return self.midlayer.self_attn.q_proj.weight.dtype

    def attach(self, target: nn.Module) -> "Eagle3Head":
        """Use the target's embedding and output matrix where the head has none.

        Raises InputError when their shapes are not the head's.
        """
        if not self.flags.own_output:
            self._output = [self._of_my_shape(target.get_output_embeddings())]
        return self.attach_embedding(target.get_input_embeddings())

    def attach_embedding(self, embedding: nn.Module) -> "Eagle3Head":
        """Use this embedding unless the head has its own. Raises InputError when its shape is not the head's."""
        if not self.flags.own_embedding:
            self._embedding = [self._of_my_shape(embedding)]
        return self

    def _of_my_shape(self, module: nn.Module) -> nn.Module:
        V, H = module.weight.shape
        if (self.config.vocab_size, self.config.hidden_size) != (V, H):
            raise InputError(
                f"drafter: made for a target of {self.config.vocab_size} tokens and width {self.config.hidden_size}, "
                f"but this target has {V} and {H}; take the head that belongs to it"
            )
        return module

    def new_cache(self) -> Cache:
        """See `DraftHead`."""
        return DynamicCache()

    def enter(self, features_BTF: Tensor) -> Tensor:
        """See `DraftHead`: the features, normed as the head's writer did, through `fc`."""
        features_BTF = self.input_norm(features_BTF.to(self.dtype))
        if self.fc_norm:
            parts = features_BTF.chunk(len(self.fc_norm), dim=-1)
            features_BTF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features_BTF)

    def forward(
        self, ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache
    ) -> Tensor:
        """See `DraftHead`: the last layer's output [B, T, H], before the head's norm."""
        self._notice_length(positions_BT, cache)
        rotation = self._rotation(hidden_BTH, positions_BT)
        mask_B1TS = None if seen_BTS is None else seen_BTS[:, None]
        embeds_BTH = self.embed(ids_BT)
        for index, layer in enumerate((self.midlayer, *self.extra_layers)):
            query, key, value = layer.self_attn.project(layer.inputs(embeds_BTH, hidden_BTH), rotation)
            key, value = cache.update(key, value, index)
            hidden_BTH = layer.finish(hidden_BTH, layer.self_attn.attend(query, key, value, mask_B1TS))
        return hidden_BTH

    def feedback(self, out_BTH: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self.norm(out_BTH) if self.flags.post_norm_feedback else out_BTH

    def logits(self, out_BTH: Tensor) -> Tensor:
        """See `DraftHead`; of outputs before the head's norm."""
        (output,) = self._output
        return output(self.norm(out_BTH).to(output.weight.dtype)).float() * self.flags.logit_scale

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `DraftHead`."""
        return draft_ids + self.d2t[draft_ids]

    def embed(self, ids: Tensor) -> Tensor:
        (embedding,) = self._embedding
        return embedding(ids).to(self.dtype)

    def positions(self, hidden_BTH: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines for positions first, first + 1, …"""
        return self._rotation(
            hidden_BTH, torch.arange(first, first + hidden_BTH.shape[1], device=hidden_BTH.device)[None]
        )

    def _rotation(self, hidden_BTH: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        (rotary,) = self._rotary
        if rotary.inv_freq.device != hidden_BTH.device:
            rotary.to(hidden_BTH.device)
        return rotary(hidden_BTH, positions_BT)

    def _notice_length(self, positions_BT: Tensor, cache: Cache) -> None:
        """Say once that a text is longer than the head was made for.

        A position is below the number of entries cached and appended, so values are looked at only when that is large.
        """
        limit = self.config.max_position_embeddings
        if self._noticed_length or cache.get_seq_length() + positions_BT.shape[1] <= limit:
            return
        if positions_BT.max() >= limit:
            self._noticed_length = True
            log.warning(
                "drafter: a text is longer than the %d positions that the head was made for; what is decoded stays "
                "right, but fewer drafts may be accepted",
                limit,
            )

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, SafeAILab's layout. Raises ValueError for a head of another kind."""
        if self.flags != PLAIN or self.extra_layers:
            raise ValueError("only a head with SafeAILab's flags and one layer can be written in SafeAILab's layout")
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        replace_file(folder / "model.safetensors", lambda partial: save_file(state, partial))
        rope_theta = self.config.rope_parameters["rope_theta"]  # older readers look for it at the top level
        values = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": rope_theta}
        if self.feature_layers:
            values["eagle_aux_hidden_state_layer_ids"] = list(self.feature_layers)
        write_json(folder / "config.json", values)
