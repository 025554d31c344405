"""From a trace folder to a predictor folder: check, fit, evaluate, export.

The shell around `model`, `lightning` and `evaluation`; what it writes is the contract's predictor folder. It
never loads the target, only its configuration and its embedding table.

Letters: L MoE layers, E experts, V vocabulary, D embedding width.
"""

import logging
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import lightning
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from ecospec.configs.errors import InputError
from ecospec.configs.files import provenance, replace_folder, require_new_folder, write_json
from ecospec.data.module import BatchLimits, TraceDataModule
from ecospec.data.traces import TraceSet, read_traces
from ecospec.predictor.base import embedding_hash
from ecospec.predictor.config import BackboneConfig, TrainConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.evaluation import evaluate, require_same_target
from ecospec.predictor.lightning import PredictorModule
from ecospec.predictor.model import ExpertPredictor, ExpertPredictorConfig, without_vocabulary
from ecospec.tracing.target import MoeShape, config_hash, load_target_config, shape_of

# Of projected embeddings before training. Smaller, and the first attention layer drowns what the token is (measured).
PROJECTED_RMS = 0.1


def train_predictor(config: TrainConfig) -> dict:
    """Fit, evaluate and export as `config` says; returns the content of `metrics.json`.

    Raises InputError for a missing key, an output folder in use, or traces that are not this target's or hold no
    answers to learn from and to measure; OSError when the export cannot be written.
    """
    traces = open_traces(config)
    require_answers(traces, config)
    model_config = load_target_config(config.target)
    shape = shape_of(model_config, config.target.trust_remote_code)
    require_same_target(traces, config, shape, config_hash(model_config))
    prepare_process(config)
    predictor = build_predictor(config, shape, config_hash(model_config), load_embedding(config.target))
    training = fit(predictor, traces, config)
    metrics = evaluate(predictor, traces)
    export(config, lambda folder: _write(folder, predictor, metrics, config, traces, training))
    return metrics


def require_answers(traces: TraceSet, config: TrainConfig) -> None:
    """Raises InputError unless samples of both splits have positions after their prompt."""
    for split in ("train", "test"):
        if not any(item.split == split and len(item.input_ids) > item.prompt_len for item in traces):
            raise InputError(
                f"--traces {config.traces}: its {split} samples have no answer positions; trace more samples"
            )


def build_predictor(config: TrainConfig, shape: MoeShape, config_sha256: str, table_VD: Tensor) -> ExpertPredictor:
    """A predictor for the target with this shape and embedding table, its backbone fresh or from `backbone.path`."""
    torch.manual_seed(config.seed)
    backbone_config = _backbone_config(config.backbone)
    predictor_config = ExpertPredictorConfig(
        backbone=backbone_config,
        num_layers=len(shape.layers),
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        moe_layers=list(shape.layers),
        target=config.target.name,
        target_config_sha256=config_sha256,
        vocab_size=table_VD.shape[0],
        embedding_size=table_VD.shape[1],
        embedding_sha256=embedding_hash(table_VD),
    )
    predictor = ExpertPredictor(predictor_config)
    rms = table_VD.float().square().mean().sqrt()
    nn.init.normal_(predictor.projection.weight, std=float(PROJECTED_RMS / (rms * table_VD.shape[1] ** 0.5)))
    if config.backbone.path is not None:
        pretrained = AutoModel.from_pretrained(config.backbone.path, dtype=torch.float32)
        predictor.backbone = without_vocabulary(pretrained)
    return predictor.attach_embedding(table_VD)


def fit(predictor: ExpertPredictor, traces: TraceSet, config: TrainConfig) -> dict:
    """Train in place on the `train` samples until the first limit; returns steps, seconds, samples and tokens seen."""
    items = [item for item in traces if item.split == "train"]
    module = PredictorModule(predictor.train(), config, len(items))
    trainer = make_trainer(config)
    limits = BatchLimits(tokens=config.tokens_per_batch)
    run_trainer(trainer, module, TraceDataModule(items, [], limits, config.seed))
    seconds = time.monotonic() - module.started
    return {"steps": trainer.global_step, "seconds": seconds, "samples": len(items), "tokens_seen": module.tokens}


def make_trainer(config: TrainConfig) -> lightning.Trainer:
    """A trainer that writes nothing and runs until its module says stop."""
    return lightning.Trainer(
        accelerator="auto",
        devices=1,
        precision=config.precision,
        max_epochs=-1,
        use_distributed_sampler=False,
        gradient_clip_val=config.gradient_clip,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )


def run_trainer(trainer: lightning.Trainer, module: PredictorModule, data: TraceDataModule) -> None:
    """`trainer.fit`, which turns Ctrl-C into `SystemExit(1)` and ignores it from then on: here it stays Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, datamodule=data)
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


def open_traces(config: TrainConfig) -> TraceSet:
    """The traces to learn from. Raises InputError for a missing key, no limit of training, or an output in use."""
    for key in ("traces", "output"):
        if getattr(config, key) is None:
            raise InputError(f"--{key}: missing; give a folder")
    if (config.max_minutes, config.max_steps, config.max_epochs) == (None, None, None):
        raise InputError("--max_minutes: training has no limit; give max_minutes, max_steps or max_epochs")
    require_new_folder(Path(config.output), config.overwrite, "metrics.json")
    return read_traces(config.traces)


def export(config: TrainConfig, write: Callable[[Path], object]) -> None:
    """Let `write` fill what becomes the output folder. Raises OSError, also where safetensors could not write."""
    try:
        replace_folder(Path(config.output), write)
    except SafetensorError as error:
        raise OSError(f"--output {config.output}: {error}") from None


def training_provenance(config: TrainConfig, traces: TraceSet) -> dict:
    """What `provenance.json` says of anything trained on traces; `datasets` names the prompts that were seen."""
    return provenance() | {
        "config": asdict(config),
        "datasets": sorted(source["dataset"] for source in traces.manifest["prompts"]),
        "traces": {"target": traces.manifest["target"], "parts": traces.manifest["parts"]},
    }


def prepare_process(config: TrainConfig) -> None:
    """Threads, and what the libraries say: only a terminal gets progress bars, nobody the hardware survey."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", module=r"lightning\.")


def _backbone_config(config: BackboneConfig) -> PreTrainedConfig:
    """Configuration of a decoder without vocabulary. Raises InputError when `backbone.path` has none."""
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
        backbone = AutoConfig.from_pretrained(config.path)
    except (OSError, ValueError) as error:
        raise InputError(f"--backbone.path {config.path}: cannot read a model configuration ({error})") from None
    backbone.vocab_size, backbone.pad_token_id = 1, None
    return backbone


def _write(
    folder: Path, predictor: ExpertPredictor, metrics: dict, config: TrainConfig, traces: TraceSet, training: dict
) -> None:
    predictor.save_pretrained(folder)
    write_json(folder / "metrics.json", metrics)
    write_json(folder / "provenance.json", training_provenance(config, traces) | {"training": training})
