"""A job's samples are each written once or rejected with a reason, whoever traces them and however often it stops."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import read_traces
from ecospec.files import read_json
from ecospec.tracing.cli import main
from ecospec.tracing.store import folder as store
from ecospec.tracing.store import manifest
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.store.manifest import SampleCounts
from ecospec.tracing.target.loading import MoeShape, load_target_config, shape_of
from ecospec.tracing.target.recorder import RoutingRecorder
from tests.tiny import tiny_config, tiny_target_folder, tiny_tokenizer
from tests.vllm_stub import StubServer, hashed_experts
from tests.zoo import zoo_config, zoo_model

CONTEXT = 64
TEXTS = [f"prompt number {n}" + " and more" * (n % 3) for n in range(20)] + ["ü🙂\u2028 ≠ ascii", "twice", "twice"]
TOO_LONG = "far too long " * 10


def write_prompts(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target"), max_position_embeddings=CONTEXT)


@pytest.fixture
def stub(target: Path) -> Iterator[StubServer]:
    with StubServer(shape_of(load_target_config(TargetConfig(name=str(target))))) as server:
        yield server


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "mine.jsonl", [{"prompt": text} for text in TEXTS])


def words(target: Path, prompts: Path, output: Path, *options: str) -> list[str]:
    command = ["run", "--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    return [*command, "--max-new-tokens", "4", "--batch-size", "2", *options]


def asking(server: StubServer, *options: str) -> list[str]:
    return ["--engine", "vllm", "--engine.url", server.url, *options]


def true_experts(ids: list[int], shape: MoeShape) -> np.ndarray:
    return np.sort(hashed_experts(ids, shape), axis=-1)


def rows_of(folder: Path) -> dict[str, tuple]:
    """Sample id → the rest, of a sound folder."""
    check_folder(folder)
    return {t.sample_id: (t.key, t.prompt_len, t.input_ids.tolist(), t.experts.tolist()) for t in read_traces(folder)}


def test_the_users_own_ids_join_traces_to_their_data_and_change_nothing_else(target: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "turns": ["a", "b"], "id": 12}, {"prompt": "c"}, {"prompt": TOO_LONG, "task_id": "long"}]
    named = write_prompts(tmp_path / "p.jsonl", rows)
    assert main(words(target, named, tmp_path / "named")) == 0
    bare = write_prompts(tmp_path / "p.jsonl", [{**row, "id": None, "task_id": None} for row in rows])
    assert main(words(target, bare, tmp_path / "bare")) == 0
    assert rows_of(tmp_path / "named") == rows_of(tmp_path / "bare")
    found = {trace.sample_id: trace for trace in read_traces(tmp_path / "named")}
    assert {name: trace.source_id for name, trace in found.items()} == {"p/0/0": "12", "p/0/1": "12", "p/1/0": None}
    assert {trace.split for trace in found.values()} == {trace.split for trace in read_traces(tmp_path / "bare")}
    (refused,) = (tmp_path / "named").glob("rejected-*")
    assert pq.read_table(refused)["source_id"].to_pylist() == ["long"]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_prompts_alone_are_traced_and_what_would_follow_their_answers_is_rejected(
    target: Path, stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture, engine: str
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "one", "turns": ["one", "two"]}, {"prompt": "three"}])
    options = asking(stub) if engine == "vllm" else []
    assert main(words(target, prompts, tmp_path / "t", *options, "--max-new-tokens", "0")) == 0
    assert "p/0/1: follows the answer to p/0/0, which --max_new_tokens 0 leaves out" in capsys.readouterr().err
    rows = rows_of(tmp_path / "t")
    assert {name: row[1] for name, row in rows.items()} == {"p/0/0": len("one"), "p/1/0": len("three")}
    assert all(prompt_len == len(ids) == len(experts) for _, prompt_len, ids, experts in rows.values())
    assert main(["stats", str(tmp_path / "t"), "--output", str(tmp_path / "s"), "--compare", str(tmp_path / "t")]) == 0


def test_a_row_without_the_answer_to_be_forced_is_rejected_and_the_others_are_not(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = [
        {"prompt": "a", "turns": ["a", "b"]},
        {"prompt": "c", "turns": ["c", "d", "e"], "reference_turns": ["x", None, "z"]},
        {"prompt": "f", "turns": ["f", "g"], "reference_turns": ["x", "y"]},
    ]
    prompts = write_prompts(tmp_path / "mt.jsonl", rows)
    for shard in ("1/2", "0/2"):
        assert main(words(target, prompts, tmp_path / "t", "--teacher-force", "--shard", shard)) == 0
    assert set(rows_of(tmp_path / "t")) == {"mt/1/0", "mt/2/0", "mt/2/1"}
    assert check_folder(tmp_path / "t").samples == SampleCounts(3, 4)
    said = capsys.readouterr().err
    assert "rejected: sample mt/0/0: has no `answer`, which --teacher_force needs" in said
    assert "rejected: sample mt/1/2: follows mt/1/1, which was rejected" in said
    alone = write_prompts(tmp_path / "mt.jsonl", rows[:1])
    assert main(words(target, alone, tmp_path / "none", "--teacher-force")) == 2
    assert "nothing is left to trace: sample mt/0/0 has no `answer`" in capsys.readouterr().err


def test_a_sample_that_outgrows_the_context_is_rejected_and_the_others_are_not(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": TOO_LONG}, {"prompt": "b"}])
    for again in ([], ["--retry-rejected"]):
        assert main(words(target, prompts, tmp_path / "t", *again)) == 0
        assert set(rows_of(tmp_path / "t")) == {"p/0/0", "p/2/0"}
        assert check_folder(tmp_path / "t").samples == SampleCounts(2, 1)
        said = capsys.readouterr().err
        assert f"rejected: sample p/1/0: needs {len(TOO_LONG) + 3} tokens" in said
        assert "3 samples expected = 2 written + 1 rejected" in said


def test_a_job_of_which_nothing_is_left_fails(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": TOO_LONG}])
    for _ in range(2):
        assert main(words(target, prompts, tmp_path / "t")) == 1
        assert "every sample was rejected" in capsys.readouterr().err


def test_rejections_are_kept_until_they_can_be_tried_again(target: Path, stub: StubServer, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": TOO_LONG}])
    stub.context = CONTEXT
    command = words(target, prompts, tmp_path / "t", *asking(stub, "--engine.retries", "0"))
    assert main(command) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()}
    stub.stop()
    assert main([*command, "--retry-rejected"]) == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "t").iterdir()} == before
    stub.start()
    stub.context = 10**6
    assert main([*command, "--retry-rejected"]) == 0
    assert set(rows_of(tmp_path / "t")) == {"p/0/0", "p/1/0"}


def test_a_changed_chat_template_is_another_configuration(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}])
    folder = shutil.copytree(target, tmp_path / "target")
    for letter in "uv":
        (folder / "chat_template.jinja").write_text(letter + "{% for m in messages %}{{ m.content }}{% endfor %}")
        code = main(words(folder, prompts, tmp_path / "t", "--chat-template", "true"))
        assert code == (0 if letter == "u" else 2)
    assert "tokenizer_sha256" in capsys.readouterr().err
    check_folder(tmp_path / "t")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--engine", "vllm", "--engine.url", "http://127.0.0.1:abc"], "--engine.url"),
        (["--engine", "vllm", "--engine.url", "http://localhost:99999"], "--engine.url"),
        (["--engine", "vllm", "--engine.url", "http://"], "--engine.url"),
        (["--engine", "vllm", "--engine.url", "http://h:1", "--target.expert_mib", "3"], "--target.expert_mib"),
        (["--engine", "vllm", "--engine.url", "http://h:1", "--target.device_map", "auto"], "--target.device_map"),
        (["--engine.launch", "vllm serve"], "--engine.launch"),
        (["--threads", "100000"], "--threads"),
        (["--overwrite"], "--overwrite"),
    ],
)
def test_options_that_would_be_ignored_or_cannot_work_are_refused(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], named: str
) -> None:
    assert main(words(target, prompts, tmp_path / "t", *options)) == 2
    assert named in capsys.readouterr().err


def test_rejections_cannot_be_retried_by_one_worker_of_several(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(words(target, prompts, tmp_path / "t", "--retry-rejected", "--shard", "0/2")) == 2
    assert "--retry_rejected" in capsys.readouterr().err


def test_any_number_of_workers_writes_the_rows_of_one(target: Path, prompts: Path, tmp_path: Path) -> None:
    sampled = ["--temperature", "1", "--seed", "2"]
    assert main(words(target, prompts, tmp_path / "one", *sampled)) == 0
    for shard in ("1/3", "0/3"):
        assert main(words(target, prompts, tmp_path / "many", *sampled, "--shard", shard)) == 0
        assert not (tmp_path / "many" / "manifest.json").exists()
    for shard in ("1/2", "0/2"):  # and with another number of them
        assert main(words(target, prompts, tmp_path / "many", *sampled, "--shard", shard)) == 0
    assert rows_of(tmp_path / "many") == rows_of(tmp_path / "one")


def test_servers_trace_a_job_truly_and_a_finished_one_asks_nothing(
    target: Path, prompts: Path, stub: StubServer, tmp_path: Path
) -> None:
    command = words(target, prompts, tmp_path / "t", *asking(stub, "--engine.launch", "vllm serve it"))
    assert main(command) == 0
    rows, shape = rows_of(tmp_path / "t"), stub.shape
    assert len(rows) == len(TEXTS)
    for _, prompt_len, ids, experts in rows.values():
        assert prompt_len < len(ids) and np.array_equal(experts, true_experts(ids, shape))
    engine = read_json(tmp_path / "t" / "manifest.json")["engine"]
    assert (engine["name"], engine["version"], engine["launch"]) == ("vllm", "0.30.0", "vllm serve it")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    stub.stop()
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before
    stub.start()


def test_a_folder_goes_on_with_the_same_engine_only(
    target: Path, prompts: Path, stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "t"
    assert main(words(target, prompts, folder, *asking(stub), "--shard", "0/2")) == 0
    stub.version = "0.31.0"
    assert main(words(target, prompts, folder, *asking(stub))) == 2
    assert "engine.version is 0.30.0, not 0.31.0" in capsys.readouterr().err
    assert main(words(target, prompts, folder)) == 2
    assert "engine.name is vllm, not transformers" in capsys.readouterr().err
    stub.version = "0.30.0"
    assert main(words(target, prompts, folder, *asking(stub))) == 0
    assert len(rows_of(folder)) == len(TEXTS)


@pytest.mark.parametrize("retrace", [False, True])
def test_later_turns_follow_the_answers_that_were_traced(
    target: Path, stub: StubServer, tmp_path: Path, retrace: bool
) -> None:
    turns = [["one", "and two", "three"], ["alone"], [TOO_LONG, "never asked"], ["x", "y"]]
    prompts = write_prompts(tmp_path / "c.jsonl", [{"prompt": row[0], "turns": row} for row in turns])
    options = asking(stub, "--engine.retrace", str(retrace).lower())
    stub.context = CONTEXT
    assert main(words(target, prompts, tmp_path / "t", *options)) == 0
    tokenizer, rows = tiny_tokenizer(), rows_of(tmp_path / "t")
    assert set(rows) == {"c/0/0", "c/0/1", "c/0/2", "c/1/0", "c/3/0", "c/3/1"}
    for first, second, text in (("c/0/0", "c/0/1", "and two"), ("c/0/1", "c/0/2", "three"), ("c/3/0", "c/3/1", "y")):
        _, _, ids, _ = rows[first]
        _, prompt_len, longer, experts = rows[second]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        start = tokenizer.decode(ids[: rows[first][1]], skip_special_tokens=True)
        answer = shown[len(start) :]
        assert longer[:prompt_len] == tokenizer(f"{start}\n\n{answer}\n\n{text}")["input_ids"]
        assert np.array_equal(experts, true_experts(longer, stub.shape))
    assert check_folder(tmp_path / "t").samples == SampleCounts(6, 2)


def test_a_conversation_that_stopped_between_its_turns_goes_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"q{n}", "turns": [f"q{n}", "and then?"]} for n in range(4)]
    prompts = write_prompts(tmp_path / "c.jsonl", rows)
    assert main(words(target, prompts, tmp_path / "whole")) == 0
    add = store.TraceFolder.add

    def stop_at_later_turns(self: store.TraceFolder, new: list, rejected: list) -> None:
        if any(row["turn"] for row in new):
            raise KeyboardInterrupt
        add(self, new, rejected)

    with monkeypatch.context() as patch:
        patch.setattr(store.TraceFolder, "add", stop_at_later_turns)
        assert main(words(target, prompts, tmp_path / "t")) == 130
    for shard in ("0/2", "1/2"):
        assert main(words(target, prompts, tmp_path / "t", "--shard", shard)) == 0
    assert rows_of(tmp_path / "t") == rows_of(tmp_path / "whole")


SIZES = {
    "512 experts, K 22": ("qwen3_moe", {"num_experts": 512, "num_experts_per_tok": 22}),
    "K 1": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 1}),
    "dense layers and shared experts": ("deepseek_v3", {"num_hidden_layers": 5, "first_k_dense_replace": 3}),
}


@pytest.mark.parametrize("case", SIZES)
def test_any_size_is_traced_and_read_back(case: str, tmp_path: Path) -> None:
    family, sizes = SIZES[case]
    tiny_config(family, **sizes).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text, "answer": ""} for text in TEXTS])
    shape = shape_of(load_target_config(TargetConfig(name=str(tmp_path / "target"))))
    options = ["--teacher-force", "--target.dtype", "bfloat16"]
    with StubServer(shape) as server:
        assert main(words(tmp_path / "target", prompts, tmp_path / "t", *asking(server, *options))) == 0
    rows = rows_of(tmp_path / "t")
    assert len(rows) == len(TEXTS)
    highest = 0
    for _, prompt_len, ids, experts in rows.values():
        assert prompt_len == len(ids), "an empty answer leaves the prompt alone"
        assert np.array_equal(experts, true_experts(ids, shape))
        highest = max(highest, int(np.max(experts)))
    assert shape.num_experts - 8 < highest < shape.num_experts


def test_experts_without_weights_are_refused_by_family_before_any_weight_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": "a"}])
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    zoo_config("longcat_flash").save_pretrained(tmp_path / "target")
    assert main(words(tmp_path / "target", prompts, tmp_path / "t")) == 2
    assert "family longcat_flash cannot be traced: 2 of its experts have no weights" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_longcat_is_traced_truly_where_all_its_experts_have_weights(tmp_path: Path) -> None:
    model = zoo_model("longcat_flash", zero_expert_num=0)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS[:3]])
    assert main(words(tmp_path / "target", prompts, tmp_path / "t")) == 0
    for _, _, ids, experts in rows_of(tmp_path / "t").values():
        with RoutingRecorder(model) as recorder, torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
            assert recorder.take(len(ids)).sort(-1).values.tolist() == experts


@pytest.mark.slow
def test_ten_thousand_tiny_samples_and_a_huge_one_are_all_there(tmp_path: Path) -> None:
    tiny_config("qwen3_moe", max_position_embeddings=2**17).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    texts = [*("ab"[n % 2] for n in range(10_000)), "x" * 100_000]
    prompts = write_prompts(tmp_path / "p.jsonl", [{"prompt": text, "answer": ""} for text in texts])
    shape = shape_of(load_target_config(TargetConfig(name=str(tmp_path / "target"))))
    options = ["--teacher-force", "--target.dtype", "bfloat16", "--batch-size", "64"]
    with StubServer(shape) as server:
        assert main(words(tmp_path / "target", prompts, tmp_path / "t", *asking(server, *options))) == 0
    rows = rows_of(tmp_path / "t")
    assert len(rows) == 10_001
    assert {name: len(row[2]) for name, row in rows.items()} == {f"p/{n}/0": len(text) for n, text in enumerate(texts)}
    for name in ("p/0/0", "p/1/0", "p/10000/0"):
        assert np.array_equal(rows[name][3], true_experts(rows[name][2], shape))


def test_a_batch_system_s_signal_leaves_a_state_to_go_on_from(target: Path, prompts: Path, tmp_path: Path) -> None:
    def work() -> int:
        add = store.TraceFolder.add

        def signalled(self: store.TraceFolder, rows: list, rejected: list) -> None:
            add(self, rows, rejected)
            if rows:
                os.kill(os.getpid(), signal.SIGTERM)

        store.TraceFolder.add = signalled
        return main(words(target, prompts, tmp_path / "t"))

    (code,) = in_children([work])
    assert code == 130
    assert list((tmp_path / "t").glob("part-*")) and not (tmp_path / "t" / "manifest.json").exists()
    assert main(words(target, prompts, tmp_path / "t")) == 0
    assert len(rows_of(tmp_path / "t")) == len(TEXTS)


def in_children(jobs: list[Callable[[], int]]) -> list[int]:
    """Exit codes of the jobs, each in a forked process, side by side; minus nine after SIGKILL."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=lambda job=job: os._exit(job())) for job in jobs]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(path: Path, *_: object) -> None:
    path.write_bytes(b"PAR1 and no more")
    die()


