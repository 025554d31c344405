"""`ecospec-trace` from the command line: it resumes after any death, and says in one line what is wrong."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import CLIPConfig, PreTrainedConfig, Qwen3Config, T5Config

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import read_traces
from ecospec.errors import InputError
from ecospec.tracing.cli import main
from ecospec.tracing.store import folder as store
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.store.layout import LOCK
from ecospec.tracing.target.loading import weights_hash
from tests.tiny import brute_force_experts, tiny_config, tiny_model, tiny_target_folder, tiny_tokenizer

TEXTS = ["why?", "a somewhat longer prompt, to be padded for", "short", "two words", "the last one of them", "x", "yes"]
SAMPLED = ["--temperature", "1.0", "--top-p", "0.9", "--seed", "3"]

# Runs the command with the process killed at one point; every batch is a part.
DRIVER = """
import os, signal, sys
from pathlib import Path
from ecospec.tracing.store import folder as store, manifest
from ecospec.tracing.cli import main

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after(calls, function):
    def wrapped(*args):
        function(*args)
        wrapped.left -= 1
        return wrapped.left or die()
    wrapped.left = calls
    return wrapped

def die_half_way(path, *_):
    Path(path).write_bytes(b"PAR1 and no more")
    die()

def die_in_second_write(write):
    calls = []
    def wrapped(*args):
        calls.append(args)
        return write(*args) if len(calls) == 1 else die_half_way(*args)
    return wrapped

point, store.COMMIT_SECONDS = sys.argv[1], 0.0
if point == "before the first commit":
    store._write_part = die
elif point == "between commits":
    store._flush_folder = die_after(2, store._flush_folder)
elif point == "inside a write":
    store._write_part = die_in_second_write(store._write_part)
elif point == "in the finalise step":
    manifest.write_json = lambda path, value: die_half_way(path.with_name(".manifest.json.1.partial"))
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": text.upper()}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def command(tiny_target: Path, prompts: Path) -> Callable[..., list[str]]:
    def build(output: Path, *options: str) -> list[str]:
        words = ["run", "--target", str(tiny_target), "--prompts", str(prompts), "--output", str(output)]
        return [*words, "--max-new-tokens", "5", "--batch-size", "2", *options]

    return build


@pytest.fixture(scope="module")
def uninterrupted(command: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    output = tmp_path_factory.mktemp("uninterrupted") / "traces"
    assert main(command(output, *SAMPLED)) == 0
    return rows_of(output)


def rows_of(folder: Path) -> dict[str, tuple]:
    """Key → everything else of the row."""
    check_folder(folder)
    traces = list(read_traces(folder))
    return {
        t.key: (t.sample_id, t.dataset, t.turn, t.split, t.prompt_len, t.input_ids.tolist(), t.experts.tolist())
        for t in traces
    }


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("ecospec-trace: ")]
    assert len(lines) == 1 and "Traceback" not in error
    return lines[0]


def test_a_run_traces_every_prompt_truly(command: Callable, tmp_path: Path) -> None:
    assert main(command(tmp_path / "t")) == 0
    traces = read_traces(tmp_path / "t")
    assert {trace.sample_id for trace in traces} == {f"mine/{row}/0" for row in range(len(TEXTS))}
    assert traces.manifest.moe_layers == [0, 1, 2]
    model, tokenizer = tiny_model("qwen3_moe"), tiny_tokenizer()
    for trace in traces:
        prompt_ids = tokenizer(TEXTS[int(trace.sample_id.split("/")[1])])["input_ids"]
        assert trace.input_ids[: trace.prompt_len].tolist() == prompt_ids
        reference = brute_force_experts(model, trace.input_ids.tolist())
        assert torch.equal(torch.from_numpy(trace.experts.astype("int64")), reference)


def test_teacher_forced_rows_are_prompt_and_answer(command: Callable, tmp_path: Path) -> None:
    assert main(command(tmp_path / "t", "--teacher-force")) == 0
    tokenizer = tiny_tokenizer()
    for trace in read_traces(tmp_path / "t"):
        text = TEXTS[int(trace.sample_id.split("/")[1])]
        assert tokenizer.decode(trace.input_ids) == text + text.upper()
        assert trace.prompt_len == len(text)


