"""For every test: one thread, no network, and this checkout imported, also by the commands that a test starts."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3-MoE model (3 MoE layers, 8 experts, top-2) and a byte tokenizer."""
    from tests.tiny import tiny_target_folder

    return tiny_target_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture
def both_cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests that start several processes: no two of them run at once, whichever workers they are on."""
    with (tmp_path_factory.getbasetemp().parent / "both_cores").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
