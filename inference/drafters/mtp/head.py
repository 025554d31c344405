"""The multi-token-prediction (MTP) layer that DeepSeek-V3 and its kin carry behind their decoder layers, as draft head.

Entry i pairs the target's last hidden state of token i, after the final norm, with the embedding of token i + 1:
x = eh_proj([enorm(embedding); hnorm(hidden)]), then one sparse decoder layer, then shared_head.norm. That output gives
the logits, and is the hidden input of a node's children. Checkpoints ship one such layer; it serves every level.

Letters: B texts, T new entries, S cached and new entries, H hidden width, V vocabulary, I width of an expert.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, Cache, DynamicCache, PreTrainedConfig

from ecospec.errors import InputError
from ecospec.inference.drafters.mtp.checkpoint import MtpTensors, block_of
from ecospec.inference.target.features import FINAL
from ecospec.inference.target.masks import additive

FAMILIES = ("deepseek_v3", "glm4_moe")  # same keys, same computation around their own decoder layer
EMBEDDING, OUTPUT = "embed_tokens.weight", "shared_head.head.weight"  # optional, mostly copies of the target's
SHARING = ("eager", "grouped_mm")  # ways to compute experts that read each one once, whatever the tokens


class MtpHead(nn.Module):
    """The layer with the target's (or its own) embedding and output matrix; implements `DraftHead`."""

    feature_layers = (FINAL,)
    first_token = 1

    def __init__(self, layer: nn.Module, norm: type[nn.Module], config: PreTrainedConfig) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = norm(H, eps=eps), norm(H, eps=eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.layer = layer
        self.shared_head = nn.ModuleDict({"norm": norm(H, eps=eps)})

    def attach(self, embedding_VH: Tensor, output_VH: Tensor, rotary: nn.Module) -> "MtpHead":
        """Use these matrices and the target's rotary embedding."""
        self._attached = (embedding_VH, output_VH, rotary)  # a tuple, so that they stay no part of this module
        return self

    def new_cache(self) -> Cache:
        """See `DraftHead`."""
        return DynamicCache()

    def enter(self, features_BTF: Tensor) -> Tensor:
        """See `DraftHead`."""
        return features_BTF.to(self.eh_proj.weight)

    def forward(
        self, ids_BT: Tensor, hidden_BTH: Tensor, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The output after shared_head.norm [B, T, H]; see `DraftHead`."""
        embedding_VH, _, rotary = self._attached
        embedded_BTH = F.embedding(ids_BT.to(embedding_VH.device), embedding_VH).to(hidden_BTH)
        x_BTH = self.eh_proj(torch.cat([self.enorm(embedded_BTH), self.hnorm(hidden_BTH)], dim=-1))
        out_BTH = self.layer(
            x_BTH,
            attention_mask=None if seen_BTS is None else additive(seen_BTS, x_BTH.dtype),
            position_ids=positions_BT,
            position_embeddings=rotary(x_BTH, positions_BT),
            cache=cache,
        )
        return self.shared_head["norm"](out_BTH)

    def feedback(self, out_BTH: Tensor) -> Tensor:
        """See `DraftHead`."""
        return out_BTH

    def logits(self, out_BTH: Tensor) -> Tensor:
        """See `DraftHead`; the draft vocabulary is the target's."""
        return F.linear(out_BTH, self._attached[1]).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `DraftHead`."""
        return draft_ids


@dataclass(frozen=True)
class MtpSummary:
    """What a pre-flight tells of a layer: its number, its weights without embedding and output, their dtypes."""

    number: int
    weights: int
    dtypes: tuple[str, ...]


def inspect_mtp(source: str | Path, config: PreTrainedConfig, revision: str | None = None) -> MtpSummary:
    """What can be known of the MTP layer without reading its weights. Raises what `load_mtp_head` raises."""
    config = config.get_text_config()
    head, tensors = _open(source, config, revision)
    weights = sum(tensor.numel() for tensor in head.state_dict().values())
    return MtpSummary(config.num_hidden_layers, weights, tuple(sorted(set(tensors.dtypes.values()))))


def load_mtp_head(source: str | Path, target_model: nn.Module, revision: str | None = None) -> MtpHead:
    """The MTP layer of the checkpoint at `source` (folder or hub id) in the target's dtype, beside its output matrix.

    Raises InputError for a family or configuration without such a layer, for a checkpoint that cannot be read or does
    not hold it, and for missing, unused and misshapen keys, all named at once.
    """
    config = target_model.config.get_text_config()
    head, tensors = _open(source, config, revision, target_model.get_experts_implementation()[""])
    embedding_VH = target_model.get_input_embeddings().weight
    output_VH = target_model.get_output_embeddings().weight
    place = {"dtype": output_VH.dtype, "device": output_VH.device}
    kept_float = target_model._keep_in_fp32_modules_strict or ()
    state = {}
    for name, empty in head.state_dict().items():
        dtype = torch.float32 if any(part in name for part in kept_float) else output_VH.dtype
        state[name] = torch.empty(empty.shape, **{**place, "dtype": dtype})
        for key, index in _sources(name, empty):
            state[name][index] = tensors.read(key).to(state[name])
    head.load_state_dict(state, assign=True)
    embedding_VH, output_VH = _own(tensors, EMBEDDING, embedding_VH), _own(tensors, OUTPUT, output_VH)
    head.attach(embedding_VH, output_VH, target_model.get_decoder().rotary_emb)
    return head.requires_grad_(False).eval()


def _open(
    source: str | Path, config: PreTrainedConfig, revision: str | None, experts_implementation: str | None = None
) -> tuple[MtpHead, MtpTensors]:
    """A head without weights (on the meta device) and tensors that fit it."""
    if config.model_type not in FAMILIES:
        raise InputError(f"{source}: MTP layers of the family {config.model_type} are not supported ({FAMILIES} are)")
    if config.num_mtp_layers < 1:
        raise InputError(f"{source}: its configuration names no MTP layer (num_nextn_predict_layers is 0)")
    head = _empty_head(config, experts_implementation)
    tensors = MtpTensors(source, config.num_hidden_layers, revision, block_of(config))
    needed = {
        key: empty[index].shape for name, empty in head.state_dict().items() for key, index in _sources(name, empty)
    }
    tensors.require(needed, dict.fromkeys((EMBEDDING, OUTPUT), torch.Size([config.vocab_size, config.hidden_size])))
    return head, tensors


def _empty_head(config: PreTrainedConfig, experts_implementation: str | None) -> MtpHead:
    """The layer is the one that the family builds where all layers are sparse; its number in the cache is 0."""
    alone = config.get_mtp_config()
    alone.num_hidden_layers = 1
    experts = experts_implementation if experts_implementation in SHARING else "grouped_mm"
    with torch.device("meta"):
        base = AutoModel.from_config(alone, attn_implementation="sdpa", experts_implementation=experts)
        return MtpHead(base.layers[0], type(base.norm), config)


def _sources(name: str, parameter: Tensor) -> list[tuple[str, tuple]]:
    """The checkpoint's keys for a parameter of the head, and the part of it that each fills.

    Experts lie apart in the checkpoint and fused in Transformers: gate and up stacked, [experts, 2 I, H], and down.
    """
    key = name.removeprefix("layer.")
    experts, _, fused = key.rpartition("experts.")
    if fused == "down_proj":
        return [(f"{experts}experts.{e}.down_proj.weight", (e,)) for e in range(len(parameter))]
    if fused == "gate_up_proj":
        I = parameter.shape[1] // 2  # noqa: E741
        halves = {"gate_proj": slice(0, I), "up_proj": slice(I, None)}
        return [
            (f"{experts}experts.{e}.{half}.weight", (e, rows))
            for e in range(len(parameter))
            for half, rows in halves.items()
        ]
    return [(key, ())]


def _own(tensors: MtpTensors, key: str, shared_VH: Tensor) -> Tensor:
    """The layer's own matrix where it has one that is no mere copy of the target's."""
    if key not in tensors.shapes:
        return shared_VH
    own_VH = tensors.read(key).to(shared_VH)
    return shared_VH if torch.equal(own_VH, shared_VH) else own_VH
