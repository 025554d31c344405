"""From a trace folder to a drafter folder: run the target over its own text, fit an EAGLE-3 head, evaluate, export.

All positions of the `train` samples teach, prompts too (the target's distribution is the teacher everywhere); only
answers of the `test` samples are measured. The head is trained on the CPU, in memory.

Letters: D draft vocabulary, V target vocabulary, H hidden width.
"""

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig

from ecospec.data.traces import Trace, TraceSet
from ecospec.errors import InputError
from ecospec.files import write_json
from ecospec.inference.drafters.eagle3.head import Eagle3Head, default_feature_layers
from ecospec.inference.drafters.eagle3.rollout import DraftBatch, rollout_losses, score, weighted_loss
from ecospec.predictor.config import HeadConfig, TrainDrafterConfig
from ecospec.predictor.evaluation.metrics import METRICS
from ecospec.predictor.heads.text import TargetText, read_text
from ecospec.predictor.training.checkpoints import write_folder
from ecospec.predictor.training.module import LOG_SECONDS, Limits, learning_rate_factor, optimizer_groups
from ecospec.predictor.training.start import open_training_traces, prepare_process, training_provenance
from ecospec.provenance import Provenance
from ecospec.tracing.target.loading import load_target

log = logging.getLogger(__name__)


def train_drafter(config: TrainDrafterConfig) -> dict:
    """Fit, evaluate and export as `config` says; returns the content of `metrics.json`.

    Raises InputError for a missing key, an output folder in use, traces that are not this target's or too short, or a
    draft vocabulary larger than the target's.
    """
    traces = open_training_traces(config)
    train, test = (long_enough(traces, split, config.head.steps) for split in ("train", "test"))
    prepare_process(config)
    target = load_target(config.target)
    model = target.model.requires_grad_(False)
    layers = default_feature_layers(model.config.get_text_config().num_hidden_layers)
    head = new_head(model, config.head, train, config.seed)
    text, held_out = (read_text(model, layers, items, config.tokens_per_batch) for items in (train, test))
    model.cpu()  # where the head learns
    training = fit(head, text, output_rows(model, head), config)
    metrics = measure_head(head, held_out, config) | training
    identity = {"name": target.name, "config_sha256": target.config_sha256}
    made = training_provenance(config, traces, target=identity)
    write_folder(Path(config.output), lambda folder: _write(folder, head, metrics, made))
    return metrics


def long_enough(traces: TraceSet, split: str, steps: int) -> list[Trace]:
    """The samples of one split in which a whole decode round fits, in a `test` sample within the answer.

    Raises InputError when there is none.
    """
    items = [
        item
        for item in traces
        if item.split == split and len(item.input_ids) - (item.prompt_len if split == "test" else 1) > steps
    ]
    if not items:
        raise InputError(
            f"--traces {traces.folder}: it has no {split} sample of more than {steps} tokens; trace more samples"
        )
    return items


def draft_vocabulary(items: Sequence[Trace], vocab_size: int, size: int) -> Tensor:
    """The `size` most frequent ids of the items' text, ascending, int64 [D]; of equally frequent ones the lower.

    Raises InputError when the target has fewer.
    """
    if size > vocab_size:
        raise InputError(f"--head.draft_vocab_size {size}: the target has only {vocab_size} tokens")
    counts_V = np.bincount(np.concatenate([item.input_ids for item in items]), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts_V, stable=True)[:size]))


def new_head(model: nn.Module, config: HeadConfig, items: Sequence[Trace], seed: int) -> Eagle3Head:
    """A head for `model` with the draft vocabulary of the items' text; its output starts as the target's rows."""
    torch.manual_seed(seed)
    target = model.config.get_text_config()
    used_D = draft_vocabulary(items, target.vocab_size, config.draft_vocab_size)
    sizes = {name: value for name, value in asdict(config).items() if name != "steps"}
    head = Eagle3Head(
        LlamaConfig(
            **sizes,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_hidden_layers=1,
            max_position_embeddings=target.max_position_embeddings,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            tie_word_embeddings=False,
        ),
        feature_layers=default_feature_layers(target.num_hidden_layers),
    )
    head.attach_embedding(model.get_input_embeddings())
    head.d2t.copy_(used_D - torch.arange(len(used_D)))
    head.t2d.fill_(False)[used_D] = True
    head.lm_head.weight.data.copy_(output_rows(model, head))
    return head


