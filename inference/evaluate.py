"""`ecospec-decode eval`: methods × data sets × temperatures on the same prompts, interleaved prompt by prompt.

Every method of a prompt runs before the next prompt, in an order that rotates, so that a machine whose speed drifts
treats all methods alike. Plain decoding with our own loop is the reference for speed and for losslessness.
"""

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ecospec.configs.progress import progress
from ecospec.data.prompts import Prompt
from ecospec.inference.assemble import MethodPlan, Workshop
from ecospec.inference.config import DecodeConfig
from ecospec.inference.decoder import Method, generate_with
from ecospec.inference.statistics import Run, Step
from ecospec.tracing.recorder import RoutingRecorder
from ecospec.tracing.target import Target

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Outcome:
    """One prompt decoded by one method at one temperature. `new_ids` are the generated ids."""

    plan: MethodPlan
    prompt: Prompt
    temperature: float
    new_ids: list[int]
    run: Run


@dataclass(frozen=True)
class Difference:
    """Where a text first leaves the reference, and by how much the target preferred the reference's token there."""

    sample_id: str
    position: int
    expected: int
    found: int
    logit_gap: float


def evaluate(config: DecodeConfig, target: Target, plans: list[MethodPlan], prompts: list[Prompt]) -> list[Outcome]:
    """All outcomes, in the order decoded. Raises InputError when a part does not fit."""
    workshop = Workshop(target, config.traces)
    methods = [None if plan.baseline == "hf_greedy" else workshop.method(plan) for plan in plans]
    ids = [_encode(target, prompt) for prompt in prompts]
    outcomes = []
    with RoutingRecorder(target.model) as recorder:
        decode = _Decoder(config, target, recorder)
        _warm_up(decode, plans, methods, ids[0], prompts[0])
        jobs = [(temperature, number) for temperature in config.temperature for number in range(len(prompts))]
        for turn, (temperature, number) in enumerate(progress(jobs, "prompts decoded by every method")):
            for index in _rotated(len(plans), turn):
                new_ids, run = decode(plans[index], methods[index], ids[number], prompts[number], temperature)
                outcomes.append(Outcome(plans[index], prompts[number], temperature, new_ids, run))
    return outcomes


def first_differences(target: Target, outcomes: list[Outcome]) -> dict[str, list[Difference]]:
    """Label → the first difference of each text that is not the reference's, per method; absent where all are equal."""
    references = {(o.prompt.sample_id, o.temperature): o.new_ids for o in outcomes if o.plan.baseline == "none"}
    differences: dict[str, list[Difference]] = {}
    for outcome in outcomes:
        expected = references[outcome.prompt.sample_id, outcome.temperature]
        if outcome.new_ids != expected:
            key = difference_key(outcome)
            differences.setdefault(key, []).append(_difference(target, outcome, expected))
    return differences


def difference_key(outcome: Outcome) -> str:
    return f"{outcome.plan.label}/{outcome.prompt.dataset}/{outcome.temperature}"


def sample_seed(seed: int, sample_id: str) -> int:
    """The seed of one prompt's random draws, the same for every method."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()[:7])


def sampling_options(temperature: float) -> dict:
    """Keyword arguments of `generate` for a temperature: greedy at 0, else the plain softmax at that temperature."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class _Decoder:
    """Decodes one prompt with one method, seeded by the prompt."""

    def __init__(self, config: DecodeConfig, target: Target, recorder: RoutingRecorder) -> None:
        self.config = config
        self.target = target
        self.recorder = recorder

    def __call__(
        self, plan: MethodPlan, method: Method | None, ids_1T: Tensor, prompt: Prompt, temperature: float
    ) -> tuple[list[int], Run]:
        seed = sample_seed(self.config.seed, prompt.sample_id)
        torch.manual_seed(seed)
        options = {"max_new_tokens": self.config.max_new_tokens, **sampling_options(temperature)}
        if plan.baseline == "hf_greedy":
            ids, run = _stock_generate(self.target, self.recorder, ids_1T, options)
        else:
            method.seed = seed
            ids, run = generate_with(self.target.model, method, ids_1T, recorder=self.recorder, **options)
        return ids[0, ids_1T.shape[1] :].tolist(), run


class _FirstTokenTimer(BaseStreamer):
    """Notes when the first generated token arrives (a streamer is put the prompt before it)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to close."""


def _stock_generate(target: Target, recorder: RoutingRecorder, ids_1T: Tensor, options: dict) -> tuple[Tensor, Run]:
    """Transformers' own loop, timed from its first token on."""
    timer = _FirstTokenTimer()
    out = target.model.generate(ids_1T, streamer=timer, **options)
    end = time.perf_counter()
    prompt_at, first_at = timer.times
    experts_TLK = recorder.take()[ids_1T.shape[1] :]
    steps = [Step(emitted=1, verified=1, experts_NLK=experts_1LK) for experts_1LK in experts_TLK[:, None]]
    return out, Run(out.shape[1] - ids_1T.shape[1], first_at - prompt_at, end - first_at, steps)


def _warm_up(decode: _Decoder, plans: list[MethodPlan], methods: list, ids_1T: Tensor, prompt: Prompt) -> None:
    short = dataclasses.replace(decode.config, max_new_tokens=WARM_UP_TOKENS)
    warm = _Decoder(short, decode.target, decode.recorder)
    for plan, method in zip(plans, methods, strict=True):
        warm(plan, method, ids_1T, prompt, decode.config.temperature[0])


def _rotated(count: int, turn: int) -> Iterator[int]:
    return ((index + turn) % count for index in range(count))


def _encode(target: Target, prompt: Prompt) -> Tensor:
    return target.tokenizer(prompt.text, return_tensors="pt").input_ids.to(target.model.device)


@torch.inference_mode()
def _difference(target: Target, outcome: Outcome, expected: list[int]) -> Difference:
    # Texts that end do so with a token, so neither can be a mere beginning of the other.
    at = next(i for i, (a, b) in enumerate(zip(expected, outcome.new_ids, strict=False)) if a != b)
    wanted, got = expected[at], outcome.new_ids[at]
    written = torch.tensor([expected[:at]], dtype=torch.long, device=target.model.device)
    prefix = torch.cat([_encode(target, outcome.prompt), written], dim=1)
    logits_V = target.model(prefix, logits_to_keep=1).logits[0, -1].float()
    return Difference(outcome.prompt.sample_id, at, wanted, got, float(logits_V[wanted] - logits_V[got]))
