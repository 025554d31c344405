"""One of the processes that share a traced target: `torchrun tests/split_tracing.py TARGET KIND OUTPUT`.

KIND is `tp` (weights split) or `ep` (experts split), or `replicas` (each process has the whole model). Traces texts,
forced and generated, and writes what it recorded to OUTPUT/<process number>.npz.
"""

import os
import sys
from pathlib import Path

import numpy as np
from torch import distributed
from torch.distributed.tensor import DTensor

from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt
from ecospec.tracing.job.engine import Sampling, TransformersEngine
from ecospec.tracing.job.validation import Routed
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.replicas import replica_of
from ecospec.tracing.target.requests import Request

LENGTHS = (3, 17, 9)


def record(config: TargetConfig) -> dict[str, np.ndarray]:
    """Ids and experts of three forced and three generated texts, and how many weights are split."""
    target = load_target(config)
    engine = TransformersEngine(target.model, target.shape, Sampling(max_new_tokens=8, temperature=1.0, seed=2))
    draw = np.random.default_rng(0).integers
    batches = [
        [
            Request(Prompt(f"d/{row}/0", "d", row, 0, ""), draw(0, 256, tokens).tolist(), answer)
            for row, tokens in enumerate(LENGTHS)
        ]
        for answer in ([5, 6], None)
    ]
    found = {"split": np.array(sum(isinstance(weight, DTensor) for weight in target.model.parameters()))}
    for kind, (_, outcomes) in zip(("forced", "generated"), engine.trace(batches), strict=True):
        for row, outcome in enumerate(outcomes):
            assert isinstance(outcome, Routed), outcome
            found |= {f"{kind} ids {row}": outcome.input_ids, f"{kind} experts {row}": np.sort(outcome.experts, -1)}
    return found


def main(target: str, kind: str, output: str) -> None:
    sizes = {} if kind == "replicas" else {f"{kind}_size": 2}
    config = TargetConfig(name=target, dtype="float32", experts_implementation="grouped_mm", **sizes)
    replica = replica_of(config)
    found = record(config)
    place = [replica.index, replica.count, replica.writes]
    np.savez(Path(output, f"{os.environ['RANK']}.npz"), replica=np.array(place), **found)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
