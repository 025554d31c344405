"""Folders of trained models of routing: which kind one holds, and the model itself."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from ecospec.errors import InputError, brief, first_few
from ecospec.files import read_json
from ecospec.predictor.kinds.base import RoutingModel
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.kinds.rungs import DraftMLP, LinearPredictor
from ecospec.tracing.target.loading import MoeShape, check_moe

KINDS: dict[str, type[RoutingModel]] = {
    "predictor": ExpertPredictor,
    "linear": LinearPredictor,
    "draft_mlp": DraftMLP,
}


def kind_and_values(folder: Path) -> tuple[str, dict]:
    """Which of `KINDS` a folder holds, and its `config.json`. Raises InputError for anything else."""
    values = read_json(folder / "config.json")
    model_type = values.get("model_type") if isinstance(values, dict) else None
    for kind, model_class in KINDS.items():
        if model_class.config_class.model_type == model_type:
            return kind, values
    raise InputError(f"{folder}: is no expert predictor; give the folder that ecospec-train predictor wrote")


def kind_of(folder: Path) -> str:
    """Which of `KINDS` a folder holds. Raises InputError for anything else."""
    return kind_and_values(folder)[0]


def kind_of_model(model: RoutingModel) -> str:
    """Which of `KINDS` a model is."""
    return next(kind for kind, model_class in KINDS.items() if isinstance(model, model_class))


def predictor_values(folder: Path, kind: str) -> dict:
    """The `config.json` of a predictor folder. Raises InputError when it holds another kind."""
    found, values = kind_and_values(folder)
    if found != kind:
        raise InputError(
            f"--predictor.path {folder}: holds a {found} where footprints {kind} need a {kind}; give a folder of that "
            f"kind, or --footprints {found}"
        )
    return values


def load_predictor(folder: Path) -> RoutingModel:
    """The model of a predictor folder, in float32 and without an embedding table.

    Raises InputError when the folder holds something else, or weights that are unreadable or not its configuration's.
    """
    kind = kind_of(folder)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the report on the keys becomes one error below
    try:
        model, info = KINDS[kind].from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (SafetensorError, OSError) as error:
        where = folder / "model.safetensors"
        raise InputError(f"{where}: no readable weights ({brief(error)}); export it again") from None
    finally:
        logging.set_verbosity(verbosity)
    _require_all_keys(folder, info)
    return model


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
