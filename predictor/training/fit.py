"""From a trace folder to a predictor folder: check, fit, evaluate, export.

The shell around `task`, `lightning` and `evaluation`; what it writes is the contract's predictor folder.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import lightning
import torch
import transformers
from lightning.pytorch.utilities import rank_zero_only

from ecospec.data.module import Batch, BatchLimits, TraceDataModule
from ecospec.data.traces import TraceSet
from ecospec.errors import InputError
from ecospec.files import provenance, require_new_folder, write_json
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.evaluation.evaluate import evaluate
from ecospec.predictor.kinds.base import RoutingModel
from ecospec.predictor.training.checkpoints import (
    BEST,
    Checkpoints,
    finish,
    identity,
    load_weights,
    require_nothing_kept,
    save_predictor,
    start_afresh,
    state_to_resume,
    training_folder,
    write_folder,
)
from ecospec.predictor.training.module import EndlessBatches, PredictorModule
from ecospec.predictor.training.task import Samples, open_target_traces, open_task
from ecospec.predictor.training.trainer import make_trainer, run_trainer


def train_predictor(config: TrainConfig) -> dict | None:
    """Fit, evaluate and export as `config` says; returns the content of `metrics.json`, in the first process only.

    Raises InputError for a missing key, an output folder in use, traces that are not this target's or hold no answers
    to learn from and to measure, an interrupted run with other keys, or kept predictors in the way; DamageError for a
    loss or weights that are not finite; OSError when something cannot be written.
    """
    traces = open_traces(config)
    require_answers(traces, config)
    prepare_process(config)
    task = open_task(config, traces)
    training = fit(task.model, task.traces, config)
    if rank_zero_only.rank != 0:
        return None
    metrics = evaluate(task.model, task.traces)
    write_folder(Path(config.output), lambda folder: _write(folder, task.model, metrics, config, traces, training))
    finish(training_folder(config))
    return metrics


def require_answers(traces: TraceSet | Samples, config: TrainConfig) -> None:
    """Raises InputError unless samples of both splits have positions after their prompt."""
    for split in ("train", "test"):
        if not any(item.split == split and len(item.input_ids) > item.prompt_len for item in traces):
            raise InputError(
                f"--traces {config.traces}: its {split} samples have no answer positions; trace more samples"
            )


def fit(model: RoutingModel, traces: TraceSet | Samples, config: TrainConfig) -> dict:
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
    config: TrainConfig,
    traces: TraceSet | Samples,
) -> tuple[lightning.Trainer, dict]:
    folder = training_folder(config)
    run = identity(config, asdict(traces.manifest)["parts"], module.predictor.config)
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


def open_traces(config: TrainConfig) -> TraceSet:
    """The traces to learn from.

    Raises InputError for a missing key, no limit of training, an output in use, and traces of another target.
    """
    for key in ("traces", "output"):
        if getattr(config, key) is None:
            raise InputError(f"--{key}: missing; give a folder")
    if (config.max_minutes, config.max_steps, config.max_epochs) == (None, None, None):
        raise InputError("--max_minutes: training has no limit; give max_minutes, max_steps or max_epochs")
    require_new_folder(Path(config.output), config.overwrite, "metrics.json")
    return open_target_traces(config)


def training_provenance(config: TrainConfig, traces: TraceSet | Samples) -> dict:
    """What `provenance.json` says of anything trained on traces; `datasets` names the prompts that were seen."""
    traced = asdict(traces.manifest)
    return provenance() | {
        "config": asdict(config),
        "datasets": sorted(source.dataset for source in traces.manifest.prompts),
        "traces": {"target": traced["target"], "parts": traced["parts"]},
    }


def prepare_process(config: TrainConfig) -> None:
    """Threads, and what the libraries say: only a terminal gets progress bars, nobody the hardware survey."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        # or else DeepSpeed, where it is installed, tells stdout that it found no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", module=r"lightning\.")


def _write(
    folder: Path, model: RoutingModel, metrics: dict, config: TrainConfig, traces: TraceSet, training: dict
) -> None:
    save_predictor(folder, model)
    write_json(folder / "metrics.json", metrics)
    write_json(folder / "provenance.json", training_provenance(config, traces) | {"training": training})
