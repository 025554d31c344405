"""A target split over two processes (tensor or expert parallel, gloo) decodes the text of a target in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.split_decoding import PLANS, decode

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.usefixtures("both_cores")
@pytest.mark.parametrize("plan", PLANS)
def test_a_split_target_decodes_the_same_text(plan, tiny_target, tmp_path):
    single = decode(AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "tests.split_decoding", str(tiny_target), plan, str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240)
    for process in range(2):
        found = json.loads((tmp_path / f"{process}.json").read_text())
        assert found["processes"] == 2
        assert found["split"] > 10
        assert found["ours"] == found["plain"] == single["ours"] == single["plain"]
        assert found["active"] == single["active"] > 2
        assert found["alpha"] == single["alpha"] > 1.5
