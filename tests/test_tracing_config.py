"""Keys of `ecospec-trace` that make no sense are named before anything is done."""

import pytest

from ecospec.configs.cli import parse
from ecospec.errors import InputError
from ecospec.tracing.config import TraceConfig


def test_engine_keys_have_short_forms_and_sane_values() -> None:
    words = ["--engine", "vllm", "--url", "http://a:8000,http://b:8000", "--engine.in_flight", "8"]
    engine = parse("ecospec-trace run", TraceConfig, words)[0].engine
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
    with pytest.raises(InputError, match=named):
        parse("ecospec-trace run", TraceConfig, words)
