"""Every sample is in one batch of one worker, however many there are; batches depend on the prompts alone."""

import itertools
from dataclasses import replace

import pytest

from ecospec.data.prompts import Prompt
from ecospec.errors import InputError
from ecospec.tracing.job.plan import Sample, Shard, plan_rounds, plan_samples, refusals
from ecospec.tracing.target.requests import Request

LENGTHS = [5, 3, 9, 3, 5, 1, 3]


def request_of(row: int, length: int, dataset: str = "d") -> Request:
    return Request(Prompt(f"{dataset}/{row}/0", dataset, row, 0, "x" * length), list(range(length)), None)


def conversation(row: int, turns: int) -> list[Prompt]:
    ids = [f"d/{row}/{turn}" for turn in range(turns)]
    return [
        Prompt(name, "d", row, turn, f"turn {turn}", follows=ids[turn - 1] if turn else None)
        for turn, name in enumerate(ids)
    ]


def samples_of(lengths: list[int]) -> list[Sample]:
    requests = [request_of(row, length) for row, length in enumerate(lengths)]
    return plan_samples([request.prompt for request in requests], requests, {"seed": 0})


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batches_hold_every_sample_once_and_sort_by_length(batch_size: int) -> None:
    (batches,) = plan_rounds(samples_of(LENGTHS), batch_size)
    rows = [sample.prompt.row for batch in batches for sample in batch.samples]
    assert rows == [5, 1, 3, 6, 0, 4, 2]  # equal lengths keep their order
    assert all(len(batch.samples) == batch_size for batch in batches[:-1])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_batch_belongs_to_one_worker(count: int) -> None:
    (batches,) = plan_rounds(samples_of(list(range(1, 40))), 2)
    owners = [[index for index in range(count) if Shard(index, count).owns(batch)] for batch in batches]
    assert all(len(owner) == 1 for owner in owners)
    assert len(set(itertools.chain(*owners))) == count


def test_a_worker_s_replicas_share_its_batches() -> None:
    (batches,) = plan_rounds(samples_of(list(range(1, 40))), 2)
    for batch in batches:
        for index in range(3):
            parts = [Shard(index, 3).within(replica, 2).owns(batch) for replica in range(2)]
            assert sum(parts) == Shard(index, 3).owns(batch)


def test_duplicate_prompts_are_samples_of_their_own() -> None:
    keys = [sample.key for sample in samples_of([4, 4, 4])]
    assert len(set(keys)) == 3
    assert keys == [sample.key for sample in samples_of([4, 4, 4])]


def test_later_turns_follow_in_rounds_in_the_batches_of_their_first_turns() -> None:
    prompts = [prompt for row, turns in enumerate((2, 1, 3)) for prompt in conversation(row, turns)]
    requests = [Request(prompt, [prompt.row], None) for prompt in prompts if prompt.follows is None]
    samples = plan_samples(prompts, requests, {})
    assert len({sample.key for sample in samples}) == len(prompts)
    rounds = plan_rounds(samples, 2)
    found = [[[sample.prompt.sample_id for sample in batch.samples] for batch in batches] for batches in rounds]
    assert found == [[["d/0/0", "d/1/0"], ["d/2/0"]], [["d/0/1"], ["d/2/1"]], [["d/2/2"]]]
    assert [batch.number for batch in rounds[1]] == [batch.number for batch in rounds[0]]
    assert rounds[2][0].number == rounds[0][1].number


def test_a_sample_without_the_answer_it_needs_is_refused_with_all_that_follows_it() -> None:
    answers = {"d/0/0": "x", "d/0/1": None, "d/0/2": "x", "d/1/0": None, "d/1/1": "", "d/2/0": ""}
    prompts = [
        replace(p, answer=answers[p.sample_id]) for row, turns in enumerate((3, 2, 1)) for p in conversation(row, turns)
    ]
    lacking, following = "has no `answer`, which --teacher_force needs", "which was rejected"
    assert refusals(prompts, teacher_force=True, max_new_tokens=0) == {
        "d/0/1": lacking,
        "d/0/2": f"follows d/0/1, {following}",
        "d/1/0": lacking,
        "d/1/1": f"follows d/1/0, {following}",
    }
    assert refusals(prompts, teacher_force=False, max_new_tokens=1) == {}
    without = refusals(prompts, teacher_force=False, max_new_tokens=0)
    assert set(without) == {"d/0/1", "d/0/2", "d/1/1"}
    assert "the answer to d/0/0, which --max_new_tokens 0" in without["d/0/1"]


def test_refused_samples_have_batches_of_their_own_and_the_others_those_they_would_have() -> None:
    requests = [request_of(row, length) for row, length in enumerate(LENGTHS)]
    lost = [*conversation(10, 2), *conversation(11, 1)]
    refused = {prompt.sample_id: "lost" for prompt in lost}
    samples = plan_samples([*(request.prompt for request in requests), *lost], requests, {}, refused)
    assert len({sample.key for sample in samples}) == len(samples)
    (batches,) = plan_rounds(samples, 2)
    (usual,) = plan_rounds(plan_samples([request.prompt for request in requests], requests, {}), 2)
    assert batches[: len(usual)] == usual
    assert [[s.prompt.sample_id for s in b.samples] for b in batches[len(usual) :]] == [
        ["d/10/0", "d/10/1"],
        ["d/11/0"],
    ]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "a/b", "1/2/3"])
def test_a_shard_is_i_of_n_from_zero(text: str) -> None:
    with pytest.raises(InputError, match="shard"):
        Shard.parse(text)
    assert Shard.parse("1/2") == Shard(1, 2)
