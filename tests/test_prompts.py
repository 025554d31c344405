"""Prompt files in, prompts out; every kind of bad input is one clear message."""

import json
from pathlib import Path

import pytest

from ecospec.configs.schema import PromptConfig
from ecospec.data.prompts import after, answered, known_datasets, read_prompts
from ecospec.errors import InputError


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def refused(config: PromptConfig) -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(config)
    message = caught.value.as_typed
    assert "\n" not in message
    return message


def test_a_sample_id_is_dataset_row_and_turn(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    prompts = read_prompts(PromptConfig(prompts=str(path)))
    assert [p.sample_id for p in prompts] == ["mine/0/0", "mine/1/0"]
    assert [(p.dataset, p.row, p.turn, p.text) for p in prompts] == [("mine", 0, 0, "a"), ("mine", 1, 0, "b")]


def test_only_a_newline_ends_a_row(tmp_path: Path) -> None:
    texts = ["one\u2028still one", "two\u0085still two", "three\x0cstill three"]
    path = write_rows(tmp_path / "odd.jsonl", [{"prompt": text} for text in texts])
    assert [p.text for p in read_prompts(PromptConfig(prompts=str(path)))] == texts


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert [p.text for p in read_prompts(PromptConfig(prompts=str(path)))] == ["a"]


def test_an_answer_is_answer_or_else_reference(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "x", "reference": "y"}, {"prompt": "b", "reference": "y"}, {"prompt": "c"}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert [p.answer for p in read_prompts(PromptConfig(prompts=str(path)))] == ["x", "y", None]


def test_a_row_keeps_the_id_that_the_user_gave_it(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "id": "mine/ü 1", "question_id": 5},
        {"prompt": "b", "question_id": 81, "turns": ["b", "c"]},
        {"prompt": "d", "id": None, "task_id": "HumanEval/0"},
        {"prompt": "e"},
        {"prompt": "f", "id": 0},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    found = [(p.sample_id, p.source_id) for p in read_prompts(PromptConfig(prompts=str(path)))]
    assert found == [
        ("a/0/0", "mine/ü 1"),
        ("a/1/0", "81"),
        ("a/1/1", "81"),
        ("a/2/0", "HumanEval/0"),
        ("a/3/0", None),
        ("a/4/0", "0"),
    ]
    (tmp_path / "a.txt").write_text("a prompt\n")
    assert [p.source_id for p in read_prompts(PromptConfig(prompts=str(tmp_path / "a.txt")))] == [None]


@pytest.mark.parametrize(("first", "second"), [({"id": "x"}, {"id": "x"}), ({"id": 7}, {"task_id": "7"})])
def test_an_id_that_two_rows_have_is_refused_with_both_lines(tmp_path: Path, first: dict, second: dict) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "a"} | first, {"prompt": "b"}, {"prompt": "a"} | second]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    message = refused(PromptConfig(prompts=str(path), samples=1))
    assert f"{path}, line 1 and {path}, line 5" in message


def test_the_same_id_in_two_files_is_two_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": name, "id": 1}])
    prompts = read_prompts(PromptConfig(datasets=["a", "b"], data_dir=str(tmp_path)))
    assert [(p.dataset, p.source_id) for p in prompts] == [("a", "1"), ("b", "1")]


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"first\r\n\n  second\n")
    assert [p.text for p in read_prompts(PromptConfig(prompts=str(path)))] == ["first", "  second"]


def test_every_text_of_a_file_stays_as_it_is(tmp_path: Path) -> None:
    texts = ["one\rstill one", "a\u2028b\u2029c", "\ttab  ", "日本語 🙂 e\u0301"]
    path = tmp_path / "odd.txt"
    path.write_bytes("\r\n".join(texts).encode())
    assert [p.text for p in read_prompts(PromptConfig(prompts=str(path)))] == texts
    path = write_rows(tmp_path / "odd.jsonl", [{"prompt": f"{text}\r\nmore"} for text in texts])
    assert [p.text for p in read_prompts(PromptConfig(prompts=str(path)))] == [f"{text}\r\nmore" for text in texts]


def test_the_same_text_twice_is_two_samples(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "twins.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    prompts = read_prompts(PromptConfig(prompts=str(path)))
    assert [p.text for p in prompts] == ["a", "b", "a"]
    assert len({p.sample_id for p in prompts}) == 3


def test_every_turn_of_a_row_is_a_sample_that_follows_the_one_before(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "turns": ["a", "b", "c"], "reference_turns": ["x", None, "z"]}, {"prompt": "d"}]
    path = write_rows(tmp_path / "mt.jsonl", rows)
    prompts = read_prompts(PromptConfig(prompts=str(path)))
    assert [(p.sample_id, p.row, p.turn, p.text, p.answer, p.follows) for p in prompts] == [
        ("mt/0/0", 0, 0, "a", "x", None),
        ("mt/0/1", 0, 1, "b", None, "mt/0/0"),
        ("mt/0/2", 0, 2, "c", "z", "mt/0/1"),
        ("mt/1/0", 1, 0, "d", None, None),
    ]
    assert [p.sample_id for p in read_prompts(PromptConfig(prompts=str(path), samples=1))] == [
        "mt/0/0",
        "mt/0/1",
        "mt/0/2",
    ]