def at_call(number: int, function: Callable, then: Callable) -> Callable:
    """`function`, but `then` at its call of this number, from 1."""
    calls: list[int] = []

    def wrapped(*args: object) -> object:
        calls.append(1)
        return then(*args) if len(calls) == number else function(*args)

    return wrapped


def kill_at(moment: str, number: int) -> None:
    """Arrange for this process to be killed."""
    if moment == "inside a write":
        store._write_part = at_call(number, store._write_part, die_half_way)
    elif moment == "after a write":
        store._flush_folder = at_call(number, store._flush_folder, die)
    elif moment == "in the finalise step":
        manifest.write_json = lambda path, value: die_half_way(path.with_name(f".manifest.json.{number}.partial"))
    else:
        signal.signal(signal.SIGALRM, die)
        signal.setitimer(signal.ITIMER_REAL, 0.05 + 0.06 * number)


MOMENTS = [
    *(("inside a write", number) for number in (1, 2, 3, 5)),
    *(("after a write", number) for number in (1, 2, 4, 6)),
    *(("in the finalise step", number) for number in (1, 2)),
    *(("at random", number) for number in range(10)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "moment", "number"), [(n, *moment) for n, moment in enumerate(MOMENTS)])
def test_a_killed_job_loses_doubles_and_spoils_no_sample(
    target: Path, prompts: Path, stub: StubServer, tmp_path: Path, place: int, moment: str, number: int
) -> None:
    def worker(index: int, count: int, killed: bool) -> Callable[[], int]:
        def work() -> int:
            store.COMMIT_SECONDS = 0.0  # every batch is a part
            if killed:
                kill_at(moment, number)
            options = asking(stub, "--temperature", "1", "--shard", f"{index}/{count}")
            return main(words(target, prompts, tmp_path / "t", *options))

        return work

    first = 1 + place % 3
    codes = in_children([worker(index, first, killed=True) for index in range(first)])
    assert set(codes) <= {-9, 0} and (moment == "at random" or -9 in codes)
    second = 1 + (place + 1) % 3
    assert in_children([worker(index, second, killed=False) for index in range(second)]) == [0] * second
    rows = rows_of(tmp_path / "t")
    assert set(rows) == {f"mine/{row}/0" for row in range(len(TEXTS))}
    for _, _, ids, experts in rows.values():
        assert np.array_equal(experts, true_experts(ids, stub.shape))
    asked = len(stub.requests)
    assert main(words(target, prompts, tmp_path / "t", *asking(stub, "--temperature", "1"))) == 0
    assert len(stub.requests) == asked
