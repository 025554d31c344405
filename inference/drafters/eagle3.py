"""EAGLE-3 draft heads in the layout of SafeAILab/EAGLE: one decoder layer fed with embedding and target features.

A pair at draft position i is (target features of token i, embedding of token i + 1) and predicts token i + 2. Cache
entries made from target features stay; those of a tree's own nodes are dropped when the tree is done.

Letters: B batch, T tokens, H draft hidden width, F feature width (three target layers), D draft vocabulary,
N tree nodes, k nodes kept per level.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ecospec.configs.errors import InputError
from ecospec.configs.files import read_json, replace_file, write_json
from ecospec.inference.tree import DraftTree, tree_from_levels


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Hidden-state indices (0: embeddings) that SafeAILab's heads are trained on: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


class Eagle3Attention(nn.Module):
    """Grouped-query attention whose input is [embedding; feature], twice the hidden width."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def project(self, inputs_BTW: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each [B, heads, T, head_dim]."""
        shape = (*inputs_BTW.shape[:-1], -1, self.head_dim)
        query = self.q_proj(inputs_BTW).view(shape).transpose(1, 2)
        key = self.k_proj(inputs_BTW).view(shape).transpose(1, 2)
        value = self.v_proj(inputs_BTW).view(shape).transpose(1, 2)
        return *apply_rotary_pos_emb(query, key, *positions), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output [B, T, H]; `mask` bool, True where a query may look, None for plain causal."""
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """The one decoder layer. The residual is the feature before its norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embeds_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeds_BTH), self.hidden_norm(hidden_BTH)], dim=-1)

    def finish(self, hidden_BTH: Tensor, attended_BTH: Tensor) -> Tensor:
        hidden_BTH = hidden_BTH + attended_BTH
        return hidden_BTH + self.mlp(self.post_attention_layernorm(hidden_BTH))


