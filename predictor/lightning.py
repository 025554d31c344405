"""The predictor as a Lightning module: loss, optimizer, and a schedule that follows whichever limit ends training.

Knows nothing about files, evaluation or the shape of the batches' origin. Letters as in `ecospec.predictor.model`.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor

from ecospec.data.module import Batch
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.loss import batch_loss, excess_loss
from ecospec.predictor.model import ExpertPredictor

log = logging.getLogger(__name__)

FINAL_FACTOR = 0.05  # of the peak learning rate, reached when training ends
LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """When training ends: at the first of those that are set."""

    minutes: float | None = None
    steps: int | None = None
    epochs: int | None = None

    def progress(self, seconds: float, steps: int, epochs: float) -> float:
        """Share of training that is done; 1 or more when a limit is reached."""
        done = [(seconds / 60, self.minutes), (steps, self.steps), (epochs, self.epochs)]
        return max(value / limit for value, limit in done if limit is not None)


def learning_rate_factor(step: int, warmup_steps: int, progress: float) -> float:
    """Linear warm-up over steps, times a cosine over `progress` from 1 to FINAL_FACTOR."""
    warmup = min(1.0, (step + 1) / (warmup_steps + 1))
    return warmup * (FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def optimizer_groups(module: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, vectors (norms, biases) do not."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


class PredictorModule(lightning.LightningModule):
    """Trains `predictor` in place on `num_samples` samples an epoch; `seconds_now` is a clock in seconds."""

    def __init__(
        self,
        predictor: ExpertPredictor,
        config: TrainConfig,
        num_samples: int,
        seconds_now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.predictor, self.options, self.num_samples, self.seconds_now = predictor, config, num_samples, seconds_now
        self.limits = Limits(config.max_minutes, config.max_steps, config.max_epochs)
        self.samples = self.tokens = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = optimizer_groups(self.predictor, self.options.weight_decay)
        return torch.optim.AdamW(groups, lr=self.options.learning_rate, betas=(0.9, 0.95))

    def on_train_start(self) -> None:
        self.started = self.logged = self.seconds_now()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        factor = learning_rate_factor(self.global_step, self.options.warmup_steps, self.progress())
        for group in self.optimizers().param_groups:
            group["lr"] = self.options.learning_rate * factor

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return batch_loss(self.predictor, batch)

    def on_train_batch_end(self, outputs: dict, batch: Batch, batch_idx: int) -> None:
        self.samples += len(batch.input_ids)
        self.tokens += batch.input_ids.numel()
        if self.progress() >= 1:
            self.trainer.should_stop = True
        if self.trainer.should_stop or self.seconds_now() - self.logged >= LOG_SECONDS:
            self._log_line(excess_loss(outputs["loss"].item(), self.predictor.config.num_experts_per_tok))

    def progress(self) -> float:
        """Share of training that is done."""
        return self.limits.progress(
            self.seconds_now() - self.started, self.global_step, self.samples / self.num_samples
        )

    def _log_line(self, excess: float) -> None:
        self.logged = self.seconds_now()
        rate = self.tokens / (self.logged - self.started)
        share = min(1.0, self.progress())
        log.info("step %d: excess loss %.3f, %.0f tokens/s, %.0f %%", self.global_step, excess, rate, 100 * share)
