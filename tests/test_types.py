"""Type checkers see through the package: types resolve for a user whose script lies outside the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_repository import ROOT

SCRIPT = """\
from ecospec.inference import EcoSpecDecoder, generate, select
reveal_type(EcoSpecDecoder.from_pretrained("lab"))
reveal_type(generate)
reveal_type(select)
from ecospec.inference import absent
"""


@pytest.mark.slow  # half a minute: mypy reads torch and Transformers
def test_a_user_script_outside_the_repository_knows_the_types_of_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "user.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # as site-packages: only because of py.typed are types read
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    revealed = re.findall(r'^user\.py:(\d): note: Revealed type is "(.*)"$', found, re.MULTILINE)
    assert [line for line, _ in revealed] == ["2", "3", "4"], found
    decoder, generate, select = (kind for _, kind in revealed)
    assert decoder == "ecospec.inference.api.EcoSpecDecoder"
    assert generate.startswith(
        "def (model: torch.nn.modules.module.Module, input_ids: torch._tensor.Tensor, *, drafter"
    )
    assert re.match(r"def \(tree: .*, footprints: .*, policy: str, gamma: int, .*\) -> ", select)
    (error,) = re.findall(r"^user\.py:\d+: error: (.*)$", found, re.MULTILINE)
    assert 'Module "ecospec.inference" has no attribute "absent"' in error
