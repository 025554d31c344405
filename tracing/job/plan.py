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
    """One sequence of the job; `request` is None for a turn that follows one of this job's own answers."""

    key: str
    prompt: Prompt
    request: Request | None


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


def plan_samples(prompts: Sequence[Prompt], requests: Sequence[Request], identity: dict) -> list[Sample]:
    """A sample for each prompt, in order: with its request where there is one, else keyed by the turn it follows."""
    by_id = {request.prompt.sample_id: request for request in requests}
    keys: dict[str, str] = {}
    samples = []
    for prompt in prompts:
        request = by_id.get(prompt.sample_id)
        if request is not None:
            key = request_key(identity, request)
        else:
            key = sha256_json([keys[prompt.follows], prompt.sample_id, prompt.text])
        keys[prompt.sample_id] = key
        samples.append(Sample(key, prompt, request))
    return samples


def plan_rounds(samples: Sequence[Sample], batch_size: int) -> list[list[PlannedBatch]]:
    """Batches, round by round: a round's turns follow those of the round before, batch by batch.

    In the first round similar lengths are together, equal lengths in their given order.
    """
    first = sorted((sample for sample in samples if sample.request is not None), key=lambda s: len(s.request.ids))
    groups = [tuple(first[start : start + batch_size]) for start in range(0, len(first), batch_size)]
    batches = [PlannedBatch(int(sha256_json([s.key for s in group])[:15], 16), group) for group in groups]
    following = {sample.prompt.follows: sample for sample in samples if sample.request is None}
    return list(_rounds(batches, following))


def _rounds(batches: list[PlannedBatch], following: Mapping[str, Sample]) -> Iterator[list[PlannedBatch]]:
    while batches:
        yield batches
        later = []
        for batch in batches:
            ids = (sample.prompt.sample_id for sample in batch.samples)
            turns = tuple(following[sample_id] for sample_id in ids if sample_id in following)
            later += [PlannedBatch(batch.number, turns)] if turns else []
        batches = later
