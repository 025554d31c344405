"""Where the hub does not answer, its cache is used at once, and what is not there is named without a wait."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants

from ecospec.configs.schema import PromptConfig, TargetConfig
from ecospec.data.prompts import read_prompts
from ecospec.errors import InputError
from ecospec.hub import hub_or_cache, is_hub_name
from ecospec.inference.drafters.draft_lm.head import inspect_language_model
from ecospec.predictor.kinds.predictor.backbone import backbone_config
from ecospec.predictor.kinds.predictor.config import BackboneConfig
from ecospec.tracing.target.loading import load_target_config, load_tokenizer
from ecospec.tracing.target.names import part_folder
from tests.tiny import tiny_config, tiny_tokenizer

NAME = "nobody/nothing"
LOOKUPS: dict[str, Callable[[], object]] = {
    "configuration": lambda: load_target_config(TargetConfig(name=NAME)),
    "tokenizer": lambda: load_tokenizer(TargetConfig(name=NAME), 10),
    "drafter": lambda: part_folder(NAME, "drafter"),
    "draft model": lambda: inspect_language_model(NAME, 10, tiny_tokenizer()),
    "backbone": lambda: backbone_config(BackboneConfig(path=NAME)),
    "benchmark": lambda: read_prompts(PromptConfig(datasets=["aime25"])),
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's cache, empty; the hub itself refuses every connection, and waiting to ask again is an error."""

    def wait(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        monkeypatch.setattr(time, "sleep", wait)
        yield tmp_path / "hub"


@pytest.mark.parametrize("what", LOOKUPS)
def test_an_unreachable_hub_is_said_at_once(offline: Path, what: str) -> None:
    with pytest.raises(InputError, match=r"the hub \(http://127\.0\.0\.1:\d+\) does not answer") as caught:
        LOOKUPS[what]()
    assert ("math-ai/aime25" if what == "benchmark" else NAME) in str(caught.value)
    assert not constants.is_offline_mode(), "the library is left as it was"


def test_what_is_cached_is_read_without_the_hub(offline: Path) -> None:
    folder = offline / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    for part in (tiny_config("qwen3_moe"), tiny_tokenizer()):
        part.save_pretrained(folder / "snapshots" / "c0ffee")
    assert load_target_config(TargetConfig(name=NAME)).num_experts == 8
    assert len(load_tokenizer(TargetConfig(name=NAME), 264)) == 257
    assert part_folder(NAME, "drafter") == folder / "snapshots" / "c0ffee"
    assert json.loads((part_folder(NAME, "drafter") / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("ecospec.hub._answers", lambda: True)
    with pytest.raises(OSError, match="as the library says"), hub_or_cache(NAME):
        assert not constants.is_offline_mode()
        raise OSError("as the library says")


@pytest.mark.parametrize(
    ("name", "expected"), [("gpt2", True), ("a/b-1.0", True), ("/a/b", False), ("a/b/c", False), ("../b", False)]
)
def test_a_hub_name_is_one_or_two_words_and_no_folder(tmp_path: Path, name: str, expected: bool) -> None:
    assert is_hub_name(name) == expected
    assert not is_hub_name(tmp_path)
