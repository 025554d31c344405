"""From a trace folder to a predictor folder: check, fit, evaluate, export.

The shell around `task`, `module` and `evaluation`; what it writes is the contract's predictor folder.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import lightning
from lightning.pytorch.utilities import rank_zero_only

from ecospec.data.module import Batch, BatchLimits, TraceDataModule
from ecospec.data.traces import Traces
from ecospec.predictor.config import ModelFitConfig, TrainPredictorConfig
from ecospec.predictor.evaluation.evaluate import measure_beside_baselines
from ecospec.predictor.evaluation.metrics import PredictorMetrics
from ecospec.predictor.kinds.routing import RoutingModel
from ecospec.predictor.training.checkpoints import (
    BEST,
    Checkpoints,
    finish,
    load_weights,
    require_nothing_kept,
    run_identity,
    save_predictor,
    start_afresh,
    state_to_resume,
    training_folder,
    write_folder,
)
from ecospec.predictor.training.module import EndlessBatches, PredictorModule
from ecospec.predictor.training.start import (
    open_training_traces,
    prepare_process,
    require_answers,
    training_provenance,
)
from ecospec.predictor.training.task import open_task
from ecospec.predictor.training.trainer import make_trainer, run_trainer
from ecospec.provenance import Provenance


def train_predictor(config: TrainPredictorConfig) -> PredictorMetrics | None:
    """Fit, evaluate and export as `config` says; returns what the model is worth, in the first process only.

    Raises InputError for a missing key, an output folder in use, traces that are not this target's or hold no answers
    to learn from and to measure, an interrupted run with other keys, or kept predictors in the way; DamageError for a
    loss or weights that are not finite; OSError when something cannot be written.
    """
    traces = open_training_traces(config)
    require_answers(traces, config)
    prepare_process(config)
    task = open_task(config, traces)
    training = fit(task.model, task.traces, config)
    if rank_zero_only.rank != 0:
        return None
    metrics = measure_beside_baselines(task.model, task.traces)
    made = training_provenance(config, traces, training=training)
    write_folder(Path(config.output), lambda folder: _write(folder, task.model, metrics, made))
    finish(training_folder(config))
    return metrics


def fit(model: RoutingModel, traces: Traces, config: ModelFitConfig) -> dict:
    """Train in place on the `train` samples until the first limit; returns steps, seconds, samples and tokens seen.

    Where `output` is given, a state that the same command left behind is resumed, what `checkpoints` says is kept, and
    the first process ends with the best weights by held-out overlap. Raises DamageError for a loss or weights that are
    not finite, InputError without `train` samples, when that state is of another run, and when predictors that an
    earlier run kept are in the way.
    """
    train, held_out = ([item for item in traces if item.split == split] for split in ("train", "test"))
    data = TraceDataModule(train, held_out, BatchLimits(config.samples_per_batch, config.tokens_per_batch), config.seed)
    epoch = data.train_dataloader()
    module, batches = PredictorModule(model.train(), config, epoch), EndlessBatches(epoch)
    if config.output is None:
        trainer, kept = make_trainer(config), {}
        run_trainer(trainer, module, batches)
        model.float()
    else:
        trainer, kept = _fit_with_checkpoints(module, batches, data.val_dataloader, config, traces)
    counts = {"seconds": module.seconds, "samples": len(train), "tokens_seen": module.tokens}
    return {"steps": trainer.global_step, **counts, **kept}


def _fit_with_checkpoints(
    module: PredictorModule,
    batches: EndlessBatches,
    held_out: Callable[[], Iterable[Batch]],
    config: ModelFitConfig,
    traces: Traces,
) -> tuple[lightning.Trainer, dict]:
    folder = training_folder(config)
    run = run_identity(config, traces.manifest.parts, module.predictor.config)
    state = state_to_resume(folder, run)
    if state is None:
        require_nothing_kept(folder, config)
    checkpoints = Checkpoints(folder, config, run, held_out, training_provenance(config, traces))
    trainer = make_trainer(config, folder, (checkpoints,))
    if state is None and trainer.is_global_zero:
        start_afresh(folder)
    run_trainer(trainer, module, batches, state)
    module.predictor.float()  # DeepSpeed's mixed precision leaves it in bfloat16
    if not config.validate_every:
        return trainer, {}
    if trainer.is_global_zero:
        load_weights(module.predictor, folder / BEST)
    return trainer, {"best_step": checkpoints.best_step, "best_overlap": checkpoints.best}


def _write(folder: Path, model: RoutingModel, metrics: PredictorMetrics, made: Provenance) -> None:
    save_predictor(folder, model)
    metrics.write(folder)
    made.write(folder)