class Eagle3Head(nn.Module):
    """The trainable draft head. The token embedding is the target's, attached, frozen and never saved.

    `d2t` int64 [D] is an offset: draft id i stands for target id i + d2t[i]; `t2d` bool [V] marks those ids.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        H, D = config.hidden_size, config.draft_vocab_size
        self.fc = nn.Linear(3 * getattr(config, "target_hidden_size", H), H, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(H, config.rms_norm_eps)
        self.lm_head = nn.Linear(H, D, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(D, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self._embedding: list[nn.Module] = []

    def attach_embedding(self, embedding: nn.Module) -> "Eagle3Head":
        """Use the target's embedding module. Raises InputError when its shape is not the head's."""
        V, H = embedding.weight.shape
        if (self.config.vocab_size, self.config.hidden_size) != (V, H):
            raise InputError(
                f"drafter: made for a target of {self.config.vocab_size} tokens and width {self.config.hidden_size}, "
                f"but this target has {V} and {H}; take the head that belongs to it"
            )
        self._embedding = [embedding]
        return self

    def embed(self, ids: Tensor) -> Tensor:
        return self._embedding[0](ids).to(self.fc.weight.dtype)

    def positions(self, hidden: Tensor, first: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines for positions first, first + 1, … (or `ids`)."""
        ids = torch.arange(first, first + hidden.shape[1], device=hidden.device) if ids is None else ids
        return self.rotary(hidden, ids[None])

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft-vocabulary logits of pre-norm hidden states, float32."""
        return self.lm_head(self.norm(hidden)).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft-vocabulary ids."""
        return draft_ids + self.d2t[draft_ids]

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, the published layout."""
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items() if "rotary" not in name}
        replace_file(folder / "model.safetensors", lambda partial: save_file(state, partial))
        rope_theta = self.config.rope_parameters["rope_theta"]  # older readers look for it at the top level
        values = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": rope_theta}
        write_json(folder / "config.json", values)

    @classmethod
    def load(cls, folder: Path) -> "Eagle3Head":
        """Read a head. Raises InputError for an absent file, a missing or unused key, or maps that disagree."""
        values = read_json(folder / "config.json")
        if "draft_vocab_size" not in values:
            raise InputError(f"{folder / 'config.json'}: not an EAGLE-3 head (it has no draft_vocab_size)")
        path = folder / "model.safetensors"
        if not path.is_file():
            raise InputError(f"{path}: no such file; the drafter folder holds no weights")
        head = cls(LlamaConfig(**values))
        try:
            missing, unused = head.load_state_dict(load_file(path), strict=False)
        except (RuntimeError, SafetensorError, OSError) as error:
            raise InputError(f"{path}: its weights are unreadable or not its config's ({error})") from None
        if missing or unused:
            raise InputError(f"{path}: missing keys {missing}, unused keys {unused}")
        head.check_maps(path)
        return head.eval()

    def check_maps(self, path: Path) -> None:
        """Raises InputError unless draft ids + d2t are exactly the ids that t2d marks."""
        ids = torch.arange(len(self.d2t)) + self.d2t
        if not torch.equal(ids, self.t2d.nonzero().squeeze(1)):
            raise InputError(f"{path}: d2t and t2d disagree; d2t must be the offset from draft id to target id")


class Eagle3Drafter:
    """Grows a tree of `steps` levels, `topk` children per node, the `topk` best nodes of a level going on."""

    def __init__(self, head: Eagle3Head, feature_layers: tuple[int, ...], steps: int = 3, topk: int = 2) -> None:
        self.head = head
        self.feature_layers = feature_layers
        self.steps = steps
        self.topk = topk
        self.cache = DynamicCache()

    def reset(self) -> None:
        self.cache = DynamicCache()

    @torch.inference_mode()
    def draft(self, ids_T: Tensor, features_nF: Tensor) -> DraftTree:
        """See `Drafter.draft`."""
        n = len(features_nF)
        hidden = self.head.fc(features_nF.to(self.head.fc.weight.dtype))[None]
        stable = self.cache.get_seq_length()
        out = self._forward(ids_T[None, -n:], hidden, stable, self._causal(n, stable))
        levels = self._grow(out[:, -1:], stable + n)
        self._forget_tree(stable + n)
        return tree_from_levels(ids_T[-1], levels)

    def _grow(self, hidden_11H: Tensor, stable: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Levels of (target ids, parents, conditional probabilities), best first within each parent."""
        k, device = self.topk, hidden_11H.device
        conditional, draft_ids = self.head.logits(hidden_11H[0, 0]).softmax(-1).topk(k)
        tokens = self.head.target_ids(draft_ids)
        levels = [(tokens, torch.zeros_like(tokens), conditional)]
        level_start, frontier, frontier_prob = 1, torch.arange(k, device=device), conditional
        parent_hidden = hidden_11H.expand(1, k, -1)
        seen_kM = torch.zeros(k, 0, dtype=torch.bool, device=device)  # tree entries that each frontier node sees
        for depth in range(1, self.steps):
            seen_kM = torch.cat([seen_kM, torch.eye(k, dtype=torch.bool, device=device)], dim=1)
            mask = torch.cat([torch.ones(k, stable, dtype=torch.bool, device=device), seen_kM], dim=1)
            out = self._forward(tokens[frontier][None], parent_hidden, stable + depth - 1, mask, one_position=True)
            conditional, draft_ids = self.head.logits(out[0]).softmax(-1).topk(k)
            parents = (level_start + frontier).repeat_interleave(k)
            level_start += len(tokens)
            tokens = self.head.target_ids(draft_ids.flatten())
            levels.append((tokens, parents, conditional.flatten()))
            frontier_prob, frontier = (frontier_prob[:, None] * conditional).flatten().topk(k)
            parent_hidden, seen_kM = out[:, frontier // k], seen_kM[frontier // k]
        return levels

    def _forward(
        self, ids_BT: Tensor, hidden_BTH: Tensor, first: int, mask: Tensor | None, one_position: bool = False
    ) -> Tensor:
        """Pre-norm output of the layer [B, T, H], appending to the cache."""
        layer = self.head.midlayer
        at = torch.full((hidden_BTH.shape[1],), first, device=hidden_BTH.device) if one_position else None
        positions = self.head.positions(hidden_BTH, first, at)
        query, key, value = layer.self_attn.project(layer.inputs(self.head.embed(ids_BT), hidden_BTH), positions)
        key, value = self.cache.update(key, value, 0)
        return layer.finish(hidden_BTH, layer.self_attn.attend(query, key, value, mask))

    def _causal(self, n: int, stable: int) -> Tensor | None:
        if stable == 0:
            return None
        device = self.head.fc.weight.device
        return torch.ones(n, stable + n, dtype=torch.bool, device=device).tril(stable)

    def _forget_tree(self, stable: int) -> None:
        extra = self.cache.get_seq_length() - stable
        if extra:
            self.cache.crop(-extra)
