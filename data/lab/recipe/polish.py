"""Teach a small language model not to loop, by rounds of training on its own repetitions.

A tiny model decoded greedily falls into cycles: each repetition makes the next one likelier. Each round decodes prompts
greedily and trains on four kinds of rows, in one batch: ordinary text; text, and the model's own answers, in which a
span is said several times over; and the answers as they are, with the repeats that are in them. Repeated tokens get
`repetition_loss`; the other tokens of text keep the language-model loss, and the other tokens of answers are tied to
the distribution that the model gave before the first round, so that what it says stays what it said; an end before the
length of the document's own answer is made impossible there, and costs its unlikelihood where the model wrote it.
(Unlikelihood of repeated tokens alone broke the loops too, but put gibberish in their place.)

Letters: B batch, T tokens, D hidden width, V vocabulary, X tied tokens.
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

from ecospec.data.lab.recipe.measure import first_repeat, looping
from ecospec.data.lab.recipe.pretrain import (
    Losses,
    MasterAdamW,
    Schedule,
    batches,
    dispatch_experts,
    restore_state,
    save_state,
)
from ecospec.data.lab.recipe.repetition import Rows, as_rows, join, own_repeats, repetition_loss, stutter

log = logging.getLogger(__name__)
ALL_EXPERTS_FUNCTIONS.register("lab_batched", dispatch_experts)


@dataclass(frozen=True)
class Phase:
    """Some rounds of one kind."""

    rounds: int
    shortest: float  # share of the document's own answer before which an end is early
    early_ends: float  # weight of the unlikelihood of early ends
    cools: bool = True  # the learning rate falls linearly in the last two fifths of all steps until the phase's end


PHASES = (Phase(3, 1.0, 0.0, cools=False), Phase(5, 1.0, 1.0), Phase(3, 0.8, 0.0))


@dataclass(frozen=True)
class Polish:
    """How many rounds of decoding and training, and how strong."""

    phases: tuple[Phase, ...] = PHASES
    steps: int = 60  # per round
    prompts: int = 256  # decoded per round
    prompt_tokens: int = 64  # of a longer prompt, its end
    answer_tokens: int = 192
    rows: int = 6  # of each of the four kinds, per step
    width: int = 257  # tokens per row, the last one only predicted
    gram: int = 6
    repeats: int = 60  # of one answer, at most
    copies: int = 6  # of a span, at most
    longest: int = 48  # tokens of a span
    decay: float = 0.2  # a repeated token should have at most this share of its earlier chance
    balance: float = 0.002  # weight of the load-balancing loss
    learning_rate: float = 4e-4
    averaged: int = 4  # last rounds whose weights are averaged
    share: float = 0.8  # of that average in the final weights; the rest are the weights before the first round
    seed: int = 1

    @property
    def rounds(self) -> int:
        return sum(phase.rounds for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Trained on in all, padding included."""
        return self.rounds * self.steps * 4 * self.rows * (self.width - 1)

    def phase_of(self, number: int) -> tuple[Phase, int]:
        """The phase of a round, and the round it ends before."""
        ends = np.cumsum([phase.rounds for phase in self.phases])
        index = int(np.searchsorted(ends, number, side="right"))
        return self.phases[index], int(ends[index])

    def learning_rate_at(self, step: int, since_restart: int) -> float:
        """After a short warm-up (again after a restart, whose optimizer starts empty), even, then down to nearly 0."""
        phase, end = self.phase_of(step // self.steps)
        left = max(0.05, min(1.0, 2.5 * (1 - step / (end * self.steps)))) if phase.cools else 1.0
        return self.learning_rate * min(1.0, (since_restart + 1) / 20) * left


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

    The model ends up with the mean of the weights after each of the last rounds, and a share of those it came with:
    less looping costs some language modelling, and this keeps more of both than fewer rounds do. `prompts` are training
    prompts with the documents' own answers; `stream` is ordinary text in tokens.
    """
    context = settings.width - 1
    plain = Schedule(len(stream) - 1, settings.rows * context, context, seed=settings.seed)
    before = Losses(copy.deepcopy(model).eval().requires_grad_(False), compiled)
    start = restore_state(model, folder)
    losses, optimizer = Losses(model, compiled), MasterAdamW(model, weight_decay=0.0)
    text = batches(stream, plain, start * settings.steps)
    for number in range(start, settings.rounds):
        random, (phase, _) = np.random.default_rng([settings.seed, number]), settings.phase_of(number)
        chosen = [prompts[i] for i in random.choice(len(prompts), settings.prompts, replace=False)]
        own = _say(model.eval(), tokenizer, chosen, phase, settings)
        model.train()
        for step in range(number * settings.steps, (number + 1) * settings.steps):
            kinds = [_ordinary(next(text)), _stuttered_text(stream, settings, random), *own.draw(random)]
            polish_loss(losses, before, kinds, settings, phase.early_ends, tokenizer.eos_token_id).backward()
            optimizer.step(settings.learning_rate_at(step, step - start * settings.steps))
        for kept in (folder, _round_folder(folder, number + 1)):
            save_state(model, number + 1, kept)
    _settle(model.eval(), before.model, folder, settings)


def polish_loss(
    losses: Losses, before: Losses, kinds: Sequence[Rows], settings: Polish, early_ends: float, end: int
) -> Tensor:
    """Loss of one step, in nats, over four kinds of rows: text, stuttered text, stuttered answers, faulty answers."""
    rows, sizes = join(kinds), [len(kind.tokens_BT) for kind in kinds]
    texts, targets_BT = sizes[0] + sizes[1], rows.tokens_BT[:, 1:]
    hidden_BTD, balance = losses.hidden(rows.tokens_BT[:, :-1])
    logs_BTV = losses.model.lm_head(hidden_BTD).float().log_softmax(-1)
    logs_BT = logs_BTV.gather(-1, targets_BT[..., None])[..., 0]
    fresh_BT = rows.earlier_BT[:, 1:] < 0
    text = -logs_BT[:texts][fresh_BT[:texts]].mean()
    tie, early = own_text_losses(before, rows[slice(texts, None)], logs_BTV[texts:], end)
    earlier_BT = (rows.earlier_BT[:, 1:] - 1).masked_fill(targets_BT == end, -1)  # chances start at the second token
    parts = zip(logs_BT.exp().split(sizes), earlier_BT.split(sizes), strict=True)
    repeats = sum(repetition_loss(chances_BT, before_BT, settings.decay) for chances_BT, before_BT in parts)
    return text + tie + early_ends * early + repeats + settings.balance * balance


def own_text_losses(before: Losses, rows: Rows, logs_BTV: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy to the model as it was, without early ends, where nothing is repeated; unlikelihood of early ends.

    `logs_BTV` [B, T, V]: log-probabilities of `rows.tokens_BT[:, 1:]`.
    """
    targets_BT, places_T = rows.tokens_BT[:, 1:], torch.arange(1, rows.tokens_BT.shape[1])
    real_BT, early_BT = places_T < rows.lengths_B[:, None], places_T < rows.shortest_B[:, None]
    tied_BT = real_BT & (rows.earlier_BT[:, 1:] < 0)
    with torch.no_grad():
        wanted_XV = before.model.lm_head(before.hidden(rows.tokens_BT[:, :-1])[0][tied_BT]).float()
        wanted_XV[early_BT[tied_BT], end] = -torch.inf
    tie = -(wanted_XV.softmax(-1) * logs_BTV[tied_BT]).sum(-1).mean()
    ended_BT = real_BT & early_BT & (targets_BT == end)
    unlikely_BT = -torch.log1p(-logs_BTV[..., end].exp().clamp(max=1 - 1e-3))
    return tie, (unlikely_BT * ended_BT).sum() / ended_BT.sum().clamp(min=1)


class _Own:
    """What the model said in this round, to draw training rows from."""

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]], least: Sequence[float], settings: Polish) -> None:
        """`pairs`: prompt ids and answer ids; `least`: tokens that each answer should have."""
        self.settings = settings
        pairs = [(prompt[-settings.prompt_tokens :], answer) for prompt, answer in pairs]
        shortest = [len(prompt) + round(tokens) for (prompt, _), tokens in zip(pairs, least, strict=True)]
        cut = [(prompt, answer[: first_repeat(answer, settings.gram)]) for prompt, answer in pairs]
        self.openings = [
            (np.array(prompt + answer), len(prompt), place)
            for (prompt, answer), place in zip(cut, shortest, strict=True)
            if len(answer) >= settings.gram - 1
        ]
        said = [self._repeats(*pair) for pair in pairs]
        faulty = [i for i, (ids, earlier) in enumerate(said) if (earlier >= 0).any() or len(ids) <= shortest[i]]
        self.faulty = as_rows([said[i] for i in faulty], [shortest[i] for i in faulty], settings.width)

    def _repeats(self, prompt: list[int], answer: list[int]) -> tuple[np.ndarray, np.ndarray]:
        earlier = own_repeats(answer, self.settings.gram, self.settings.repeats)
        shifted = np.where(earlier < 0, earlier, earlier + len(prompt))
        return np.array(prompt + answer), np.concatenate([np.full(len(prompt), -1), shifted])

    def draw(self, random: np.random.Generator) -> tuple[Rows, Rows]:
        """Openings of answers in which a span is said again and again, and answers that loop or end too early."""
        settings = self.settings
        openings = [self.openings[i] for i in random.integers(len(self.openings), size=settings.rows)]
        stuttered = [_stutter(tokens, first, settings, random) for tokens, first, _ in openings]
        faulty = random.choice(len(self.faulty.tokens_BT), settings.rows)
        return as_rows(stuttered, [place for *_, place in openings], settings.width), self.faulty[faulty]


