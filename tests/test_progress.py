"""Progress shows what is done and changes nothing."""

import logging
import sys

import pytest

from ecospec.progress import progress


@pytest.mark.parametrize("terminal", [True, False])
def test_every_item_passes_once_and_the_end_is_reported(
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with caplog.at_level(logging.INFO):
        assert list(progress(["a", "b", "c"], "batches")) == ["a", "b", "c"]
    assert ("3/3" in capsys.readouterr().err) == terminal
    assert ("batches: 3 of 3" in caplog.text) != terminal
