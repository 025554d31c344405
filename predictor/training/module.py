"""The predictor as a Lightning module: loss, optimizer, and a schedule that follows whichever limit ends training.

Knows nothing about files, evaluation or the shape of the batches' origin. All processes hold the same counts, so that
they agree on the learning rate and on when to stop. Letters as in `ecospec.predictor.kinds.predictor.model`.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass

import lightning
import torch
from torch import Tensor

from ecospec.data.module import Batch, TrainBatches
from ecospec.errors import DamageError, InputError
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.kinds.routing import RoutingModel
from ecospec.predictor.objective.loss import batch_loss, excess_loss

log = logging.getLogger(__name__)

FINAL_FACTOR = 0.05  # of the peak learning rate, reached when training ends
LOG_SECONDS = 10.0
LOG_STEPS = 10  # optimizer steps between two rows of the loggers
REMEDY = "lower --learning_rate or look at the weights started from (what was saved before is kept)"


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


class EndlessBatches:
    """Epoch after epoch of `batches` in one iteration, so that for Lightning training is a single epoch.

    Its state is the place after the batch that is being trained on: Lightning fetches one batch ahead of that. Raises
    InputError when an epoch has no batch.
    """

    def __init__(self, batches: TrainBatches) -> None:
        if len(batches) == 0:
            raise InputError("--traces: none of the samples is of the train split; trace more prompts")
        self.batches, self.trained = batches, batches.state_dict()

    def __iter__(self) -> Iterator[Batch]:
        given = self.batches.state_dict()
        while True:
            for batch in self.batches:
                self.trained, given = given, self.batches.state_dict()
                yield batch

    def state_dict(self) -> dict:
        return self.trained

    def load_state_dict(self, state: dict) -> None:
        self.batches.load_state_dict(state)


class PredictorModule(lightning.LightningModule):
    """Trains `predictor` in place; `epoch` are this process's batches of an epoch, `seconds_now` a clock in seconds.

    Counts: `batches` of each process, `tokens` seen by all, `seconds` of training. Once any of them has been
    `asked_to_end`, all are `interrupted`, and raise KeyboardInterrupt when their callbacks have seen the end of the
    optimizer step.
    """

    def __init__(
        self,
        predictor: RoutingModel,
        config: TrainPredictorConfig,
        epoch: Sized,
        seconds_now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.predictor, self.options, self.epoch, self.seconds_now = predictor, config, epoch, seconds_now
        self.limits = Limits(config.max_minutes, config.max_steps, config.max_epochs)
        self.batches = self.tokens = 0
        self.seconds = 0.0
        self.asked_to_end = self.interrupted = False
        self.beside_bar: dict[str, float] = {}  # what the progress bar shows
        self.losses: deque[float] = deque(maxlen=config.accumulate)  # of the last batches, over all processes
        self.step_samples: deque[tuple[str, ...]] = deque(maxlen=config.accumulate)  # names, in this process

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = optimizer_groups(self.predictor, self.options.weight_decay)
        return torch.optim.AdamW(groups, lr=self.options.learning_rate, betas=(0.9, 0.95))

    def on_train_start(self) -> None:
        self.predictor.table_VD = self.predictor.table_VD.to(self.device)
        self.logged = self.seconds_now()
        self.started = self.logged - self.seconds
        if self.progress() >= 1:  # a run that was cut off after its last step
            self.trainer.should_stop = True

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._seed(hash((self.options.seed, self.global_rank, batch_idx)))  # a resumed run drops out the same
        for group in self.optimizers().param_groups:
            group["lr"] = self.learning_rate()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Raises DamageError in all processes when the loss of any is not finite."""
        loss = batch_loss(self.predictor, batch)
        self._count(batch, loss.item())
        return loss

    def on_train_batch_end(self, outputs: dict, batch: Batch, batch_idx: int) -> None:
        if not self.step_ended(batch_idx):
            return
        if self.interrupted:
            raise KeyboardInterrupt
        if self.progress() >= 1:
            self.trainer.should_stop = True
        if self.global_step % LOG_STEPS == 0 or self.trainer.should_stop:
            self.write_row(
                {"excess_loss": self.step_loss(), "learning_rate": self.learning_rate(), "tokens": self.tokens}
            )
        if self.trainer.should_stop or self.seconds_now() - self.logged >= LOG_SECONDS:
            self.logged = self.seconds_now()
            self.log_line(self._status())

    def on_train_end(self) -> None:
        self.require_finite_weights()

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["counts"] = {"batches": self.batches, "tokens": self.tokens, "seconds": self.seconds}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        for name, value in checkpoint["counts"].items():
            setattr(self, name, value)

    def step_ended(self, batch_idx: int) -> bool:
        """Whether an optimizer step followed this batch."""
        return (batch_idx + 1) % self.options.accumulate == 0

    def progress(self) -> float:
        """Share of training that is done."""
        return self.limits.progress(self.seconds, self.global_step, self.batches / len(self.epoch))

    def learning_rate(self) -> float:
        """The one of the next optimizer step."""
        factor = learning_rate_factor(self.global_step, self.options.warmup_steps, self.progress())
        return self.options.learning_rate * factor

    def step_loss(self) -> float:
        """Excess loss of the last optimizer step, a mean over its batches."""
        return excess_loss(statistics.fmean(self.losses), self.predictor.config.num_experts_per_tok)

    def require_finite_weights(self) -> None:
        """Raises DamageError in all processes when the last step left a weight that is not finite.

        A finite loss may have an infinite gradient. The loss after the next step would tell, so only what is kept or
        handed on needs to be looked at.
        """
        if torch.stack([weight.isfinite().all() for weight in self.predictor.parameters()]).all():
            return
        samples = ", ".join(name for names in self.step_samples for name in names)
        raise DamageError(f"step {self.global_step}: weights are not finite after samples {samples}; {REMEDY}")

    def write_row(self, numbers: dict[str, float]) -> None:
        """A row in every logger, on disk at once."""
        for logger in self.loggers:
            logger.log_metrics(numbers, step=self.global_step)
            logger.save()

    def log_line(self, what: str) -> None:
        """Log a line about the last step, from the first process only."""
        if self.trainer.is_global_zero:
            log.info("step %d: %s", self.global_step, what)

    def _seed(self, value: int) -> None:
        """`torch.manual_seed` for the devices in use: looking for all others takes longer than a small step."""
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)

    def _count(self, batch: Batch, loss: float) -> None:
        """Add this batch of all processes to the counts, and take over the first one's clock."""
        seconds = self.seconds_now() - self.started if self.trainer.is_global_zero else 0.0
        counts = [int(batch.lengths.sum()), seconds, self.asked_to_end, loss]
        if self.trainer.world_size > 1:
            mine = torch.tensor(counts, dtype=torch.float64, device=self.device)
            counts = self.trainer.strategy.reduce(mine, reduce_op="sum").tolist()
        self.batches, self.tokens, self.seconds = self.batches + 1, self.tokens + int(counts[0]), counts[1]
        self.interrupted = counts[2] > 0
        self.losses.append(counts[3] / self.trainer.world_size)
        self.step_samples.append(batch.sample_ids)
        if not math.isfinite(counts[3]):
            raise DamageError(self._diagnosis(loss, batch))

    def _diagnosis(self, loss: float, batch: Batch) -> str:
        if math.isfinite(loss):
            return f"step {self.global_step}: the loss of another process is not finite"
        samples = ", ".join(batch.sample_ids)
        return f"step {self.global_step}: the loss is {loss} on samples {samples}; {REMEDY}"

    def _status(self) -> str:
        rate, share = self.tokens / self.seconds, min(1.0, self.progress())
        return f"excess loss {self.step_loss():.3f}, {rate:.0f} tokens/s, {share:.0%}"
