"""The script for a GPU also runs on a CPU, small, so that it is known to work when a GPU is there."""

import json
import subprocess
import sys

import pytest

from tests.test_repository import ROOT


@pytest.mark.slow
def test_the_script_finds_every_family_lossless_and_fits_the_cost_of_experts(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.check_decoding", "--device", "cpu", "--small"]
    subprocess.run([*command, "--output", tmp_path / "out.json"], check=True, cwd=ROOT, capture_output=True)
    results = json.loads((tmp_path / "out.json").read_text())
    exact = [case for case in results["lossless"] if case["dtype"] == "torch.float32"]
    assert len(exact) == 3 and all(case["texts"] == ["exact"] * 3 for case in exact)
    for implementation in ("grouped_mm", "eager"):
        assert results[implementation]["verify_fit"]["r2"] <= 1.0
        assert results[implementation]["step_ms"]["speculative"]["draft"] > 0
