"""One thread and no network for every test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3-MoE model (3 MoE layers, 8 experts, top-2) and a byte tokenizer."""
    from tests.tiny import tiny_target_folder

    return tiny_target_folder(tmp_path_factory.mktemp("target"))
