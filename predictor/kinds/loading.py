"""Folders of trained models of routing: which kind one holds, and the model itself."""

import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from ecospec.errors import InputError, brief, first_few
from ecospec.files import read_json
from ecospec.predictor.kinds import trained_kinds
from ecospec.predictor.kinds.routing import RoutingModel
from ecospec.predictor.kinds.trained import TrainedKind
from ecospec.tracing.target.checkpoint import Checkpoint
from ecospec.tracing.target.loading import MoeShape, Target, check_moe


def kind_and_values(folder: Path) -> tuple[TrainedKind, dict]:
    """Which kind a folder holds, and its `config.json`. Raises InputError for anything else."""
    values = read_json(folder / "config.json")
    model_type = values.get("model_type") if isinstance(values, dict) else None
    for kind in trained_kinds():
        if kind.model_type == model_type:
            return kind, values
    raise InputError(f"{folder}: is no expert predictor; give the folder that ecospec-train predictor wrote")


def kind_of(folder: Path) -> TrainedKind:
    """Which kind a folder holds. Raises InputError for anything else."""
    return kind_and_values(folder)[0]


def kind_of_model(model: RoutingModel) -> TrainedKind:
    """Which kind a model is."""
    return next(kind for kind in trained_kinds() if kind.model_type == model.config.model_type)


def predictor_values(folder: Path, name: str) -> dict:
    """The `config.json` of a folder of the kind `name`. Raises InputError when it holds another kind."""
    found, values = kind_and_values(folder)
    if found.name != name:
        raise InputError(
            f"--predictor.path {folder}: holds a {found.name} where footprints {name} need a {name}; give a folder of "
            f"that kind, or --footprints {found.name}"
        )
    return values


def count_weights(folder: Path) -> int:
    """The number of weights in a folder, from the header of their file."""
    return sum(map(math.prod, Checkpoint(folder).shapes().values()))


def load_predictor(folder: Path) -> RoutingModel:
    """The model of a predictor folder, in float32 and without an embedding table.

    Raises InputError when the folder holds something else, or weights that are unreadable or not its configuration's.
    """
    model_class = kind_of(folder).model_class
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report on the keys becomes one error below
    try:
        model, info = model_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError) as error:
        where = folder / "model.safetensors"
        raise InputError(f"{where}: no readable weights ({brief(error)}); export it again") from None
    finally:
        logging.set_verbosity(verbosity)
    _require_all_keys(folder, info)
    return model


def load_for_target(folder: Path, name: str, target: Target) -> RoutingModel:
    """The model of a folder of the kind `name`, ready for `target`: on its embeddings and device, in evaluation mode.

    Raises InputError as `predictor_values` and `load_predictor` do, and when it belongs to another target.
    """
    predictor_values(folder, name)
    model = load_predictor(folder)
    shape = (model.config.num_layers, model.config.num_experts, model.config.num_experts_per_tok)
    check_moe(f"--predictor.path {folder}", shape, target.shape.counts)
    model.attach_embedding(target.model.get_input_embeddings())
    return model.to(target.model.device).eval()


def require_target(path: str | None, values: dict, shape: MoeShape, config_sha256: str) -> None:
    """Raises InputError unless a model with this `config.json` belongs to the target of this shape and hash."""
    found = tuple(values.get(key) for key in ("num_layers", "num_experts", "num_experts_per_tok"))
    check_moe(f"--predictor.path {path}", found, shape.counts)
    identity = {
        "target_config_sha256": config_sha256,
        "moe_layers": list(shape.layers),
        "vocab_size": shape.vocab_size,
        "embedding_size": shape.hidden_size,
    }
    different = [key for key, value in identity.items() if values.get(key) != value]
    if different:
        raise InputError(f"--predictor.path {path}: trained for another target ({first_few(different)} differ)")


def _require_all_keys(folder: Path, info: dict) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = first_few(sorted(map(str, info[kind])))
            raise InputError(f"{folder / 'model.safetensors'}: {kind.replace('_', ' ')} {names}; export it again")
