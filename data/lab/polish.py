"""Teach a small language model not to loop, by rounds of self-distillation with the loops cut out.

A tiny model decoded greedily falls into cycles. Each round decodes prompts greedily and marks every token that closes
an n-gram seen before in the same answer, and an end well before the length of the document's own answer. The model then
learns, on those very answers, the distribution of the model as it was before the first round, in which the marked
tokens are made impossible; ordinary text goes along. So it learns what it would have said instead, and nothing else.
(Plain unlikelihood of the marked tokens broke the loops too, but put gibberish in their place.)

Letters: B batch, T tokens, V vocabulary.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ecospec.data.lab.measure import looping
from ecospec.data.lab.pretrain import (
    Losses,
    MasterAdamW,
    Schedule,
    batches,
    dispatch_experts,
    restore_state,
    save_state,
)

log = logging.getLogger(__name__)
ALL_EXPERTS_FUNCTIONS.register("lab_batched", dispatch_experts)


@dataclass(frozen=True)
class Polish:
    """How many rounds of decoding and training, and how strong."""

    rounds: int = 5  # at most
    enough: float = 0.10  # looping at which no further round is needed
    prompts: int = 384  # decoded per round, each trained on once
    prompt_tokens: int = 96  # of a longer prompt, its end
    answer_tokens: int = 224
    shortest: float = 0.8  # of the document's own answer; an earlier end is marked
    rows: int = 16  # answers per step
    text_rows: int = 8  # rows of ordinary text per step
    gram: int = 6
    learning_rate: float = 6e-4  # in the first round
    decay: float = 1 / 8  # of the first learning rate that each round takes away
    seed: int = 1


def repeated(ids: Sequence[int], gram: int) -> list[bool]:
    """For each token, whether the n-gram that it closes occurred earlier in the same text."""
    seen, marks = set(), []
    for end in range(1, len(ids) + 1):
        closing = tuple(ids[end - gram : end]) if end >= gram else None
        marks.append(closing is not None and closing in seen)
        seen.add(closing)
    return marks


def distillation(
    teacher_BTV: Tensor, logits_BTV: Tensor, targets_BT: Tensor, marked_BT: Tensor, real_BT: Tensor
) -> Tensor:
    """Mean cross-entropy, in nats, over the `real` positions to the teacher without the `marked` targets."""
    impossible_BTV = torch.zeros_like(teacher_BTV, dtype=torch.bool).scatter_(
        -1, targets_BT[..., None], marked_BT[..., None]
    )
    wanted_BTV = teacher_BTV.float().masked_fill(impossible_BTV, -torch.inf).softmax(-1)
    losses_BT = -(wanted_BTV * logits_BTV.float().log_softmax(-1)).sum(-1)
    return (losses_BT * real_BT).sum() / real_BT.sum()


def polish(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, str]],
    stream: np.ndarray,
    settings: Polish,
    folder: Path,
    compiled: bool = True,
) -> None:
    """Run rounds on `model` in place, saving weights into `folder` after each; goes on from what is saved there.

    `prompts` are training prompts with the documents' own answers; `stream` is ordinary text in tokens.
    """
    plain = Schedule(tokens=len(stream) - 1, batch_tokens=settings.text_rows * 256, seed=settings.seed)
    teacher = Losses(copy.deepcopy(model).eval().requires_grad_(False), compiled)
    start, steps = restore_state(model, folder), settings.prompts // settings.rows
    losses, optimizer = Losses(model, compiled), MasterAdamW(model, weight_decay=0.0)
    text = batches(stream, plain, start * steps)
    for number in range(start, settings.rounds):
        chosen = np.random.default_rng([settings.seed, number]).choice(len(prompts), settings.prompts, replace=False)
        rows, marks, real, looped = _answers(model.eval(), tokenizer, [prompts[i] for i in chosen], settings)
        log.info("polish %d/%d: looping %.3f on training prompts", number, settings.rounds, looped)
        if looped <= settings.enough:
            break
        model.train()
        parts = zip(*(tensor.split(settings.rows) for tensor in (rows, marks, real)), strict=True)
        for step, (row_BT, mark_BT, real_BT) in enumerate(parts):
            loss, balance = losses(next(text))
            with torch.no_grad():
                teacher_BTV = teacher.logits(row_BT[:, :-1])
            logits_BTV = losses.logits(row_BT[:, :-1])
            own = distillation(teacher_BTV, logits_BTV, row_BT[:, 1:], mark_BT[:, 1:], real_BT[:, 1:])
            (loss + plain.balance * balance + own).backward()
            optimizer.step(settings.learning_rate * (1 - number * settings.decay) * min(1.0, (step + 1) / 5))
        log.info("loss %.3f on text, %.3f on answers", loss.item(), own.item())
        save_state(model, number + 1, folder)
    model.eval()


def decode_greedily(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], new_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids, cut after the end token) of each prompt, all in one batch."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    before = model.get_experts_implementation()
    model.set_experts_implementation("lab_batched")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    model.set_experts_implementation(before)
    width, end = inputs.input_ids.shape[1], tokenizer.eos_token_id
    lengths = inputs.attention_mask.sum(1).tolist()
    rows = []
    for row, length in zip(out.tolist(), lengths, strict=True):
        answer = row[width:]
        rows.append((row[width - length : width], answer[: answer.index(end) + 1] if end in answer else answer))
    return rows


def _answers(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[tuple[str, str]], settings: Polish
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Prompts and greedy answers in rows [prompts, T], which tokens to forbid, which are answers, and their looping."""
    pairs = decode_greedily(model, tokenizer, [prompt for prompt, _ in prompts], settings.answer_tokens)
    shape = (len(pairs), settings.prompt_tokens + settings.answer_tokens)
    rows, marks = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    real = torch.zeros(shape, dtype=torch.bool)
    for index, (prompt, answer) in enumerate(pairs):
        start = min(len(prompt), settings.prompt_tokens)
        end = start + len(answer)
        rows[index, :end] = torch.tensor(prompt[-start:] + answer)
        real[index, start:end] = True
        marks[index, start:end] = torch.tensor(repeated(answer, settings.gram))
        own = len(tokenizer(prompts[index][1], add_special_tokens=False).input_ids)
        marks[index, end - 1] |= len(answer) < settings.shortest * min(own, settings.answer_tokens)
    answers = [answer for _, answer in pairs]
    log.info("%.0f tokens per answer", sum(map(len, answers)) / len(answers))
    return rows, marks, real, looping(answers)
