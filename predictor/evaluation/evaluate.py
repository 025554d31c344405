"""What predictors are worth on traces: overlap and seconds a step, of a trained one and of the simple ones beside it.

Letters: T tokens, A depths of a draft, L MoE layers, E experts, H hidden width, X = A · T.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ecospec.data.module import collate
from ecospec.data.traces import Trace, Traces
from ecospec.errors import InputError
from ecospec.files import read_json, replace_folder, require_new_folder
from ecospec.predictor.config import EvaluateConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.evaluation.metrics import METRICS, PredictorMetrics
from ecospec.predictor.kinds import all_kinds, trained_kinds
from ecospec.predictor.kinds.base import Baseline
from ecospec.predictor.kinds.loading import kind_of, kind_of_model, load_predictor, require_target
from ecospec.predictor.kinds.routing import RoutingModel
from ecospec.predictor.kinds.trained import TrainedKind
from ecospec.predictor.objective.loss import CHUNK_TOKENS
from ecospec.predictor.objective.metrics import PredictorNumbers, measure
from ecospec.predictor.training.task import inspect_target, open_target_traces
from ecospec.provenance import Provenance
from ecospec.tracing.target.names import own_part, part_folder

STEP_TOKENS = 11  # nodes of the default draft tree (3 steps, top-2), root included
STEP_CONTEXT = 256  # tokens before them
STEP_REPEATS = 20


def evaluate_predictor(config: EvaluateConfig) -> PredictorMetrics:
    """The numbers of an exported predictor on any traces of its target.

    Beside it stand those of the kinds that need no training, counted from the `train` samples of the same traces, and
    of the trained ones at `rungs`. Where `output` is given, `metrics.json` and `provenance.json` are written there.
    Raises InputError for missing traces, another target's traces or predictor, samples without answers, two models of
    a kind, and a model that was made for another draft head than the keys name.
    """
    if config.output is not None:
        require_new_folder(Path(config.output), config.overwrite, METRICS)
    traces, folders = open_target_traces(config), _folders(config)
    target = inspect_target(config.target)
    for folder in folders:
        require_target(str(folder), read_json(folder / "config.json"), *target)
    table_VD = load_embedding(config.target)
    models = [load_predictor(folder).attach_embedding(table_VD) for folder in folders]
    samples = _with_what_they_read(config, traces, models)
    metrics = measure_beside_baselines(models[0], samples)
    trained = {kind_of_model(model).name: measure_model(model, samples) for model in models[1:]}
    metrics = replace(metrics, others=metrics.others | trained)
    if config.output is not None:
        replace_folder(Path(config.output), lambda folder: _write(folder, metrics, config))
    return metrics


def measure_beside_baselines(model: RoutingModel, traces: Traces) -> PredictorMetrics:
    """A trained model's numbers, and beside it those of all kinds that need no training, by name."""
    baselines = {kind.name: kind.baseline(traces, model.config.vocab_size, STEP_TOKENS) for kind in all_kinds()}
    simple = {name: measure_baseline(baseline, traces) for name, baseline in sorted(baselines.items()) if baseline}
    return PredictorMetrics(kind_of_model(model).name, measure_model(model, traces), simple)


def measure_baseline(baseline: Baseline, traces: Traces) -> PredictorNumbers:
    """The numbers of a kind that is not trained."""
    numbers = measure(lambda item: [baseline.logits_of(item)], traces)
    return replace(numbers, seconds_per_step=_median_seconds(baseline.step))


@torch.inference_mode()
def measure_model(model: RoutingModel, traces: Traces) -> PredictorNumbers:
    """The numbers of a trained model; one that reads a draft head counts every depth of a draft the same."""
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def passes_of(item: Trace) -> Iterator[Iterator[Tensor]]:
        batch = collate([item]).on(model.device)
        hidden_XH, _ = model.read(batch, batch.tokens())
        for hidden_TH in hidden_XH.split(len(item.input_ids)):
            yield map(model.logits, hidden_TH.split(CHUNK_TOKENS))

    step = kind_of_model(model).step(model, STEP_CONTEXT, STEP_TOKENS)
    return replace(measure(passes_of, traces), seconds_per_step=_median_seconds(step))


def _folders(config: EvaluateConfig) -> list[Path]:
    """The predictor's folder and those beside it.

    Raises InputError when two of them hold the same kind, and for a key that was given and that none reads.
    """
    folders = [part_folder(own_part(config.predictor.path, config.target.name), "predictor")]
    folders += [part_folder(path, "predictor", option="--rungs") for path in config.rungs]
    kinds = [kind_of(folder) for folder in folders]
    for kind, folder in zip(kinds, folders, strict=True):
        if kinds.count(kind) > 1:
            raise InputError(f"--rungs {folder}: a {kind.name}, of which there is another one; measure them apart")
    _require_read(config, kinds)
    return folders


def _require_read(config: EvaluateConfig, measured: list[TrainedKind]) -> None:
    """Raises InputError for a key that was given, and that only kinds read which are not measured."""
    read = {key.name for kind in measured for key in fields(kind.evaluation_keys)}
    of_kinds = {key.name for kind in trained_kinds() for key in fields(kind.evaluation_keys)}
    for key in sorted(config.given):
        if key.partition(".")[0] in of_kinds - read:
            raise InputError(f"--{key}: no model that is measured reads it; leave it out")


def _with_what_they_read(config: EvaluateConfig, traces: Traces, models: Sequence[RoutingModel]) -> Traces:
    """The samples, with whatever one of the models reads beside their tokens."""
    for model in models:
        traces = kind_of_model(model).samples_for(config, traces, model)
    return traces


def _write(folder: Path, metrics: PredictorMetrics, config: EvaluateConfig) -> None:
    metrics.write(folder)
    Provenance.of(config).write(folder)


def _median_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEP_REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
