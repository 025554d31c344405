"""Read a target's embedding table from its checkpoint, and no other weight.

Refuses to load the model: a target of hundreds of GB must not be in memory for its predictor to be trained.

Letters: V vocabulary, D embedding width.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.tracing.target.loading import checkpoint_of, load_target_config


def load_embedding(target: TargetConfig) -> Tensor:
    """The table [V, D] in the dtype of the checkpoint (float32 where that is FP8), from a folder or the hub.

    These are the plain rows. Where a target scales what it looks up, in its embedding module (Gemma) or after it
    (Granite), the predictor does not see that, here no more than in decoding: its projection learns a scale of its own.

    Raises InputError when there is no checkpoint, or none of its weights has the table's name.
    """
    names = _possible_names(target)
    checkpoint = checkpoint_of(target)
    name = next((name for name in names if name in checkpoint), None)
    if name is None:
        raise InputError(f"{checkpoint.name}: the checkpoint has no weight named {' or '.join(names)}")
    return checkpoint.read(name)


def _possible_names(target: TargetConfig) -> list[str]:
    """Names of the input embeddings, from the model on the meta device; where it is tied, also those of the head."""
    model_config = load_target_config(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=target.trust_remote_code)
    return _names_of(model, model.get_input_embeddings().weight)


def _names_of(model: nn.Module, weight: Tensor) -> list[str]:
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
