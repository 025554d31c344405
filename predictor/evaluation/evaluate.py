"""What predictors are worth on traces: overlap and seconds a step, of a trained one and of the simple ones beside it.

Letters: N tokens of one decoding step, T tokens, A depths of a draft, L MoE layers, E experts, H hidden width, F width
of a draft head.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ecospec.data.module import collate
from ecospec.data.traces import Trace, TraceSet
from ecospec.errors import InputError
from ecospec.files import provenance, read_json, replace_folder, require_new_folder, write_json
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.kinds.base import RoutingModel
from ecospec.predictor.kinds.loading import kind_of, kind_of_model, load_predictor, require_target
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.kinds.rungs import DraftMLP, LinearPredictor
from ecospec.predictor.kinds.tables import FrequencyPredictor, LastStepPredictor, TokenPredictor, fit_tables
from ecospec.predictor.objective.loss import CHUNK_TOKENS
from ecospec.predictor.objective.metrics import measure
from ecospec.predictor.training.task import Samples, attached_head, fed_by, known_of, open_target_traces
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.names import part_folder

METRICS = "metrics.json"
STEP_TOKENS = 11  # nodes of the default draft tree (3 steps, top-2), root included
STEP_CONTEXT = 256  # tokens before them
STEP_REPEATS = 20


def evaluate_predictor(config: TrainConfig) -> dict:
    """The numbers of an exported predictor on any traces of its target, in the form of `metrics.json`.

    Beside it in `ladder` are those that are counted from the `train` samples of the same traces, and the trained ones
    at `rungs`; `overlap` is of the `test` samples. Where `output` is given, `metrics.json` and `provenance.json` are
    written there. Raises InputError for missing traces, another target's traces or predictor, samples without answers,
    two rungs of a kind, and a draft MLP of another draft head than `drafter.path`.
    """
    if config.output is not None:
        require_new_folder(Path(config.output), config.overwrite, METRICS)
    traces, folders = open_target_traces(config), _folders(config)
    known = known_of(config.target)
    for folder in folders:
        require_target(str(folder), read_json(folder / "config.json"), *known)
    table_VD = load_embedding(config.target)
    models = [load_predictor(folder).attach_embedding(table_VD) for folder in folders]
    samples = _with_what_they_read(config, traces, models)
    metrics = evaluate(models[0], samples)
    metrics["ladder"] |= {kind_of_model(model): numbers_of(model, samples) for model in models[1:]}
    if config.output is not None:
        replace_folder(Path(config.output), lambda folder: _write(folder, metrics, config))
    return metrics


def evaluate(model: RoutingModel, traces: TraceSet | Samples) -> dict:
    """The content of `metrics.json`: the model's numbers, its kind, and under `ladder` those of what it must beat."""
    tables = fit_tables(traces, model.config.vocab_size)
    simple = {
        "frequency": _table_numbers(tables["frequency"], traces),
        "last_step": _last_step_numbers(LastStepPredictor(tables["frequency"]), traces),
        "token": _table_numbers(tables["token"], traces),
    }
    return {"kind": kind_of_model(model)} | numbers_of(model, traces) | {"ladder": simple}


@torch.inference_mode()
def numbers_of(model: RoutingModel, traces: TraceSet | Samples) -> dict:
    """Overlap and its like of a trained model. `seconds_per_step`: the median time to predict one step's draft tree.

    A draft MLP is measured at every depth of a draft, each counting the same.
    """
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def passes_of(item: Trace) -> Iterator[Iterator[Tensor]]:
        batch = collate([item]).on(model.device)
        hidden_XH, _ = model.read(batch, batch.tokens())
        for hidden_TH in hidden_XH.split(len(item.input_ids)):
            yield map(model.logits, hidden_TH.split(CHUNK_TOKENS))

    step = {ExpertPredictor: _predictor_step, LinearPredictor: _linear_step, DraftMLP: _draft_mlp_step}[type(model)]
    return measure(passes_of, traces) | {"seconds_per_step": _median_seconds(step(model))}


def _folders(config: TrainConfig) -> list[Path]:
    """The predictor's folder and the rungs'. Raises InputError when two of them hold the same kind."""
    folders = [part_folder(config.predictor.path, "predictor")]
    folders += [part_folder(path, "predictor", option="--rungs") for path in config.rungs]
    kinds = [kind_of(folder) for folder in folders]
    for kind, folder in zip(kinds, folders, strict=True):
        if kinds.count(kind) > 1:
            raise InputError(f"--rungs {folder}: a {kind}, of which there is another one; measure them apart")
    return folders


def _with_what_they_read(config: TrainConfig, traces: TraceSet, models: Sequence[RoutingModel]) -> TraceSet | Samples:
    """The samples, with what a draft head is fed where one of the models reads it."""
    fed = [model for model in models if isinstance(model, DraftMLP)]
    if not fed:
        return traces
    target = load_target(config.target)
    head = attached_head(config, target)
    for model in fed:
        model.require_head(head, config.drafter.steps)
    return fed_by(config, traces, target, head)


def _write(folder: Path, metrics: dict, config: TrainConfig) -> None:
    write_json(folder / METRICS, metrics)
    write_json(folder / "provenance.json", provenance() | {"config": asdict(config)})


def _table_numbers(table: FrequencyPredictor | TokenPredictor, traces: TraceSet | Samples) -> dict:
    ids_N = np.zeros(STEP_TOKENS, np.int32)
    numbers = measure(lambda item: [map(table.logits, _stretches(item.input_ids))], traces)
    return numbers | {"seconds_per_step": _median_seconds(lambda: table.predict(ids_N))}


def _last_step_numbers(last_step: LastStepPredictor, traces: TraceSet | Samples) -> dict:
    """Of the token right after the last one known, a step's root; drafts lie further from it."""
    experts_LK = next(iter(traces)).experts[0]
    numbers = measure(lambda item: [map(last_step.logits, _stretches(last_step.known(item.experts)))], traces)
    return numbers | {"seconds_per_step": _median_seconds(lambda: np.repeat(experts_LK[None], STEP_TOKENS, axis=0))}


def _stretches(values_T: np.ndarray) -> list[np.ndarray]:
    return [values_T[first : first + CHUNK_TOKENS] for first in range(0, len(values_T), CHUNK_TOKENS)]


def _step_ids(model: RoutingModel, tokens: int) -> Tensor:
    return torch.arange(tokens, device=model.device)[None] % model.config.vocab_size


def _predictor_step(predictor: ExpertPredictor) -> Callable[[], object]:
    """STEP_TOKENS new tokens after a cached context."""
    ids = _step_ids(predictor, STEP_CONTEXT + STEP_TOKENS)
    cache = DynamicCache(config=predictor.config.backbone)
    predictor(ids[:, :STEP_CONTEXT], cache=cache)

    def step() -> None:
        predictor(ids[:, STEP_CONTEXT:], cache=cache).cpu()
        cache.crop(-STEP_TOKENS)

    return step


def _linear_step(model: LinearPredictor) -> Callable[[], object]:
    ids_1N = _step_ids(model, STEP_TOKENS)
    return lambda: model(ids_1N).cpu()


def _draft_mlp_step(model: DraftMLP) -> Callable[[], object]:
    ids_1N = _step_ids(model, STEP_TOKENS)
    fed_1NF = torch.zeros(1, STEP_TOKENS, model.config.draft_size, device=model.device)
    return lambda: model(ids_1N, fed_1NF).cpu()


def _median_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEP_REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