def test_a_row_s_own_answer_is_its_first_turn_s(tmp_path: Path) -> None:
    row = {"prompt": "a", "turns": ["a", "b"], "answer": "mine", "reference_turns": ["x", "y"]}
    path = write_rows(tmp_path / "mt.jsonl", [row])
    assert [p.answer for p in read_prompts(PromptConfig(prompts=str(path)))] == ["mine", "y"]


def test_a_later_turn_has_the_whole_conversation_before_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mt.jsonl", [{"prompt": "a", "turns": ["a", "b", "c"]}])
    said, complete = {}, []
    for prompt, answer in zip(read_prompts(PromptConfig(prompts=str(path))), ["x", "", "z"], strict=True):
        complete.append(after(prompt, said))
        said[prompt.sample_id] = answered(complete[-1], answer)
    assert [p.history for p in complete] == [(), ("a", "x"), ("a", "x", "b", "")]
    assert all(after(prompt, {}) is prompt for prompt in complete), "a complete prompt is left alone"


def test_samples_counts_per_data_set_from_its_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(3)])
    prompts = read_prompts(PromptConfig(datasets=["b", "a"], data_dir=str(tmp_path), samples=2))
    assert [p.text for p in prompts] == ["b0", "b1", "a0", "a1"]


def test_prompts_win_over_datasets(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    assert len(read_prompts(PromptConfig(prompts=str(path), datasets=["nonsense"]))) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1]", "no `prompt` text"),
        ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"question": "a"}', "no `prompt` text"),
        ('{"prompt": ""}', "no `prompt` text"),
        ('{"prompt": "a", "answer": 7}', "must be text"),
        ('{"prompt": "a", "turns": ["b", "a"]}', "`turns`"),
        ('{"prompt": "a", "turns": ["a", ""]}', "`turns`"),
        ('{"prompt": "a", "turns": []}', "`turns`"),
        ('{"prompt": "a", "turns": "ab"}', "`turns`"),
        ('{"prompt": "a", "turns": ["a", "b"], "reference_turns": ["x"]}', "`reference_turns`"),
        ('{"prompt": "a", "reference_turns": [7]}', "`reference_turns`"),
        ('{"prompt": "a\\ud800b"}', "surrogate pair"),
        ('{"prompt": "a", "answer": "\\udfff"}', "surrogate pair"),
        ('{"prompt": "a", "id": "\\udfff"}', "surrogate pair"),
        ('{"prompt": "a", "id": true}', "`id`"),
        ('{"prompt": "a", "question_id": 1.5}', "`question_id`"),
        ('{"prompt": "a", "task_id": ["x"]}', "`task_id`"),
    ],
)
def test_a_bad_row_is_named_by_its_line_number(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "good"}\n\n' + line + "\n")
    message = refused(PromptConfig(prompts=str(path)))
    assert f"{path}, line 3" in message
    assert problem in message


def test_a_missing_an_empty_and_a_binary_file_are_refused_by_name(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.txt"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "no such prompt file" in refused(PromptConfig(prompts=str(tmp_path / "absent.jsonl")))
    assert "no such prompt file" in refused(PromptConfig(prompts=str(tmp_path)))
    assert str(empty) in refused(PromptConfig(prompts=str(empty)))
    assert "not UTF-8" in refused(PromptConfig(prompts=str(binary)))


def test_an_unknown_data_set_lists_the_known_ones(tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    message = refused(PromptConfig(datasets=["yours"], data_dir=str(tmp_path)))
    assert "yours" in message and "mine" in message


def test_other_bad_choices_are_refused_with_their_option(tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    assert "--prompts" in refused(PromptConfig())
    assert "--samples" in refused(PromptConfig(datasets=["mine"], data_dir=str(tmp_path), samples=0))
    assert "twice" in refused(PromptConfig(datasets=["mine", "mine"], data_dir=str(tmp_path)))
    assert "--data_dir" in refused(PromptConfig(datasets=["mine"], data_dir=str(tmp_path / "absent")))


def test_the_lab_s_data_sets_are_named_by_domain_and_use() -> None:
    domains = ("maths", "code", "terms", "prose")
    assert set(known_datasets()) == {f"lab/{d}" for d in domains} | {f"lab/train/{d}" for d in domains}
    for name in known_datasets():
        prompts = read_prompts(PromptConfig(datasets=[name]))
        assert len(prompts) >= (100 if "train" in name else 40)
        assert prompts[0].sample_id == f"{name}/0/0"
