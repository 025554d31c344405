"""`ecospec-decode eval`: methods × data sets × temperatures × batch sizes on the same prompts, interleaved.

Every method of a prompt (or batch) runs before the next, in an order that rotates, so that a machine whose speed drifts
treats all methods alike. Plain decoding with our own loop is the reference for speed and for losslessness, and its
answers are those that the later turns of a conversation follow, whatever the method.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from ecospec.data.prompts import Prompt
from ecospec.inference.assemble import MethodPlan, PartsLoader
from ecospec.inference.config import EvalConfig
from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.statistics import Run, Step
from ecospec.inference.evaluation.lossless import Difference, Probe, compare, first_difference, routed
from ecospec.inference.evaluation.turns import Turns
from ecospec.progress import progress
from ecospec.seeds import sample_seed
from ecospec.tracing.target.loading import Target
from ecospec.tracing.target.recorder import RoutingRecorder
from ecospec.tracing.target.requests import prompt_ids

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Outcome:
    """A batch of prompts (of one data set) decoded by one method at one temperature; `new_ids`: a list a prompt."""

    plan: MethodPlan
    prompts: list[Prompt]
    temperature: float
    batch_size: int
    new_ids: list[list[int]]
    run: Run

    @property
    def dataset(self) -> str:
        return self.prompts[0].dataset

    @property
    def group(self) -> tuple:
        """What one row of the results is about."""
        return (self.batch_size, self.temperature, self.dataset, self.plan.label)


def evaluate(
    config: EvalConfig, target: Target, plans: list[MethodPlan], prompts: list[Prompt]
) -> tuple[list[Outcome], dict[tuple, list[Difference]]]:
    """All outcomes in the order decoded, and by `Outcome.group` the first difference of each text that is not plain
    decoding's. Raises InputError when a part does not fit."""
    parts = PartsLoader(target, config.traces)
    methods = {plan.label: None if plan.baseline == "hf_greedy" else parts.method(plan) for plan in plans}
    jobs = [
        (size, temperature, batch)
        for size in config.batch_size
        for temperature in config.temperature
        for batch in batches(prompts, size)
    ]
    outcomes, turns = [], defaultdict(lambda: Turns(config, target))
    decode = _Decoder(config, target, methods)
    for plan in plans:
        decode(plan, [prompts[0]], config.temperature[0], max_new_tokens=WARM_UP_TOKENS)
    for job, (size, temperature, planned) in enumerate(progress(jobs, "batches decoded by every method")):
        batch = [turns[size, temperature].complete(prompt) for prompt in planned]
        for index in _rotated(len(plans), job):
            new_ids, run = decode(plans[index], batch, temperature)
            outcomes.append(Outcome(plans[index], batch, temperature, size, new_ids, run))
            if plans[index].baseline == "none":
                turns[size, temperature].note(batch, new_ids)
    return outcomes, _differences(decode, outcomes)


def _differences(decode: "_Decoder", outcomes: list[Outcome]) -> dict[tuple, list[Difference]]:
    references = {
        (outcome.batch_size, outcome.temperature, prompt.sample_id): (outcome, ids)
        for outcome in outcomes
        if outcome.plan.baseline == "none"
        for prompt, ids in zip(outcome.prompts, outcome.new_ids, strict=True)
    }
    differences: dict[tuple, list[Difference]] = {}
    for outcome in outcomes:
        for row, (prompt, found) in enumerate(zip(outcome.prompts, outcome.new_ids, strict=True)):
            plain, expected = references[outcome.batch_size, outcome.temperature, prompt.sample_id]
            if found != expected:
                difference = _difference(decode, outcome, plain, row)
                differences.setdefault(outcome.group, []).append(difference)
    return differences