def output_rows(model: nn.Module, head: Eagle3Head) -> Tensor:
    """The rows of the target's output matrix that the draft vocabulary stands for, float32 [D, H]."""
    return model.get_output_embeddings().weight.detach()[head.t2d].float()


def fit(head: Eagle3Head, text: TargetText, target_weight_DH: Tensor, config: TrainDrafterConfig) -> dict:
    """Train `head` in place until the first limit; returns steps, seconds, tokens seen and the last losses by step."""
    groups = optimizer_groups(head.train(), config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    limits = Limits(config.max_minutes, config.max_steps, config.max_epochs)
    texts, tokens, done, shown = 0, 0, 0.0, _TrainingLog()
    for step, batch in enumerate(_endless_batches(text, config), 1):
        factor = learning_rate_factor(step - 1, config.warmup_steps, done)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        losses = _step(head, optimizer, batch, target_weight_DH, config)
        texts, tokens = texts + len(batch.ids_BT), tokens + int(batch.lengths_B.sum())
        done = limits.progress(shown.seconds(), step, texts / len(text.lengths_R))
        shown.show(step, losses, tokens, done)
        if done >= 1:
            break
    seconds = round(shown.seconds(), 1)
    return {"steps": step, "seconds": seconds, "tokens_seen": tokens, "train_loss": [loss.item() for loss in losses]}


def measure_head(head: Eagle3Head, text: TargetText, config: TrainDrafterConfig) -> dict:
    """`agreement` of each draft step with the target's most probable token, the text's own tokens given before it, over
    `rounds` at step 1; `acceptance_length`: tokens emitted per round when the text itself accepts a greedy chain draft;
    `vocabulary_coverage`: share of the target's most probable tokens that can be drafted at all."""
    head.eval()
    first, *rest = (score(head, batch, config.head.steps) for batch in text.batches(config.tokens_per_batch, seed=0))
    sums = sum(rest, first)
    return {
        "agreement": (sums.agreed / sums.rounds).tolist(),
        "acceptance_length": 1 + (sums.accepted / sums.full_rounds).sum().item(),
        "rounds": int(sums.rounds[0]),
        "vocabulary_coverage": head.t2d[text.best_N].float().mean().item(),
    }


class _TrainingLog:
    """Shows how training goes: a bar on a terminal, a log line every few seconds elsewhere."""

    def __init__(self) -> None:
        self.began = self.logged = time.monotonic()
        self.bar = tqdm(
            total=1.0, disable=not sys.stderr.isatty(), bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
        )

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def show(self, step: int, losses: list[Tensor], tokens: int, done: float) -> None:
        done = min(1.0, done)
        if done < 1 and time.monotonic() - self.logged < LOG_SECONDS:
            return
        self.logged = time.monotonic()
        line = f"step {step}: loss {weighted_loss(losses):.3f}, {tokens / self.seconds():.0f} tokens/s"
        if self.bar.disable:
            log.info("%s, %.0f %%", line, 100 * done)
        self.bar.set_postfix_str(line, refresh=False)
        self.bar.update(done - self.bar.n)
        if done == 1:
            self.bar.close()


def _endless_batches(text: TargetText, config: TrainDrafterConfig) -> Iterator[DraftBatch]:
    for epoch in itertools.count():
        yield from text.batches(config.tokens_per_batch, config.seed, epoch)


def _step(
    head: Eagle3Head,
    optimizer: torch.optim.Optimizer,
    batch: DraftBatch,
    target_weight_DH: Tensor,
    config: TrainDrafterConfig,
) -> list[Tensor]:
    """One optimizer step; returns the losses of the draft steps, detached."""
    with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16-mixed"):
        losses = rollout_losses(head, batch, target_weight_DH, config.head.steps)
    weighted_loss(losses).backward()
    nn.utils.clip_grad_norm_(head.parameters(), config.gradient_clip)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def _write(folder: Path, head: Eagle3Head, metrics: dict, made: Provenance) -> None:
    head.save(folder)
    write_json(folder / METRICS, metrics)
    made.write(folder)
