"""Prompt sets: files and benchmarks in, `Prompt`s out. Knows nothing about tokens or models.

A JSON Lines file has `prompt` in each row and may have `answer` (or `reference`, where there is no `answer`); rows of
several turns list them in `turns`, of which `prompt` repeats the first, and may give `reference_turns`, an answer (or
null) for each. A row's own name is its `id` (or `question_id`, or `task_id`), a text or a whole number, which no other
row of the file has. A benchmark's questions come in its own template, and their answers are the `reference` alone.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ecospec.configs.schema import PromptConfig
from ecospec.data.benchmarks import BENCHMARKS, Benchmark, hub_rows
from ecospec.data.lab import LAB, shipped
from ecospec.errors import InputError, brief

TRAIN_PERCENT = 80
ID_KEYS = ("id", "question_id", "task_id")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One question as the target sees it; `row` counts from 0 within its data set's file.

    `chat`: its data set is made for a chat template. A later turn `follows` the sample of the turn before, and has no
    `history` (question, answer, question, answer, …) until `after` gives it one. `source_id` is the name that the row
    has in the user's own data, where it has one; all turns of the row share it.
    """

    sample_id: str
    dataset: str
    row: int
    turn: int
    text: str
    answer: str | None = None
    chat: bool = False
    follows: str | None = None
    history: tuple[str, ...] = ()
    source_id: str | None = None


def split_of(dataset: str, row: int) -> Literal["train", "test"]:
    """`train` for 80 % of the rows, else `test`: by sha256 of `dataset/row`, so that all turns fall together."""
    digest = hashlib.sha256(f"{dataset}/{row}".encode()).hexdigest()
    return "train" if int(digest, 16) % 100 < TRAIN_PERCENT else "test"


def answered(prompt: Prompt, answer: str) -> tuple[str, ...]:
    """The conversation up to this answer: the history of the turn that follows `prompt`."""
    return (*prompt.history, prompt.text, answer)


def after(prompt: Prompt, said: Mapping[str, tuple[str, ...]]) -> Prompt:
    """`prompt` with its history from `said`: by sample id, what `answered` made of each earlier turn.

    A first turn, and one that has its history, is returned as it is.
    """
    if prompt.follows is None or prompt.history:
        return prompt
    return replace(prompt, history=said[prompt.follows])


def read_prompts(config: PromptConfig) -> list[Prompt]:
    """The prompts that `config` names, data set by data set: the first `samples` rows of each, all turns of a row.

    Raises InputError, naming file and line, for a missing or empty file, a broken row and an unknown data set, and
    naming the hub's data set where a benchmark is neither in `data_dir` nor within reach.
    """
    if config.samples is not None and config.samples < 1:
        raise InputError(f"--samples {config.samples}: must be at least 1")
    return [
        prompt
        for dataset, rows, chat in _sources(config)
        for number, row in enumerate(rows[: config.samples])
        for prompt in _turns(dataset, number, row, chat)
    ]


def known_datasets(data_dir: str | None = None) -> dict[str, Path]:
    """Data set name → file: the lab's (`lab/maths` to test on, `lab/train/maths` to train on) and those of `data_dir`.

    Raises InputError when `data_dir` is not a folder.
    """
    datasets = {}
    for path in sorted(shipped(LAB, "prompts").glob("*.jsonl")):
        domain, part, _ = path.name.split(".")
        datasets[f"lab/train/{domain}" if part == "train" else f"lab/{domain}"] = path
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise InputError(f"--data_dir {data_dir}: no such folder")
        datasets |= {path.stem: path for path in sorted(Path(data_dir).glob("*.jsonl"))}
    return datasets


@dataclass(frozen=True)
class _Row:
    """The turns of one row, and an answer or None for each."""

    texts: tuple[str, ...]
    answers: tuple[str | None, ...]
    source_id: str | None = None


def _turns(dataset: str, number: int, row: _Row, chat: bool) -> Iterator[Prompt]:
    follows = None
    for turn, (text, answer) in enumerate(zip(row.texts, row.answers, strict=True)):
        prompt = Prompt(
            sample_id=f"{dataset}/{number}/{turn}",
            dataset=dataset,
            row=number,
            turn=turn,
            text=text,
            answer=answer,
            chat=chat,
            follows=follows,
            source_id=row.source_id,
        )
        follows = prompt.sample_id
        yield prompt


def _sources(config: PromptConfig) -> Iterator[tuple[str, list[_Row], bool]]:
    """(name, rows, whether they are chat) of each data set asked for; all names are checked before anything is read."""
    if config.prompts is not None:
        yield Path(config.prompts).stem, _file_rows(Path(config.prompts)), False
        return
    if not config.datasets:
        raise InputError("no prompts: give --prompts FILE or --datasets NAME,NAME")
    known = known_datasets(config.data_dir)
    for name in config.datasets:
        if name not in known | BENCHMARKS:
            names = ", ".join([*BENCHMARKS, *known])
            raise InputError(f"--datasets {name}: unknown data set (known: {names}); --data_dir adds a folder's")
        if config.datasets.count(name) > 1:
            raise InputError(f"--datasets {name}: is listed twice; name it once")
    for name in config.datasets:
        if name in BENCHMARKS:
            yield name, _benchmark_rows(name, BENCHMARKS[name], known, config.data_dir), BENCHMARKS[name].chat
        else:
            yield name, _file_rows(known[name]), False