def test_a_finished_folder_is_left_alone(
    command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "t")) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    monkeypatch.setattr("ecospec.tracing.job.run.load_target", None)  # no weight is touched
    assert main(command(tmp_path / "t")) == 0
    assert "already complete" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before


def test_another_configuration_is_refused(
    command: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "t")) == 0
    assert main(command(tmp_path / "t", "--seed", "1")) == 2
    assert "generation.seed is 0, not 1" in one_line(capsys)
    assert main(command(tmp_path / "t", "--samples", "3")) == 2
    assert "prompts" in one_line(capsys)


def test_a_retrained_target_is_another_configuration(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    words = ["run", "--target", str(target), "--prompts", str(prompts), "--output", str(tmp_path / "t")]
    tiny_target_folder(target)
    assert main([*words, "--max-new-tokens", "2"]) == 0
    tiny_target_folder(target, seed=1)
    assert main([*words, "--max-new-tokens", "2"]) == 2
    assert "target.weights_sha256" in one_line(capsys)


def test_the_weights_hash_follows_contents_or_for_large_files_names_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashes(content: bytes, name: str = "model.safetensors") -> list[str | None]:
        file = tmp_path / name
        file.write_bytes(content)
        found = []
        for limit in (2**30, 2):
            monkeypatch.setattr("ecospec.tracing.target.loading.HASHED_BYTES", limit)
            found.append(weights_hash(TargetConfig(name=str(tmp_path))))
        file.unlink()
        return found

    first, other, longer, renamed = hashes(b"abc"), hashes(b"abd"), hashes(b"abcd"), hashes(b"abc", "pytorch_model.bin")
    assert first == hashes(b"abc")
    assert first[0] != other[0] and first[1] == other[1]
    assert first[1] != longer[1]
    assert all(one != another for one, another in zip(first, renamed, strict=True))
    assert weights_hash(TargetConfig(name="some/hub-id")) is None
    with pytest.raises(InputError, match="no weights"):
        weights_hash(TargetConfig(name=str(tmp_path)))


def test_a_finished_folder_that_lost_a_part_is_damage_with_a_remedy(
    command: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "t")) == 0
    next((tmp_path / "t").glob("part-*")).unlink()
    assert main(command(tmp_path / "t")) == 1
    assert "delete manifest.json" in one_line(capsys)
    (tmp_path / "t" / "manifest.json").unlink()
    assert main(command(tmp_path / "t")) == 0
    check_folder(tmp_path / "t")


def test_ctrl_c_leaves_a_state_from_which_the_same_command_goes_on(
    command: Callable, uninterrupted: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = tmp_path / "t", store.TraceFolder.commit

    def interrupted(self: store.TraceFolder) -> None:
        commit(self)
        if len(list(folder.glob("part-*"))) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "COMMIT_SECONDS", 0.0)
        patch.setattr(store.TraceFolder, "commit", interrupted)
        assert main(command(folder, *SAMPLED)) == 130
    assert main(["check", str(folder)]) == 1
    assert main(command(folder, *SAMPLED)) == 0
    assert rows_of(folder) == uninterrupted


def test_ctrl_c_keeps_the_batches_that_were_traced_but_not_yet_committed(
    command: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, add = tmp_path / "t", store.TraceFolder.add
    traced = []

    def interrupted(self: store.TraceFolder, rows: list, rejected: list) -> None:
        add(self, rows, rejected)
        traced.extend(row["key"] for row in rows)
        if len(traced) > len(rows):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.TraceFolder, "add", interrupted)  # well before COMMIT_SECONDS
        assert main(command(folder, *SAMPLED)) == 130
    (part,) = folder.glob("part-*")
    assert pq.read_table(part)["key"].to_pylist() == traced


SLOW = pytest.mark.slow
POINTS = {"before the first commit": 0, "between commits": 2, "inside a write": 1, "in the finalise step": 4}


