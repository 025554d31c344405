"""The seven benchmarks are asked as the paper's Appendix E says, from a folder or from the hub alike."""

import dataclasses
import json
import logging
from pathlib import Path

import datasets
import pytest

from ecospec.configs.schema import PromptConfig
from ecospec.data import benchmarks
from ecospec.data.benchmarks import BENCHMARKS
from ecospec.data.prompts import Prompt, read_prompts
from ecospec.errors import InputError

QUESTION = "What is {prompt} in $\\frac{1}{2}$?\r\nSay\u2028why."
SHOWN = [f"train question {row}" for row in range(5)]
EXAMPLES = "".join(f"Question: {question}\nAnswer: because {question}\n\n" for question in SHOWN)
ASKED = {
    "humaneval": QUESTION,
    "mmstar_text": QUESTION,
    "mt_bench": QUESTION,
    "amc22_24": f"Problem:\n{QUESTION}\n\nSolution:",
    "gsm8k": f"{EXAMPLES}Question: {QUESTION}\nAnswer:",
    "aime25": f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "math500": f"Problem:\n{QUESTION}\n\nSolution:",
}
CHAT = {"mmstar_text", "mt_bench", "aime25"}
EVERY = pytest.mark.parametrize("name", sorted(BENCHMARKS))


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_rows(question: str, answer: str) -> list[dict]:
    return [{question: text, answer: f"because {text}"} for text in SHOWN]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every benchmark as `NAME.jsonl`, AMC under the years that it has."""
    for name, benchmark in BENCHMARKS.items():
        row = {"prompt": QUESTION, "answer": "short", "reference": "worked"}
        if name == "mt_bench":
            row |= {"turns": [QUESTION, "And then?"], "reference_turns": ["worked", "more"]}
        if benchmark.row_id:
            row |= {"id": f"{name}/7"}
        write_rows(tmp_path / f"{benchmark.stand_in or name}.jsonl", [row, {"prompt": "plain"}])
    write_rows(tmp_path / "gsm8k_train.jsonl", train_rows("prompt", "reference"))
    return tmp_path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every benchmark as `load_dataset` finds it, in a folder of its own that stands for the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, benchmark in BENCHMARKS.items():
        question, answer = benchmark.question, benchmark.answer
        several = {question: [QUESTION, "And then?"], answer: ["worked", "more"]}
        row = several if name == "mt_bench" else {question: QUESTION, answer: "worked"}
        row |= {benchmark.row_id: f"{name}/7"} if benchmark.row_id else {}
        where = tmp_path / "hub" / name
        if benchmark.shots:
            write_rows(where / "train.jsonl", train_rows(question, answer))
        write_rows(where / f"{benchmark.split}.jsonl", [row | {"unused": 1}])
        files = [{"split": path.stem, "path": path.name} for path in where.glob("*.jsonl")]
        card = {"configs": [{"config_name": benchmark.config or "default", "data_files": files}]}
        (where / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
        monkeypatch.setitem(benchmarks.BENCHMARKS, name, dataclasses.replace(benchmark, hub=str(where)))
    return tmp_path / "hub"


def read(name: str, data_dir: Path | None = None) -> list[Prompt]:
    return read_prompts(PromptConfig(datasets=[name], data_dir=data_dir and str(data_dir)))


def refused(name: str, data_dir: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        read(name, data_dir)
    assert "\n" not in caught.value.as_typed
    return caught.value.as_typed


def test_the_seven_are_known_by_name() -> None:
    assert set(BENCHMARKS) == set(ASKED)


@EVERY
def test_a_question_is_put_in_its_benchmarks_template(name: str, folder: Path) -> None:
    prompts = read(name, folder)
    assert prompts[0].text == ASKED[name]
    assert prompts[0].sample_id == f"{name}/0/0"
    assert {prompt.chat for prompt in prompts} == {name in CHAT}


@EVERY
def test_the_answer_is_the_worked_one_or_none(name: str, folder: Path) -> None:
    assert [prompt.answer for prompt in read(name, folder) if prompt.turn == 0] == ["worked", None]


@EVERY
def test_the_hub_gives_what_the_folder_gives(name: str, folder: Path, hub: Path) -> None:
    local = [prompt for prompt in read(name, folder) if prompt.row == 0]
    assert read(name) == local
    assert read(name, hub) == local, "a folder without the benchmark leaves it to the hub"


def test_both_turns_of_mt_bench_are_read(folder: Path) -> None:
    first, second, alone = read("mt_bench", folder)
    assert (second.text, second.answer, second.follows) == ("And then?", "more", first.sample_id)
    assert alone.follows is None


@EVERY
def test_all_turns_of_a_question_have_its_id_where_the_benchmark_gives_one(name: str, folder: Path, hub: Path) -> None:
    expected = {None if name == "gsm8k" else f"{name}/7"}
    assert {prompt.source_id for prompt in read(name, folder) if prompt.row == 0} == expected
    assert {prompt.source_id for prompt in read(name)} == expected


def test_other_names_of_the_folder_are_used_as_they_are(folder: Path) -> None:
    (first, _) = read("amc22_23", folder)
    assert (first.text, first.answer, first.chat) == (QUESTION, "short", False)


def test_the_absent_year_is_said_unless_the_file_is_the_user_s_own(
    folder: Path, hub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for source in (folder, None):
        caplog.clear()
        read("amc22_24", source)
        assert "2024 are absent" in caplog.text
    caplog.clear()
    write_rows(folder / "amc22_24.jsonl", [{"prompt": "all years"}])
    assert read("amc22_24", folder)[0].text == "Problem:\nall years\n\nSolution:"
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "text"), [(142.0, "142"), (7, "7"), (0.5, "0.5"), (1234567.0, "1234567"), ("x", "x")]
)
def test_an_answer_that_is_a_number_becomes_its_text(hub: Path, given: object, text: str) -> None:
    write_rows(hub / "amc22_24" / "train.jsonl", [{"problem": "a", "answer": given}])
    assert read("amc22_24")[0].answer == text


def test_a_conversation_without_references_has_no_answers(hub: Path) -> None:
    write_rows(hub / "mt_bench" / "train.jsonl", [{"prompt": ["a", "b"], "reference": []}])
    assert [prompt.answer for prompt in read("mt_bench")] == [None, None]


@EVERY
def test_out_of_reach_both_places_are_named(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "other.jsonl", [{"prompt": "a"}])
    for message in (refused(name), refused(name, tmp_path)):
        assert f"{BENCHMARKS[name].hub} (" in message and f"split {BENCHMARKS[name].split}" in message
        assert f"{name}.jsonl" in message and "--data_dir" in message


def test_without_its_examples_gsm8k_is_refused(folder: Path) -> None:
    write_rows(folder / "gsm8k_train.jsonl", train_rows("prompt", "reference")[:4])
    assert "has 4 rows" in refused("gsm8k", folder)
    (folder / "gsm8k_train.jsonl").unlink()
    message = refused("gsm8k", folder)
    assert "gsm8k_train.jsonl" in message and "split train" in message


def test_a_hub_set_without_the_field_is_refused(hub: Path) -> None:
    write_rows(hub / "aime25" / "test.jsonl", [{"problem": "a"}])
    assert "no field answer" in refused("aime25")
    write_rows(hub / "math500" / "test.jsonl", [{"problem": "", "solution": "b"}])
    assert "row 0" in refused("math500")
