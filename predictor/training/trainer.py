"""The Lightning trainer: strategy, devices, loggers, progress, and signals.

Knows nothing about predictors or files beyond the folder that it is given for logs.
"""

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from ecospec.errors import InputError
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.training.module import EndlessBatches, PredictorModule

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def make_trainer(config: TrainPredictorConfig, logs: Path | None = None, callbacks: tuple = ()) -> lightning.Trainer:
    """A trainer that runs until its module says stop, and by itself writes nothing but logs.

    Raises InputError for a strategy or a logger that this machine has not got.
    """
    require_strategy(config)
    bar = [TrainingBar()] if sys.stderr.isatty() else []
    return lightning.Trainer(
        accelerator="auto",
        devices=config.devices,
        num_nodes=config.num_nodes,
        strategy=config.strategy,
        precision=config.precision,
        max_epochs=-1,
        accumulate_grad_batches=config.accumulate,
        gradient_clip_val=config.gradient_clip,
        logger=make_loggers(config, logs) if logs else False,
        callbacks=[*callbacks, *bar, GracefulInterrupt()],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=bool(bar),
    )


def require_strategy(config: TrainPredictorConfig) -> None:
    """Raises InputError for DeepSpeed where it is not installed, or where Lightning refuses it."""
    if not config.strategy.startswith("deepspeed"):
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(f"--strategy {config.strategy}: DeepSpeed is not installed; pip install ecospec[deepspeed]")
    if not torch.cuda.is_available():
        raise InputError(f"--strategy {config.strategy}: needs CUDA GPUs; on a CPU give --strategy ddp")


def make_loggers(config: TrainPredictorConfig, folder: Path) -> list[Logger]:
    """The loggers asked for; a resumed run begins a new version of each. Raises InputError where W&B is missing."""
    if "wandb" in config.loggers and importlib.util.find_spec("wandb") is None:
        raise InputError("--loggers wandb: it is not installed; pip install wandb, or leave it out")
    makers: dict[str, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder, name="csv"),
        "tensorboard": lambda: TensorBoardLogger(folder, name="tensorboard"),
        "wandb": lambda: WandbLogger(save_dir=folder, project="ecospec"),
    }
    return [makers[name]() for name in config.loggers]


class TrainingBar(TQDMProgressBar):
    """A bar over the share of training that is done, whichever limit ends it, with the last overlap beside it."""

    BAR_FORMAT = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"

    def on_train_epoch_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self.train_progress_bar.reset(total=1.0)
        self.train_progress_bar.set_description("training")

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: PredictorModule, outputs: dict, batch: object, batch_idx: int
    ) -> None:
        if self._should_update(batch_idx + 1, None):
            self.train_progress_bar.n = min(1.0, module.progress())
            self.train_progress_bar.set_postfix({"excess_loss": module.step_loss(), **module.beside_bar})


class GracefulInterrupt(lightning.Callback):
    """Once training has begun the first interrupt only asks it to end with its step; the second ends everything."""

    def on_train_start(self, trainer: lightning.Trainer, module: PredictorModule) -> None:
        def interrupt(number: int, frame: FrameType | None) -> None:
            if module.asked_to_end:
                raise KeyboardInterrupt
            module.asked_to_end = True

        for number in INTERRUPTS:  # in place of Lightning's, whose SIGTERM does not wait for the end of a step
            signal.signal(number, interrupt)


def run_trainer(
    trainer: lightning.Trainer, module: PredictorModule, batches: EndlessBatches, state: Path | None = None
) -> None:
    """`trainer.fit` from `state` on. An interrupt is KeyboardInterrupt, and leaves the signals' handlers as they were.

    Lightning would make it `SystemExit(1)` and ignore all that follow.
    """
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        trainer.fit(module, train_dataloaders=batches, ckpt_path=state, weights_only=True)
    except SystemExit as exit_:
        if not isinstance(exit_.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
