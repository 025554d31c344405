"""Which samples a job has, which of them share a forward pass, and which worker traces them. Pure.

Everything here depends on the prompt list and the settings alone, so that workers agree without talking to each other,
and so that a job may go on with another number of them.

A conversation's later turn cannot be put into tokens before the turn that it follows is traced. Its key and its batch
are known all the same: they follow from those of that turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ecospec.data.prompts import Prompt
from ecospec.errors import InputError
from ecospec.files import sha256_json
from ecospec.tracing.target.requests import Request, request_key


@dataclass(frozen=True)
class Sample:
    """One sequence of the job.

    `request` is None for a turn that follows one of this job's own answers, and for a sample that is refused, for the
    reason `refusal`, before anything runs.
    """

    key: str
    prompt: Prompt
    request: Request | None
    refusal: str | None = None


@dataclass(frozen=True)
class PlannedBatch:
    """Samples that share a forward pass; `number`, by which workers divide batches, is that of its first turns."""

    number: int
    samples: tuple[Sample, ...]

    @property
    def keys(self) -> list[str]:
        return [sample.key for sample in self.samples]


@dataclass(frozen=True)
class Shard:
    """Worker `index` of `count`, from 0."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From `i/n`. Raises InputError for anything else."""
        index, _, count = text.partition("/")
        if not (text.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise InputError(f"--shard {text}: give i/n with i from 0 to n - 1, for instance 0/4")
        return cls(int(index), int(count))

    def within(self, index: int, count: int) -> "Shard":
        """Part `index` of `count` of this shard."""
        return Shard(self.index + index * self.count, self.count * count)

    def owns(self, batch: PlannedBatch) -> bool:
        return batch.number % self.count == self.index


def refusals(prompts: Sequence[Prompt], teacher_force: bool, max_new_tokens: int) -> dict[str, str]:
    """By sample id, why this job cannot trace a sample, whatever its target: an answer is missing that it, or the turn
    that it follows, was to have."""
    reasons: dict[str, str] = {}
    for prompt in prompts:
        if teacher_force and prompt.answer is None:
            reasons[prompt.sample_id] = "has no `answer`, which --teacher_force needs"
        elif prompt.follows in reasons:
            reasons[prompt.sample_id] = f"follows {prompt.follows}, which was rejected"
        elif prompt.follows is not None and not teacher_force and max_new_tokens == 0:
            reasons[prompt.sample_id] = f"follows the answer to {prompt.follows}, which --max_new_tokens 0 leaves out"
    return reasons


def plan_samples(
    prompts: Sequence[Prompt], requests: Sequence[Request], identity: dict, refused: Mapping[str, str] | None = None
) -> list[Sample]:
    """A sample for each prompt, in order, keyed by its request or else by the turn it follows; `refused`: as `refusals`
    gives it."""
    refused = refused or {}
    by_id = {request.prompt.sample_id: request for request in requests}
    keys: dict[str, str] = {}
    samples = []
    for prompt in prompts:
        request = by_id.get(prompt.sample_id)
        if request is not None:
            key = request_key(identity, request)
        else:
            key = sha256_json([keys.get(prompt.follows, identity), prompt.sample_id, prompt.text])
        keys[prompt.sample_id] = key
        samples.append(Sample(key, prompt, request, refused.get(prompt.sample_id)))
    return samples


def plan_rounds(samples: Sequence[Sample], batch_size: int) -> list[list[PlannedBatch]]:
    """Batches, round by round: a round's turns follow those of the round before, batch by batch.

    In the first round similar lengths are together, equal lengths in their given order; refused samples are in batches
    of their own.
    """
    refused = [sample for sample in samples if sample.refusal is not None]
    first = sorted((sample for sample in samples if sample.request is not None), key=lambda s: len(s.request.ids))
    following = {s.prompt.follows: s for s in samples if s.request is None and s.refusal is None}
    return list(_rounds(_cut(first, batch_size) + _cut(refused, batch_size), following))


def _cut(samples: Sequence[Sample], batch_size: int) -> list[PlannedBatch]:
    groups = [tuple(samples[start : start + batch_size]) for start in range(0, len(samples), batch_size)]
    return [PlannedBatch(int(sha256_json([s.key for s in group])[:15], 16), group) for group in groups]


def _rounds(batches: list[PlannedBatch], following: Mapping[str, Sample]) -> Iterator[list[PlannedBatch]]:
    while batches:
        yield batches
        later = []
        for batch in batches:
            ids = (sample.prompt.sample_id for sample in batch.samples)
            turns = tuple(following[sample_id] for sample_id in ids if sample_id in following)
            later += [PlannedBatch(batch.number, turns)] if turns else []
        batches = later