def _ordinary(tokens_BT: Tensor) -> Rows:
    B, T = tokens_BT.shape
    return Rows(tokens_BT, torch.full((B, T), -1), torch.full((B,), T), torch.zeros(B, dtype=torch.long))


def _stuttered_text(stream: np.ndarray, settings: Polish, random: np.random.Generator) -> Rows:
    starts = random.integers(0, len(stream) - settings.width, size=settings.rows)
    texts = [stream[start : start + settings.width].astype(np.int64) for start in starts]
    return as_rows([_stutter(text, 8, settings, random) for text in texts], [0] * settings.rows, settings.width)


def _stutter(tokens: np.ndarray, first: int, settings: Polish, random: np.random.Generator) -> tuple:
    return stutter(tokens, first, settings.longest, settings.copies, settings.width, random)


def _settle(model: nn.Module, before: nn.Module, folder: Path, settings: Polish) -> None:
    """Give `model` the mean of the last rounds' weights, mixed with those of `before`."""
    last = [_round_folder(folder, settings.rounds - back) / "state.pt" for back in range(settings.averaged)]
    saved = [torch.load(path, weights_only=True)["weights"] for path in last]
    _blend(model, saved, [1 / settings.averaged] * settings.averaged)
    polished = copy.deepcopy(model.state_dict())
    _blend(model, [before.state_dict(), polished], [1 - settings.share, settings.share])


def _round_folder(folder: Path, rounds: int) -> Path:
    return folder / f"after-{rounds}"


def _blend(model: nn.Module, states: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> None:
    """Give `model` the weighted mean of weights."""
    mixed = {
        name: sum(share * state[name].float() for share, state in zip(shares, states, strict=True))
        for name in model.state_dict()
    }
    model.load_state_dict(mixed)


def _say(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, str]],
    phase: Phase,
    settings: Polish,
) -> "_Own":
    """The model's greedy answers to `prompts`, ready to draw rows from."""
    pairs = decode_greedily(model, tokenizer, [prompt for prompt, _ in prompts], settings.answer_tokens)
    answers = [answer for _, answer in pairs]
    log.info("looping %.3f, %.0f tokens per answer", looping(answers), sum(map(len, answers)) / len(answers))
    wanted = [len(tokenizer(answer, add_special_tokens=False).input_ids) for _, answer in prompts]
    return _Own(pairs, [phase.shortest * min(tokens, settings.answer_tokens) for tokens in wanted], settings)


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
