"""What every trained model of routing shares: its target's identity, the target's embedding table lent to it, a head.

It refuses to know where its token ids come from, which experts were right, and how it is trained; the table is lent to
it (`attach_embedding`), never saved with it and never counted as its own.

Letters: B batch, T tokens, N chosen positions or tree nodes, L MoE layers, E experts per layer, K experts per token,
V vocabulary, D width of the target's embeddings, H hidden width.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ecospec.errors import InputError
from ecospec.inference.footprints import as_footprints
from ecospec.predictor.objective.metrics import top_experts

if TYPE_CHECKING:
    from ecospec.data.module import Batch

HASHED_ROWS = 8192  # rows of the table converted to bf16 at a time


class RoutingConfig(PreTrainedConfig):
    """Which target a model of routing belongs to.

    `target` is the target's name, `moe_layers` the model's own numbers of the L MoE layers, `embedding_sha256` the
    `embedding_hash` of its table [vocab_size, embedding_size], `split` the samples it was trained on.
    """

    def __init__(
        self,
        num_layers: int = 1,
        num_experts: int = 2,
        num_experts_per_tok: int = 1,
        moe_layers: list[int] | None = None,
        target: str = "",
        target_config_sha256: str = "",
        vocab_size: int = 1,
        embedding_size: int = 1,
        embedding_sha256: str = "",
        split: str = "train",
        **kwargs: Any,
    ) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_layers = list(range(num_layers)) if moe_layers is None else list(moe_layers)
        self.target = target
        self.target_config_sha256 = target_config_sha256
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.embedding_sha256 = embedding_sha256
        self.split = split
        super().__init__(**kwargs)


@dataclass(frozen=True)
class TargetIdentity:
    """The fields of a `RoutingConfig` that say whose routing is learnt, and that target's embedding table [V, D]."""

    fields: dict
    table_VD: Tensor


class RoutingModel(PreTrainedModel):
    """Needs `attach_embedding` before use. A kind has `read`, which turns a batch into hidden states, and a `head`."""

    config: RoutingConfig
    head: nn.Linear

    def __init__(self, config: RoutingConfig) -> None:
        super().__init__(config)
        self.table_VD: Tensor | None = None  # a plain tensor, so neither a parameter nor a buffer

    def read(self, batch: "Batch", chosen_BT: Tensor) -> tuple[Tensor, Tensor]:
        """What is learnt of the chosen positions: hidden states [N, H], and the true experts [N, L, K] of each."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: hidden states [..., H] → routing logits [..., L, E] in float32."""
        return self.head(hidden).float().unflatten(-1, (self.config.num_layers, self.config.num_experts))

    def attach_embedding(self, embedding: nn.Module | Tensor) -> "RoutingModel":
        """Borrow the target's embedding table [V, D], of any float type and device; returns self.

        Raises InputError when shape or hash say that it is not the table this model was trained with.
        """
        table_VD = (embedding.weight if isinstance(embedding, nn.Module) else embedding).detach()
        expected, found = [self.config.vocab_size, self.config.embedding_size], list(table_VD.shape)
        if found != expected:
            raise InputError(f"{self.origin()}; this target's embedding table is {found}, not {expected}")
        if embedding_hash(table_VD) != self.config.embedding_sha256:
            raise InputError(
                f"{self.origin()}; this target's embedding table holds other values (in float16 they would: "
                "load it with --target.dtype bfloat16 or float32)"
            )
        self.table_VD = table_VD
        return self

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Rows through bf16, as they were hashed: equal hashes give equal logits whatever the target's dtype."""
        if self.table_VD is None:
            raise RuntimeError("the model has no embedding table yet: call attach_embedding(target embeddings)")
        rows_BTD = F.embedding(input_ids.to(self.table_VD.device), self.table_VD).bfloat16()
        weight = self.head.weight
        return rows_BTD.to(device=weight.device, dtype=weight.dtype)

    def origin(self) -> str:
        """Where the model came from, to begin a message."""
        where = self.config.name_or_path or "this predictor"
        return f"predictor {where}: it was trained for target {self.config.target}"


def likeliest(logits_BNLE: Tensor, top_k: int) -> Tensor:
    """bool [B, N, L, E]: the K experts of each node and layer with the largest logits (paper equation 4)."""
    return as_footprints(top_experts(logits_BNLE, top_k), logits_BNLE.shape[-1])


def step_tokens(model: RoutingModel, tokens: int) -> Tensor:
    """int64 [1, T]: some tokens on the model's device, to time it with."""
    return torch.arange(tokens, device=model.device)[None] % model.config.vocab_size


def embedding_hash(table_VD: Tensor) -> str:
    """sha256 over the rows of a table [V, D] cast to bfloat16, the same for every float type it is kept in."""
    digest = hashlib.sha256()
    for rows in table_VD.detach().split(HASHED_ROWS):
        digest.update(rows.to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