@pytest.mark.parametrize(
    "point", [point if point == "inside a write" else pytest.param(point, marks=SLOW) for point in POINTS]
)
def test_after_a_kill_the_same_command_completes_the_same_rows(
    command: Callable, uninterrupted: dict, tmp_path: Path, point: str
) -> None:
    folder = tmp_path / "t"
    words = [sys.executable, "-c", DRIVER, point, *command(folder, *SAMPLED)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -9
    assert len(list(folder.glob("part-*"))) == POINTS[point]
    assert not (folder / "manifest.json").exists()
    assert main(command(folder, *SAMPLED)) == 0
    assert not list(folder.glob(".part-*"))
    assert rows_of(folder) == uninterrupted


def test_a_failed_write_is_one_line_and_loses_nothing_committed(
    command: Callable,
    uninterrupted: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, write = tmp_path / "t", store._write_part
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def second_write_too_large(path: Path, batches: list) -> None:
        full = bool(list(folder.glob("part-*")))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]) if full else limits)
        try:
            write(path, batches)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(store, "COMMIT_SECONDS", 0.0)
        patch.setattr(store, "_write_part", second_write_too_large)
        assert main(command(folder, *SAMPLED)) == 1
    assert "large" in one_line(capsys)
    assert [path.suffix for path in folder.iterdir() if path.name != LOCK] == [".parquet"]
    assert main(command(folder, *SAMPLED)) == 0
    assert rows_of(folder) == uninterrupted


def test_a_dense_model_is_refused_before_its_weights_load(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Qwen3Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)  # and no weights at all
    assert main(["run", "--target", str(tmp_path), "--prompts", str(prompts), "--output", str(tmp_path / "t")]) == 2
    assert "no routed experts" in one_line(capsys)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("config", [T5Config(d_model=32), CLIPConfig()], ids=["t5", "clip"])
def test_a_folder_of_no_causal_language_model_is_bad_input(
    config: PreTrainedConfig, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.save_pretrained(tmp_path)
    assert main(["run", "--target", str(tmp_path), "--prompts", str(prompts), "--output", str(tmp_path / "t")]) == 2
    assert "not a causal language model" in one_line(capsys)


def test_a_tokenizer_of_another_vocabulary_is_bad_input(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config("qwen3_moe", vocab_size=200, pad_token_id=0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert main(["run", "--target", str(tmp_path), "--prompts", str(prompts), "--output", str(tmp_path / "t")]) == 2
    assert "its tokenizer has 257 tokens but the model only 200" in one_line(capsys)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temprature", "1"], "temprature"),
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "0"], "--top_p"),
        (["--batch-size", "0"], "--batch_size"),
        (["--max-new-tokens", "none"], "max_new_tokens"),
        (["--max-new-tokens", "9999"], "context"),
        (["--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--target", "absent"], "absent"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    command: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(command(tmp_path / "t", *options)) == 2
    assert named in one_line(capsys)


def test_missing_prompts_answers_and_output_are_bad_input(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--target", str(tiny_target)]
    broken, open_ended = tmp_path / "broken.jsonl", tmp_path / "open.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt"\n')
    open_ended.write_text('{"prompt": "a"}\n')
    assert main([*words, "--output", str(tmp_path / "t")]) == 2
    assert "--prompts" in one_line(capsys)
    assert main([*words, "--prompts", str(open_ended)]) == 2
    assert "--output" in one_line(capsys)
    assert main([*words, "--prompts", str(broken), "--output", str(tmp_path / "t")]) == 2
    assert f"{broken}, line 2" in one_line(capsys)
    assert main([*words, "--prompts", str(open_ended), "--teacher-force", "--output", str(tmp_path / "t")]) == 2
    assert "open/0/0" in one_line(capsys)


def test_check_and_export_answer_with_their_exit_codes(
    command: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "t", tmp_path / "sql"
    assert main(["check", str(folder)]) == 2
    assert "no such folder" in one_line(capsys)
    assert main(command(folder)) == 0
    assert main(["check", str(folder)]) == 0
    assert "sound; 7 samples" in capsys.readouterr().out
    assert main(["export", str(folder)]) == 2
    assert "--output" in one_line(capsys)
    assert main(["export", str(folder), "--output", str(output)]) == 0
    assert main(["export", str(folder), "--output", str(output)]) == 2
    assert "--overwrite" in one_line(capsys)
    assert main(["export", str(folder), "--output", str(output), "--overwrite"]) == 0
    next(folder.glob("part-*")).unlink()
    assert main(["check", str(folder)]) == 1
    assert "missing" in one_line(capsys)


def test_help_answers_without_loading_torch() -> None:
    code = "import sys\nfrom ecospec.tracing.cli import main\ntry: main(['run', '--help'])\n"
    code += "finally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--max_new_tokens" in result.stdout
    assert result.stdout.endswith("False\n")
