"""The front leaves a user's own process alone, and Ctrl-C is one line from the first moment on."""

import subprocess
import sys

import pytest

USERS_OWN_PARSER = """
import io
from dataclasses import dataclass
import jsonargparse

@dataclass
class Mine:
    size: int = 1
    \"\"\"a docstring below a field\"\"\"

def help_text():
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(Mine)
    text = io.StringIO()
    parser.print_help(text)
    return text.getvalue()

before = help_text()
assert "below a field" not in before
import ecospec.inference.api, ecospec.inference.assemble, ecospec.tracing.target.loading
assert help_text() == before, "importing the Python API changed it"
from ecospec.tracing.cli import main
assert main(["check", "--threads", "3"]) == 2
assert help_text() == before, "running a command changed it"
"""

INTERRUPTED = """
import os, signal, sys

_, awaited, command, *words = sys.argv

class Interrupt:
    def find_spec(self, module, path=None, target=None):
        if module == awaited:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from ecospec import commands
sys.argv[1:] = words
sys.exit(getattr(commands, command)())
"""


CHECK = ["check", "--config", "lab/decode"]


def test_neither_the_python_api_nor_a_command_changes_a_users_own_parsers(tmp_path):
    program = tmp_path / "program.py"  # a file, as docstrings of fields are read from source
    program.write_text(USERS_OWN_PARSER)
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("loading", "command", "words"),
    [
        ("ecospec.tracing.cli", "trace", ["run"]),
        ("ecospec.predictor.cli", "train", ["predictor"]),
        ("jsonargparse", "decode", ["check"]),
        ("torch", "trace", ["run"]),
        pytest.param("torch.nn", "decode", ["check", "--config", "lab/decode"], marks=pytest.mark.slow),
        pytest.param(
            "transformers.modeling_utils", "decode", ["check", "--config", "lab/decode"], marks=pytest.mark.slow
        ),
    ],
)
def test_an_interrupt_while_modules_load_is_one_line_and_exit_code_130(loading, command, words):
    program = [sys.executable, "-c", INTERRUPTED, loading, command, *words]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (130, f"ecospec-{command}: interrupted\n")
