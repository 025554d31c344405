"""The expert predictor Π_θ (EcoSpec §4.1, equation 2): frozen target embedding, projection, small decoder, linear head.

It refuses to know where its token ids come from, which experts were right, and how it is trained; the target's
embedding table is lent to it (`attach_embedding`), never saved with it and never counted as its own.

Letters: B batch, T tokens, L MoE layers, E experts per layer, V vocabulary, D width of the target's embeddings.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ecospec.configs.errors import InputError, brief
from ecospec.configs.files import read_json

HASHED_ROWS = 8192  # rows of the table converted to bf16 at a time
SMALLEST_BACKBONE = {
    "model_type": "qwen3",
    "vocab_size": 1,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
}


class ExpertPredictorConfig(PreTrainedConfig):
    """What a predictor is and which target it belongs to; `backbone` is the configuration of a dense decoder.

    `target` is the target's name, `moe_layers` the model's own numbers of the L MoE layers, `embedding_sha256` the
    `embedding_hash` of its table [vocab_size, embedding_size], `split` the samples it was trained on.
    """

    model_type = "ecospec_expert_predictor"
    sub_configs = {"backbone": AutoConfig}  # noqa: RUF012 - Transformers' own protocol

    def __init__(
        self,
        backbone: PreTrainedConfig | dict | None = None,
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
        if not isinstance(backbone, PreTrainedConfig):
            backbone = AutoConfig.for_model(**(backbone or SMALLEST_BACKBONE))
        self.backbone = backbone
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


class ExpertPredictor(PreTrainedModel):
    """`forward(input_ids [B, T]) → logits [B, T, L, E]`; needs `attach_embedding` first."""

    config: ExpertPredictorConfig
    base_model_prefix = "backbone"
    _supports_sdpa = True

    def __init__(self, config: ExpertPredictorConfig) -> None:
        super().__init__(config)
        hidden_size = config.backbone.hidden_size
        self.projection = nn.Linear(config.embedding_size, hidden_size, bias=False)
        self.backbone = without_vocabulary(AutoModel.from_config(config.backbone))
        self.head = nn.Linear(hidden_size, config.num_layers * config.num_experts)
        self.table_VD: Tensor | None = None  # a plain tensor, so neither a parameter nor a buffer
        self.post_init()

    def attach_embedding(self, embedding: nn.Module | Tensor) -> "ExpertPredictor":
        """Borrow the target's embedding table [V, D], of any float type and device; returns self.

        Raises InputError when shape or hash say that it is not the table this predictor was trained with.
        """
        table_VD = (embedding.weight if isinstance(embedding, nn.Module) else embedding).detach()
        expected, found = [self.config.vocab_size, self.config.embedding_size], list(table_VD.shape)
        if found != expected:
            raise InputError(f"{self._origin()}; this target's embedding table is {found}, not {expected}")
        if embedding_hash(table_VD) != self.config.embedding_sha256:
            raise InputError(
                f"{self._origin()}; this target's embedding table holds other values (in float16 they would: "
                "load it with --target.dtype bfloat16 or float32)"
            )
        self.table_VD = table_VD
        return self

    def forward(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Routing logits z [B, T, L, E] in float32 of token ids [B, T] (equation 2); arguments as of `hidden`."""
        return self.logits(self.hidden(input_ids, cache, attention_mask, position_ids))

    def hidden(
        self,
        input_ids: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The backbone's last hidden states [B, T, hidden width] of token ids [B, T].

        `cache` (a `DynamicCache`) is read and extended; `attention_mask` is [B, past + T] padding or an additive
        [B, 1, T, past + T] tree mask in the predictor's dtype, and `position_ids` [B, T] go with the latter.
        """
        return self.backbone(
            inputs_embeds=self.projection(self._embed(input_ids)),
            cache=cache,
            use_cache=cache is not None,
            attention_mask=attention_mask,
            position_ids=position_ids,
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: hidden states [..., hidden width] → routing logits [..., L, E] in float32."""
        return self.head(hidden).float().unflatten(-1, (self.config.num_layers, self.config.num_experts))

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Rows through bf16, as they were hashed: equal hashes give equal logits whatever the target's dtype."""
        if self.table_VD is None:
            raise RuntimeError("the predictor has no embedding table yet: call attach_embedding(target embeddings)")
        rows_BTD = F.embedding(input_ids.to(self.table_VD.device), self.table_VD).bfloat16()
        weight = self.projection.weight
        return rows_BTD.to(device=weight.device, dtype=weight.dtype)

    def _origin(self) -> str:
        where = self.config.name_or_path or "this predictor"
        return f"predictor {where}: it was trained for target {self.config.target}"


def predictor_values(folder: Path) -> dict:
    """The `config.json` of a predictor folder. Raises InputError for anything else's."""
    values = read_json(folder / "config.json")
    if not isinstance(values, dict) or values.get("model_type") != ExpertPredictorConfig.model_type:
        raise InputError(f"{folder}: is no expert predictor; give the folder that ecospec-train predictor wrote")
    return values


def load_predictor(folder: Path) -> ExpertPredictor:
    """The predictor of a folder, in float32 and without an embedding table.

    Raises InputError when the folder holds something else, or weights that are unreadable or not its configuration's.
    """
    predictor_values(folder)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report on the keys becomes one error below
    try:
        predictor, info = ExpertPredictor.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError) as error:
        where = folder / "model.safetensors"
        raise InputError(f"{where}: no readable weights ({brief(error)}); export it again") from None
    finally:
        logging.set_verbosity(verbosity)
    _require_all_keys(folder, info)
    return predictor


def _require_all_keys(folder: Path, info: dict) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = ", ".join(map(str, sorted(info[kind])[:3]))
            raise InputError(f"{folder / 'model.safetensors'}: {kind.replace('_', ' ')} {names}; export it again")


def without_vocabulary(backbone: PreTrainedModel) -> PreTrainedModel:
    """A decoder stripped of its own token embeddings, which the target's replace."""
    backbone.set_input_embeddings(None)
    return backbone


def embedding_hash(table_VD: Tensor) -> str:
    """sha256 over the rows of a table [V, D] cast to bfloat16, the same for every float type it is kept in."""
    digest = hashlib.sha256()
    for rows in table_VD.detach().split(HASHED_ROWS):
        digest.update(rows.to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
