"""Peak memory of the objective, in a process of its own whose other memory is known.

    python -m tests.loss_memory loss,overlap,whole B T L E

Runs one after the other, and prints after each the peak so far beyond inputs, hidden states and gradients, in chunks
(the logits of `CHUNK_TOKENS` tokens). `whole` is the loss with all logits at once. Reads Linux's own account.

Letters: B batch, T tokens, L MoE layers, E experts, K experts per token, H hidden width.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ecospec.data.module import Batch
from ecospec.predictor.objective.loss import CHUNK_TOKENS, batch_loss, expert_loss
from ecospec.predictor.objective.overlap import Overlap
from tests.halves import ReadsTokens

H, K = 64, 8
ROOT = Path(__file__).resolve().parent.parent


class Halves(ReadsTokens, nn.Module):
    """A predictor whose backbone is a table."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__()
        self.table, self.sizes = nn.Embedding(64, H), (num_layers, num_experts)
        self.head = nn.Linear(H, num_layers * num_experts)

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float().unflatten(-1, self.sizes)


def padded_batch(B: int, T: int, L: int, E: int) -> Batch:
    """Random ids; every other sample is a tenth shorter."""
    first_K = torch.arange(K) * (E // K)
    experts = (first_K + torch.randint(E // K, (B, 1, L, K))).to(torch.uint8).repeat(1, T, 1, 1)
    lengths = T - torch.arange(B) % 2 * (T // 10)
    ids = torch.randint(64, (B, T))
    return Batch(ids, experts, lengths, torch.ones(B, dtype=torch.int64), ("",) * B)


def whole_loss(predictor: Halves, batch: Batch) -> torch.Tensor:
    real_BT = batch.tokens()
    return expert_loss(predictor.logits(predictor.hidden(batch.input_ids))[real_BT], batch.experts[real_BT])


@torch.no_grad()
def overlap(predictor: Halves, batch: Batch) -> None:
    Overlap().update(predictor, batch)


RUNS = {
    "loss": lambda *given: batch_loss(*given).backward(),
    "overlap": overlap,
    "whole": lambda *given: whole_loss(*given).backward(),
}


def peak_bytes() -> int:
    """The most that was ever resident in this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def peaks(names: str, *sizes: int) -> list[float]:
    """What is printed, by a fresh process in which what is freed is given back to the system at once."""
    command = [sys.executable, "-m", "tests.loss_memory", names, *map(str, sizes)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    return [float(line) for line in run.stdout.split()]


def main(names: str, *sizes: str) -> None:
    torch.set_num_threads(1)
    B, T, L, E = map(int, sizes)
    predictor = Halves(L, E)
    for name in names.split(","):
        RUNS[name](predictor, padded_batch(1, 2, L, E))  # gradients, and what PyTorch loads on first use
    batch = padded_batch(B, T, L, E)
    before, known = peak_bytes(), 4 * (4 * B * T * H + predictor.head.weight.numel())
    for name in names.split(","):
        RUNS[name](predictor, batch)
        sys.stdout.write(f"{(peak_bytes() - before - known) / (4 * CHUNK_TOKENS * L * E):.2f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
