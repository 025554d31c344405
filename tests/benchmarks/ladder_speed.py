"""Benchmark: what each footprint source of a replay would gain on the three real targets, its own reading included.

    python -m tests.benchmarks.ladder_speed replay.json

Where weights are read from memory, a source takes of a plain step what its weights are of the step's bytes. The
predictor is the paper's backbone (without embedding and head) with its head over L × E; the draft MLP has width 1,024,
2,048 inside, one block; tables and the last step read next to nothing. α and 𝓔 are those of the replay, γ = 4.

Letters: L MoE layers, E experts, D width of the target's embeddings and of its draft head.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ecospec.inference.replay.modelled_speed import modelled_speedups

GAMMA, WIDTH, INSIDE, BYTES = 4, 1024, 2048, 2  # bf16


@dataclass(frozen=True)
class Real:
    """A target: bytes of a plain step, sizes, and weights of the paper's backbone with its width."""

    step_bytes: float
    L: int
    E: int
    D: int
    backbone: float
    hidden_size: int

    def shares(self) -> dict[str, float]:
        """What each source reads, as a share of a plain step."""
        routed = self.L * self.E
        weights = {
            "predictor": self.backbone + self.D * self.hidden_size + self.hidden_size * routed,
            "draft_mlp": 2 * self.D * WIDTH + 3 * WIDTH * INSIDE + WIDTH * routed,
            "linear": 0.0,  # a table of its tokens' logits can be kept instead
        }
        return {name: BYTES * count / self.step_bytes for name, count in weights.items()}


# Active weights at the checkpoint's types: 22 B in bf16; 37 B in FP8; 1.5 B in bf16 beside experts of 4.25 bits.
REAL = {
    "Qwen3-235B-A22B": Real(44e9, 94, 128, 4096, 0.44e9, 1024),
    "DeepSeek-V3.1": Real(37e9, 58, 256, 7168, 1.31e9, 1536),
    "GPT-OSS-120B": Real(5.0e9, 36, 128, 2880, 0.44e9, 1024),
}


def main(path: str) -> None:
    runs = [run for run in json.loads(Path(path).read_text())["runs"] if run["gamma"] == GAMMA]
    last = [run for run in runs if run["dataset"] == runs[-1]["dataset"] and run["selection"] != "global"]
    print(f"{'':<22}{'α':>8}{'𝓔':>8}", *(f"{name:>18}" for name in REAL))
    for run in last:
        known = run["acceptance_length"], run["active_experts"], run["top_k"]
        shares = {name: real.shares().get(run["footprints"], 0.0) for name, real in REAL.items()}
        gains = [modelled_speedups(*known, share)[name] for name, share in shares.items()]
        print(f"{run['label']:<22}{known[0]:>8.3f}{known[1]:>8.2f}", *(f"{gain:>18.3f}" for gain in gains))


if __name__ == "__main__":
    main(*sys.argv[1:])
