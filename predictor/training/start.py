"""What all training begins with: the traces it learns from, the process it runs in, and what is said of its results."""

import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from ecospec.data.traces import Traces, TraceSet
from ecospec.errors import InputError
from ecospec.files import require_new_folder
from ecospec.predictor.config import FitConfig, TracedConfig
from ecospec.predictor.evaluation.metrics import METRICS
from ecospec.predictor.training.task import open_target_traces
from ecospec.provenance import Provenance


def open_training_traces(config: FitConfig) -> TraceSet:
    """The traces to learn from.

    Raises InputError for a missing key, no limit of training, an output in use, and traces of another target.
    """
    for key in ("traces", "output"):
        if getattr(config, key) is None:
            raise InputError(f"--{key}: missing; give a folder")
    if (config.max_minutes, config.max_steps, config.max_epochs) == (None, None, None):
        raise InputError("--max_minutes: training has no limit; give max_minutes, max_steps or max_epochs")
    require_new_folder(Path(config.output), config.overwrite, METRICS)
    return open_target_traces(config)


def require_answers(traces: Traces, config: TracedConfig) -> None:
    """Raises InputError unless samples of both splits have positions after their prompt."""
    for split in ("train", "test"):
        if not any(item.split == split and len(item.input_ids) > item.prompt_len for item in traces):
            raise InputError(
                f"--traces {config.traces}: its {split} samples have no answer positions; trace more samples"
            )


def training_provenance(config: FitConfig, traces: Traces, **more: object) -> Provenance:
    """That of anything trained on traces; `datasets` names the prompts that were seen."""
    traced = asdict(traces.manifest)
    return Provenance.of(
        config,
        datasets=sorted(source.dataset for source in traces.manifest.prompts),
        traces={"target": traced["target"], "parts": traced["parts"]},
        **more,
    )


def prepare_process(config: TracedConfig) -> None:
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
