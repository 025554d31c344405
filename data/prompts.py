"""Prompt sets: files in, `Prompt`s out. Knows nothing about tokens or models.

A JSON Lines file has `prompt` in each row and may have `answer` (or `reference`, where there is no `answer`); rows of
several turns list them in `turns`, of which only the first, which `prompt` repeats, is used so far.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ecospec.configs.errors import InputError
from ecospec.configs.schema import PromptConfig


@dataclass(frozen=True)
class Prompt:
    """One question as the target sees it; `row` counts from 0 within its data set's file."""

    sample_id: str
    dataset: str
    row: int
    turn: int
    text: str
    answer: str | None = None


def read_prompts(config: PromptConfig) -> list[Prompt]:
    """The prompts that `config` names, data set by data set, the first `samples` of each.

    Raises InputError, naming file and line, for a missing or empty file, a broken row and an unknown data set.
    """
    if config.samples is not None and config.samples < 1:
        raise InputError(f"--samples {config.samples}: must be at least 1")
    prompts = []
    for dataset, path in _sources(config):
        texts = list(_read_file(path))
        if not texts:
            raise InputError(f"{path}: holds no prompts; write one JSON object with `prompt` on each line")
        for row, text, answer in texts[: config.samples]:
            prompts.append(Prompt(f"{dataset}/{row}/0", dataset, row, 0, text, answer))
    return prompts


def known_datasets(data_dir: str | None = None) -> dict[str, Path]:
    """Data set name → file: the lab's (`lab/maths` to test on, `lab/train/maths` to train on) and those of `data_dir`.

    Raises InputError when `data_dir` is not a folder.
    """
    shipped = Path(str(resources.files("ecospec.data.lab"))) / "prompts"
    datasets = {}
    for path in sorted(shipped.glob("*.jsonl")):
        domain, part, _ = path.name.split(".")
        datasets[f"lab/train/{domain}" if part == "train" else f"lab/{domain}"] = path
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise InputError(f"--data_dir {data_dir}: no such folder")
        datasets |= {path.stem: path for path in sorted(Path(data_dir).glob("*.jsonl"))}
    return datasets


def _sources(config: PromptConfig) -> list[tuple[str, Path]]:
    if config.prompts is not None:
        return [(Path(config.prompts).stem, Path(config.prompts))]
    if not config.datasets:
        raise InputError("no prompts: give --prompts FILE or --datasets NAME,NAME")
    known = known_datasets(config.data_dir)
    for name in config.datasets:
        if name not in known:
            raise InputError(
                f"--datasets {name}: unknown data set (known: {', '.join(known) or 'none'}); --data_dir adds a folder's"
            )
        if config.datasets.count(name) > 1:
            raise InputError(f"--datasets {name}: is listed twice; name it once")
    return [(name, known[name]) for name in config.datasets]


def _read_file(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """(row, prompt, answer) of each line that is not blank; only the newline character ends a line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, IsADirectoryError):
        raise InputError(f"{path}: no such prompt file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for row, (number, line) in enumerate(filled):
        if path.suffix in (".jsonl", ".json"):
            yield row, *_read_row(line, f"{path}, line {number}")
        else:
            yield row, line.removesuffix("\r"), None


def _read_row(line: str, where: str) -> tuple[str, str | None]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error.msg}); mend or remove the line") from None
    prompt = values.get("prompt") if isinstance(values, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f"{where}: the row has no `prompt` text; add it or remove the line")
    answer = values.get("answer") if values.get("answer") is not None else values.get("reference")
    if not isinstance(answer, str | None):
        raise InputError(f"{where}: the answer must be text, not {type(answer).__name__}")
    return prompt, answer
