"""Keys of `ecospec-trace` that make no sense are named before anything is done."""

from pathlib import Path

import pytest

from ecospec.configs.cli import parse
from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError
from ecospec.tracing.cli import SUBCOMMANDS, main
from ecospec.tracing.config import RunConfig
from ecospec.tracing.target.loading import load_target_config, shape_of
from tests.config_reads import assert_all_read, watch_reads
from tests.vllm_stub import StubServer


def test_engine_keys_have_short_forms_and_sane_values() -> None:
    words = ["--engine", "vllm", "--url", "http://a:8000,http://b:8000", "--engine.in_flight", "8"]
    engine = parse("ecospec-trace run", RunConfig, words)[0].engine
    assert (engine.kind, engine.url, engine.in_flight) == ("vllm", ["http://a:8000", "http://b:8000"], 8)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--engine", "vllm"], "--engine.url"),
        (["--url", "http://a:1"], "--engine vllm"),
        (["--engine", "vllm", "--url", "a:8000"], "--engine.url a:8000"),
        (["--engine.timeout", "0"], "--engine.timeout 0.0"),
        (["--engine.in_flight", "0"], "--engine.in_flight 0"),
        (["--engine.retries", "-1"], "--engine.retries -1"),
    ],
)
def test_a_senseless_engine_key_is_named(words: list[str], named: str) -> None:
    with pytest.raises(InputError) as error:
        parse("ecospec-trace run", RunConfig, words)
    assert named in error.value.as_typed


def test_each_subcommand_knows_only_keys_that_it_reads(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = watch_reads(monkeypatch)
    prompts, folder = tmp_path / "mine.jsonl", str(tmp_path / "t")
    prompts.write_text('{"prompt": "a"}\n')
    words = ["run", "--target", str(tiny_target), "--max-new-tokens", "2"]
    assert main([*words, "--prompts", str(prompts), "--output", folder]) == 0
    words += ["--datasets", "mine", "--data-dir", str(tmp_path), "--output", str(tmp_path / "v")]
    with StubServer(shape_of(load_target_config(TargetConfig(name=str(tiny_target))))) as stub:
        assert main([*words, "--engine", "vllm", "--url", stub.url]) == 0
    assert main(["check", folder]) == 0
    assert main(["stats", folder, "--output", str(tmp_path / "stats")]) == 0
    assert main(["export", folder, "--output", str(tmp_path / "sql")]) == 0
    for subcommand in SUBCOMMANDS:
        assert_all_read(SUBCOMMANDS, subcommand.name, reads)