def _difference(decode: "_Decoder", outcome: Outcome, plain: Outcome, row: int) -> Difference:
    """Decode both again up to where the texts part, and compare what the two passes made of that position."""
    prompt, expected, found = outcome.prompts[row], plain.new_ids[row], outcome.new_ids[row]
    at = first_difference(expected, found)
    prefix = torch.cat([decode.encode(prompt), torch.tensor(expected[:at], device=decode.target.model.device)])
    scores, experts = [], []
    for one in (plain, outcome):
        probe = Probe(prefix.long())
        _, run = decode(one.plan, one.prompts, one.temperature, max_new_tokens=at + 1, logits_processor=[probe])
        scores.append(probe.scores_V)
        experts.append(routed(run, row, at))
    tokens, dtype = (expected[at], found[at]), decode.target.model.dtype
    return compare(prompt.sample_id, at, tokens, scores, experts, dtype, sampled=outcome.temperature > 0)


def batches(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    """Consecutive prompts of one data set and turn, `size` at a time; a data set's first turns come first."""
    datasets = [list(group) for _, group in itertools.groupby(prompts, key=lambda prompt: prompt.dataset)]
    alike = [
        [prompt for prompt in dataset if prompt.turn == turn]
        for dataset in datasets
        for turn in sorted({prompt.turn for prompt in dataset})
    ]
    return [group[start : start + size] for group in alike for start in range(0, len(group), size)]


def sampling_options(temperature: float) -> dict:
    """Keyword arguments of `generate` for a temperature: greedy at 0, else the plain softmax at that temperature."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class _Decoder:
    """Decodes one batch with one method, each text seeded by its prompt."""

    def __init__(self, config: EvalConfig, target: Target, methods: dict[str, Method | None]) -> None:
        self.config = config
        self.target = target
        self.methods = methods

    def __call__(
        self, plan: MethodPlan, batch: list[Prompt], temperature: float, **changes
    ) -> tuple[list[list[int]], Run]:
        options = {"max_new_tokens": self.config.max_new_tokens, **sampling_options(temperature), **changes}
        seeds = [sample_seed(self.config.seed, prompt.sample_id) for prompt in batch]
        texts, method = [self.encode(prompt) for prompt in batch], self.methods[plan.label]
        if method is None:
            torch.manual_seed(seeds[0])
            ids, run = _stock_generate(self.target, texts[0][None], options)
            return [ids[0, len(texts[0]) :].tolist()], run
        generators = [torch.Generator(self.target.model.device).manual_seed(seed) for seed in seeds]
        ids_BT, mask_BT = left_padded(texts)
        per_text = {"generators": generators, "attention_mask": mask_BT, "seed": seeds[0]}
        out, run = generate_with(self.target.model, method, ids_BT, **per_text, **options)
        return [ids[ids_BT.shape[1] :][:count].tolist() for ids, count in zip(out, run.new_by_row, strict=True)], run

    def encode(self, prompt: Prompt) -> Tensor:
        """Ids [T] on the target's device."""
        ids = prompt_ids(prompt, self.target.tokenizer, self.config.chat_template)
        return torch.tensor(ids, device=self.target.model.device)


def left_padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and attention mask [B, T] of texts of unequal length; the padding is id 0."""
    lengths = [len(ids_T) for ids_T in texts]
    mask_BT = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return pad_sequence(texts, batch_first=True, padding_side="left"), mask_BT.long().to(texts[0].device)


class _FirstTokenTimer(BaseStreamer):
    """Notes when the first generated token arrives (a streamer is put the prompt before it)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to close."""


def _stock_generate(target: Target, ids_1T: Tensor, options: dict) -> tuple[Tensor, Run]:
    """Transformers' own loop, timed from its first token on."""
    timer = _FirstTokenTimer()
    with RoutingRecorder(target.model) as recorder:
        out = target.model.generate(ids_1T, streamer=timer, **options)
        end = time.perf_counter()
        experts_TLK = recorder.take()[ids_1T.shape[1] :]
    prompt_at, first_at = timer.times
    steps = [Step([1], [1], [[0]], experts_11LK) for experts_11LK in experts_TLK[:, None, None]]
    return out, Run([out.shape[1] - ids_1T.shape[1]], first_at - prompt_at, end - first_at, steps)


def _rotated(count: int, turn: int) -> Iterator[int]:
    return ((index + turn) % count for index in range(count))
