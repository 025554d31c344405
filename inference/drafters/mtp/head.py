"""The multi-token-prediction (MTP) layers that DeepSeek-V3 and its kin carry behind their own layers, as draft head.

Entry i pairs the target's last hidden state of token i, after the final norm, with the embedding of token i + 1:
x = eh_proj([enorm(embedding); hnorm(hidden)]), then one sparse decoder layer, then shared_head.norm. That output gives
the logits, and is the hidden input of a node's children.

Published checkpoints ship one such layer, which serves every level. Where there are N, layer k is trained on what layer
k - 1 made of the token before: it reads (output of layer k - 1 at the token before, the token), and predicts k tokens
further ahead than layer 0. So level k of a draft is layer k's, the last layer's from level N - 1 on, and a token goes
through every layer that a later draft will need it in: a text's all N, a draft's at level k layers k to N - 1. What
layer k cannot have (it begins k tokens later than layer 0) is never seen.

Letters: B texts, T new entries, S cached and new entries, H hidden width, N layers, V vocabulary, I width of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, Cache, DynamicCache, PreTrainedConfig

from ecospec.errors import InputError
from ecospec.inference.drafters.mtp.checkpoint import MtpTensors
from ecospec.inference.drafters.mtp.layers import Entries, MtpLayer
from ecospec.inference.target.features import FINAL
from ecospec.tracing.target.checkpoint import Checkpoint
from ecospec.tracing.target.fp8 import block_of, quantization_of

FAMILIES = ("deepseek_v3", "glm4_moe")  # same keys, same computation around their own decoder layer
EMBEDDING, OUTPUT = "embed_tokens.weight", "shared_head.head.weight"  # optional, mostly copies of the target's
SHARING = ("eager", "grouped_mm")  # ways to compute experts that read each one once, whatever the tokens


class MtpHead(nn.Module):
    """N layers that draft together; implements `DraftHead`.

    The output of a token holds those of all layers that it went through, H numbers each, its own level's first. Where
    N > 1 one number more follows, so that nothing but a text's tokens is fed exactly H numbers, the target's.
    """

    feature_layers = (FINAL,)
    first_token = 1

    def __init__(self, layers: Sequence[MtpLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._width = layers[0].eh_proj.out_features

    def new_cache(self) -> Cache:
        """See `DraftHead`."""
        return DynamicCache()

    def enter(self, features_BTF: Tensor) -> Tensor:
        """See `DraftHead`."""
        return features_BTF.to(self.layers[0].eh_proj.weight)

    def forward(
        self, ids_BT: Tensor, hidden_BTX: Tensor, positions_BT: Tensor, seen_BTS: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """The outputs [B, T, X] of the layers that these tokens go through; see `DraftHead`."""
        if len(self.layers) == 1:
            return self.layers[0](ids_BT, hidden_BTX, positions_BT, seen_BTS, cache)
        entries = Entries(ids_BT, positions_BT, seen_BTS, cache, len(self.layers))
        is_text = hidden_BTX.shape[-1] == self._width
        outs = self._read(entries, hidden_BTX) if is_text else self._draft(entries, hidden_BTX)
        return F.pad(torch.cat(outs, dim=-1), (0, 1))

    def _read(self, entries: Entries, hidden_BTH: Tensor) -> list[Tensor]:
        """A text's tokens through all layers, each fed what the layer below it made of the token before."""
        before_BNH = entries.outputs_before(hidden_BTH)
        outs = [entries.through(self.layers[0], 0, hidden_BTH)]
        for number, layer in enumerate(self.layers[1:], 1):
            hidden_BTH = torch.cat([before_BNH[:, number - 1, None], outs[-1][:, :-1]], dim=1)
            outs.append(entries.through(layer, number, hidden_BTH))
        entries.remember(outs[:-1])
        return outs

    def _draft(self, entries: Entries, outs_BTX: Tensor) -> list[Tensor]:
        """Drafts through the layers from their level on, fed the outputs of their parents."""
        level = min(self._level(outs_BTX) + 1, len(self.layers) - 1)
        inputs = outs_BTX[..., :-1].split(self._width, dim=-1)
        numbers = range(level, len(self.layers))
        outs = [entries.through(self.layers[k], k, inputs[k - level]) for k in numbers]
        for number in range(level):
            entries.skip(number)
        entries.remember([torch.zeros_like(outs[0])] * (len(self.layers) - 1))  # a draft has no successor in a text
        return outs

    def _level(self, out_BTX: Tensor) -> int:
        """The lowest layer that these are outputs of."""
        return len(self.layers) - out_BTX.shape[-1] // self._width

    def feedback(self, out_BTX: Tensor) -> Tensor:
        """See `DraftHead`."""
        return out_BTX

    def logits(self, out_BTX: Tensor) -> Tensor:
        """See `DraftHead`; the draft vocabulary is the target's."""
        return self.layers[self._level(out_BTX)].logits(out_BTX[..., : self._width])

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `DraftHead`."""
        return draft_ids


@dataclass(frozen=True)
class MtpSummary:
    """What a pre-flight tells of the layers: numbers, weights without embedding and output matrix, dtypes."""

    numbers: tuple[int, ...]
    weights: int
    dtypes: tuple[str, ...]

    @property
    def layers(self) -> str:
        """`layer 61`, or `layers 61 to 63`."""
        first, *others = self.numbers
        return f"layers {first} to {others[-1]}" if others else f"layer {first}"


def inspect_mtp(source: str | Path, config: PreTrainedConfig, revision: str | None = None) -> MtpSummary:
    """What can be known of the MTP layers without reading their weights. Raises what `load_mtp_head` raises."""
    config = config.get_text_config()
    head, stored = _open(source, config, revision)
    weights = sum(tensor.numel() for tensor in head.state_dict().values())
    dtypes = {dtype for tensors in stored for dtype in tensors.dtypes.values()}
    return MtpSummary(tuple(tensors.number for tensors in stored), weights, tuple(sorted(dtypes)))


def load_mtp_head(source: str | Path, target_model: nn.Module, revision: str | None = None) -> MtpHead:
    """The MTP layers of the checkpoint at `source` (folder or hub id) in the target's dtype, beside its output matrix.

    Raises InputError for a family or configuration without such layers, for a checkpoint that cannot be read or does
    not hold them, and for missing, unused and misshapen keys of a layer, all in one.
    """
    config = target_model.config.get_text_config()
    head, stored = _open(source, config, revision, target_model.get_experts_implementation()[""])
    for layer, tensors in zip(head.layers, stored, strict=True):
        _fill(layer, tensors, target_model)
    return head.requires_grad_(False).eval()


def _fill(layer: MtpLayer, tensors: MtpTensors, target_model: nn.Module) -> None:
    """Give a layer its weights and matrices."""
    embedding_VH = target_model.get_input_embeddings().weight
    output_VH = target_model.get_output_embeddings().weight
    kept_float = target_model._keep_in_fp32_modules_strict or ()
    state = {}
    for name, empty in layer.state_dict().items():
        dtype = torch.float32 if any(part in name for part in kept_float) else output_VH.dtype
        state[name] = torch.empty(empty.shape, dtype=dtype, device=output_VH.device)
        for key, index in _sources(name, empty):
            state[name][index] = tensors.read(key).to(state[name])
    layer.load_state_dict(state, assign=True)
    embedding_VH, output_VH = _own(tensors, EMBEDDING, embedding_VH), _own(tensors, OUTPUT, output_VH)
    layer.attach(embedding_VH, output_VH, target_model.get_decoder().rotary_emb)


def _open(
    source: str | Path, config: PreTrainedConfig, revision: str | None, experts_implementation: str | None = None
) -> tuple[MtpHead, list[MtpTensors]]:
    """A head without weights (on the meta device) and for each of its layers tensors that fit it."""
    if config.model_type not in FAMILIES:
        raise InputError(f"{source}: MTP layers of the family {config.model_type} are not supported ({FAMILIES} are)")
    if config.num_mtp_layers < 1:
        raise InputError(f"{source}: its configuration names no MTP layer (num_nextn_predict_layers is 0)")
    head = _empty_head(config, experts_implementation)
    checkpoint = Checkpoint(source, revision, block=block_of(quantization_of(config)))
    stored = [MtpTensors(checkpoint, config.num_hidden_layers + number) for number in range(len(head.layers))]
    matrices = dict.fromkeys((EMBEDDING, OUTPUT), torch.Size([config.vocab_size, config.hidden_size]))
    for layer, tensors in zip(head.layers, stored, strict=True):
        parameters = layer.state_dict().items()
        needed = {key: empty[index].shape for name, empty in parameters for key, index in _sources(name, empty)}
        tensors.require(needed, matrices)
    return head, stored


def _empty_head(config: PreTrainedConfig, experts_implementation: str | None) -> MtpHead:
    """Its decoder layers are those that the family builds where all layers are sparse; in the cache they are 0, 1, …"""
    experts = experts_implementation if experts_implementation in SHARING else "grouped_mm"
    with torch.device("meta"):
        base = AutoModel.from_config(
            config.get_mtp_config(), attn_implementation="sdpa", experts_implementation=experts
        )
        return MtpHead([MtpLayer(layer, type(base.norm), config) for layer in base.layers])


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
