"""Read a target's embedding table from its checkpoint, and no other weight.

Refuses to load the model: a target of hundreds of GB must not be in memory for its predictor to be trained.

Letters: V vocabulary, D embedding width.
"""

from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.files import read_json
from ecospec.tracing.target.loading import load_target_config
from ecospec.tracing.target.names import resolve_target

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_embedding(target: TargetConfig) -> Tensor:
    """The table [V, D] in the dtype of the checkpoint, from safetensors files in a folder or on the hub.

    These are the plain rows. Where a target scales what it looks up, in its embedding module (Gemma) or after it
    (Granite), the predictor does not see that, here no more than in decoding: its projection learns a scale of its own.

    Raises InputError when the checkpoint has no such files, or none of its weights has the table's name.
    """
    names = _possible_names(target)
    file_of = _files_of_weights(target)
    name = next((name for name in names if name in file_of), None)
    if name is None:
        raise InputError(f"--target.name {target.name}: the checkpoint has no weight named {' or '.join(names)}")
    with safe_open(_checkpoint_file(target, file_of[name]), framework="pt") as weights:
        return weights.get_tensor(name)


def _files_of_weights(target: TargetConfig) -> dict[str, str]:
    """Weight name → file name, from the index of a sharded checkpoint or from its one file."""
    index = _checkpoint_file(target, INDEX)
    if index is not None:
        return read_json(index)["weight_map"]
    single = _checkpoint_file(target, SINGLE)
    if single is None:
        raise InputError(f"--target.name {target.name}: no safetensors files to read its embeddings from")
    with safe_open(single, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), SINGLE)


def _possible_names(target: TargetConfig) -> list[str]:
    """Names of the input embeddings, from the model on the meta device; where it is tied, also those of the head."""
    model_config = load_target_config(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=target.trust_remote_code)
    return _names_of(model, model.get_input_embeddings().weight)


def _names_of(model: nn.Module, weight: Tensor) -> list[str]:
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]


def _checkpoint_file(target: TargetConfig, name: str) -> Path | None:
    """Local path of one file of the checkpoint, downloaded where it is a hub id; None when it has no such file."""
    path = resolve_target(target.name)
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).is_file() else None
    try:
        return Path(hf_hub_download(path, name, revision=target.revision))
    except EntryNotFoundError:
        return None
