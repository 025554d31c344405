"""The expert predictor Π_θ (EcoSpec §4.1, equation 2): frozen target embedding, projection, small decoder, linear head.

Letters: B batch, T tokens, N chosen positions, L MoE layers, E experts per layer, K experts per token, D width of the
target's embeddings, H hidden width.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig, PreTrainedModel

from ecospec.predictor.kinds.predictor.kind import KIND
from ecospec.predictor.kinds.routing import RoutingConfig, RoutingModel

if TYPE_CHECKING:
    from ecospec.data.module import Batch

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


class ExpertPredictorConfig(RoutingConfig):
    """`backbone` is the configuration of a dense decoder."""

    model_type = KIND.model_type
    sub_configs = {"backbone": AutoConfig}  # noqa: RUF012 - Transformers' own protocol

    def __init__(self, backbone: PreTrainedConfig | dict | None = None, **kwargs: Any) -> None:
        if not isinstance(backbone, PreTrainedConfig):
            backbone = AutoConfig.for_model(**(backbone or SMALLEST_BACKBONE))
        self.backbone = backbone
        super().__init__(**kwargs)


class ExpertPredictor(RoutingModel):
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
        self.post_init()

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

    def read(self, batch: "Batch", chosen_BT: Tensor) -> tuple[Tensor, Tensor]:
        """See `RoutingModel`."""
        return self.hidden(batch.input_ids)[chosen_BT], batch.experts[chosen_BT]


def without_vocabulary(backbone: PreTrainedModel) -> PreTrainedModel:
    """A decoder stripped of its own token embeddings, which the target's replace."""
    backbone.set_input_embeddings(None)
    return backbone