def _benchmark_rows(name: str, benchmark: Benchmark, known: Mapping[str, Path], data_dir: str | None) -> list[_Row]:
    """Its questions in its template, worked examples before them."""
    if benchmark.notice and name not in known:
        log.info("%s: %s", name, benchmark.notice)
    file = benchmark.stand_in if name not in known and benchmark.stand_in in known else name
    rows = _split_rows(benchmark, benchmark.split, file, known, data_dir)
    shown = ""
    if benchmark.shots:
        examples = _split_rows(benchmark, "train", f"{name}_train", known, data_dir)
        if len(examples) <= max(benchmark.shots):
            raise InputError(f"{name}_train: has {len(examples)} rows, {name} shows row {max(benchmark.shots)}")
        shown = "".join(_example(benchmark, examples[shot]) for shot in benchmark.shots)
    return [replace(row, texts=tuple(shown + benchmark.ask(text) for text in row.texts)) for row in rows]


def _example(benchmark: Benchmark, row: _Row) -> str:
    return f"{benchmark.ask(row.texts[0])} {row.answers[0]}\n\n"


def _split_rows(
    benchmark: Benchmark, split: str, file: str, known: Mapping[str, Path], data_dir: str | None
) -> list[_Row]:
    """Rows of a split: from the data folder's `file`.jsonl, or else from the hub."""
    if file in known:
        return _file_rows(known[file], ("reference",))
    try:
        rows = hub_rows(benchmark, split)
    except InputError as error:
        sought = f"is not in --data_dir {data_dir}" if data_dir else "no --data_dir was given to look in"
        raise InputError(f"{file}.jsonl: {sought}, and {error}; put it in a folder and give --data_dir") from None
    return _rows(((f"{benchmark.source(split)}, row {n}", row) for n, row in enumerate(rows)), ("reference",))


def _file_rows(path: Path, answers: tuple[str, ...] = ("answer", "reference")) -> list[_Row]:
    """Each line that is not blank; only the newline character ends a line."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: no such prompt file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    filled = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise InputError(f"{path}: holds no prompts; write one JSON object with `prompt` on each line")
    if path.suffix.lower() not in (".jsonl", ".json"):
        return [_Row((line.removesuffix("\r"),), (None,)) for _, line in filled]
    return _rows(((where, _parsed(line, where)) for where, line in filled), answers)


def _rows(found: Iterable[tuple[str, object]], answer_keys: tuple[str, ...]) -> list[_Row]:
    """The rows of one file, given where each stands and its values. Raises InputError where two have the same id."""
    rows, places = [], {}
    for where, values in found:
        row = _row(values, where, answer_keys)
        if row.source_id is not None and row.source_id in places:
            raise InputError(f"{places[row.source_id]} and {where}: both have the id {row.source_id}; rename one")
        places[row.source_id] = where
        rows.append(row)
    return rows


def _parsed(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({brief(error)}); mend or remove the line") from None


def _row(values: object, where: str, answer_keys: tuple[str, ...]) -> _Row:
    """The row's turns; the first one's answer is the first of `answer_keys` that is there."""
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"{where}: the row has no `prompt` text; add it or remove the line")
    turns = [prompt] if values.get("turns") is None else values["turns"]
    if not _are_texts(turns) or not all(turns) or turns[:1] != [prompt]:
        raise InputError(f"{where}: `turns` must be a list of texts of which `prompt` is the first; mend it")
    answer = next((values[key] for key in answer_keys if values.get(key) is not None), None)
    if not isinstance(answer, str | None):
        raise InputError(f"{where}: the answer must be text, not {type(answer).__name__}")
    references = [None] * len(turns) if values.get("reference_turns") is None else values["reference_turns"]
    if not _are_texts(references, str | None) or len(references) != len(turns):
        raise InputError(f"{where}: `reference_turns` must be a list of a text or null for each turn; mend it")
    answers = (references[0] if answer is None else answer, *references[1:])
    source_id = _source_id(values, where)
    if any("\ud800" <= character <= "\udfff" for text in (*turns, *answers, source_id) for character in text or ""):
        raise InputError(
            f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text; mend the line"
        )
    return _Row(tuple(turns), answers, source_id)


def _source_id(values: dict, where: str) -> str | None:
    """The row's own name as text: the first of `ID_KEYS` that is there."""
    key = next((key for key in ID_KEYS if values.get(key) is not None), None)
    if key is None:
        return None
    if not isinstance(values[key], str | int) or isinstance(values[key], bool):
        raise InputError(f"{where}: `{key}` must be a text or a whole number, not {type(values[key]).__name__}")
    return str(values[key])


def _are_texts(values: object, kind: type = str) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
