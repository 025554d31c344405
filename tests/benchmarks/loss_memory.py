"""Benchmark: peak memory of the objective, forward and backward, at 16 × 1,024 tokens, 94 layers × 128 experts.

    python -m tests.benchmarks.loss_memory [samples]

Prints for the loss in chunks, for held-out overlap, and for the loss on all logits at once what each takes beyond
inputs, hidden states and gradients, in a process of its own; the first must keep its stated bound.
"""

import sys

from ecospec.predictor.objective.loss import CHUNK_TOKENS, LOSS_CHUNKS
from tests.loss_memory import peaks

T, L, E = 1024, 94, 128
MIB_PER_CHUNK = 4 * CHUNK_TOKENS * L * E / 2**20


def main(samples: str = "16") -> int:
    print(f"{samples} × {T} tokens × {L} layers × {E} experts; bound of the loss {LOSS_CHUNKS * MIB_PER_CHUNK:.0f} MiB")
    found = {name: peaks(name, int(samples), T, L, E)[0] for name in ("loss", "overlap", "whole")}
    for name, chunks in found.items():
        print(f"{name:<8} {chunks * MIB_PER_CHUNK:7.0f} MiB  {chunks:5.1f} chunks of logits")
    return int(found["loss"] > LOSS_CHUNKS)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
