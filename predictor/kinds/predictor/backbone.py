"""The small decoder inside a predictor: one of Transformers' by id or folder, with its weights or fresh, or our own.

Refuses to know the target and its embedding table.
"""

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ecospec.errors import InputError, brief
from ecospec.hub import hub_or_cache
from ecospec.predictor.kinds.predictor.config import BackboneConfig
from ecospec.predictor.kinds.predictor.model import without_vocabulary

# Of projected embeddings before training. Smaller, and the first attention layer drowns what the token is (measured).
FRESH_RMS = 0.1


def backbone_config(config: BackboneConfig) -> PreTrainedConfig:
    """Configuration of a decoder without vocabulary. Raises InputError when `backbone.path` has none of a decoder."""
    if config.path is None:
        return AutoConfig.for_model(
            "qwen3",
            vocab_size=1,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            head_dim=config.hidden_size // config.num_heads,
            intermediate_size=config.intermediate_size,
        )
    try:
        with hub_or_cache(config.path):
            backbone = AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise InputError(f"--backbone.path {config.path}: cannot read a model configuration ({brief(error)})") from None
    if backbone.is_encoder_decoder or not hasattr(backbone, "hidden_size"):
        raise InputError(f"--backbone.path {config.path}: a {backbone.model_type} is no decoder-only language model")
    backbone.vocab_size, backbone.pad_token_id = 1, None
    return backbone


@torch.no_grad()
def require_causal(backbone: PreTrainedModel, path: str | None) -> None:
    """Raises InputError for a backbone whose outputs depend on later tokens: drafts have none."""
    first, other = torch.randn(2, 1, 3, backbone.config.hidden_size, generator=torch.Generator().manual_seed(0))
    other[:, :2] = first[:, :2]
    training, _ = backbone.training, backbone.eval()
    outputs = [backbone(inputs_embeds=inputs).last_hidden_state[:, :2] for inputs in (first, other)]
    backbone.train(training)
    if not torch.allclose(*outputs, atol=1e-4):
        raise InputError(f"--backbone.path {path}: a {backbone.config.model_type} sees later tokens; give a decoder")


def pretrained_backbone(path: str) -> tuple[PreTrainedModel, float]:
    """The decoder at `path` in float32 without its vocabulary, and the RMS of its layers' inputs.

    That is what its embedding module put out: families that scale embeddings do so either there (Gemma), which counts,
    or further in (Granite), which acts on a predictor's inputs as well. Raises InputError when there are no weights.
    """
    try:
        backbone = AutoModel.from_pretrained(path, dtype=torch.float32)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"--backbone.path {path}: cannot read its weights ({brief(error)}); for random ones give "
            "--backbone.pretrained false"
        ) from None
    embedding = backbone.get_input_embeddings()
    with torch.no_grad():
        rows = embedding(torch.arange(embedding.weight.shape[0]))
    return without_vocabulary(backbone), float(rows.square().mean().sqrt())
