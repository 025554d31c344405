"""Benchmark: our training beside a bare PyTorch loop on the same model and the same batches.

    python -m tests.benchmarks.training_speed [tokens] [windows] [steps] [folder]

Writes a trace of the lab's shape (8 layers, 8 of 64 experts; samples of 100 to 500 tokens) into `folder` (a temporary
one by default; reused when it is complete) and reads it. One run of the trainer: after each window of `steps` steps the
bare loop takes the same batches, ready-made, with a model of its own. Ours is charged with making its batches, and with
its share of reading the trace, as one epoch bears it. Prints both loops' tokens a second; the median of the windows'
ratios (the first, warming up, left out) must be within 5 %.

Letters: T tokens, L MoE layers, E experts, K experts per token, V vocabulary, D embedding width.
"""

import copy
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import lightning
import numpy as np
import torch

from ecospec.data.module import Batch, BatchLimits, TraceDataModule
from ecospec.data.traces import Trace, read_traces
from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.objective.loss import batch_loss
from ecospec.predictor.training.module import EndlessBatches, PredictorModule, optimizer_groups
from ecospec.predictor.training.trainer import make_trainer, run_trainer
from ecospec.tracing.store.folder import TraceFolder
from ecospec.tracing.store.layout import MANIFEST, encode_experts, id_dtype
from ecospec.tracing.store.manifest import PromptSource
from ecospec.tracing.target.loading import MoeShape
from tests.benchmarks import stats_speed
from tests.learnable import fresh_predictor

LIMIT = 0.95
L, E, K, V, D = 8, 64, 8, 2048, 128
SHORTEST, LONGEST, BATCH = 100, 500, 64


def row(index: int, generator: np.random.Generator) -> dict:
    T = int(generator.integers(SHORTEST, LONGEST + 1))
    experts_TLK = generator.integers(0, E // K, (T, L, K)) + np.arange(K) * (E // K)
    ids = {"input_ids": generator.integers(0, V, T).astype(np.int32), "prompt_len": T // 4, "split": "train"}
    name = {"key": f"key{index}", "sample_id": f"set0/{index}/0", "dataset": "set0", "turn": 0}
    return name | ids | {"experts": encode_experts(experts_TLK, E)}


def write_trace(path: Path, tokens: int) -> None:
    samples, generator = 2 * tokens // (SHORTEST + LONGEST), np.random.default_rng(0)
    shape = {"moe_layers": list(range(L)), "num_experts": E, "id_dtype": id_dtype(E).name}
    prompts = [PromptSource(dataset="set0", samples=samples)]
    folder = TraceFolder(path, replace(stats_speed.header(), **shape, prompts=prompts))
    for first in range(0, samples, BATCH):
        folder.add([row(index, generator) for index in range(first, min(first + BATCH, samples))])
    folder.finalise([f"key{index}" for index in range(samples)])


class BareLoop:
    """What anyone would write, with the arithmetic of our configuration."""

    def __init__(self, predictor: torch.nn.Module, config: TrainPredictorConfig) -> None:
        self.predictor, self.clip = predictor, config.gradient_clip
        groups = optimizer_groups(predictor, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))

    def run(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.optimizer.zero_grad()
            batch_loss(self.predictor, batch).backward()
            torch.nn.utils.clip_grad_norm_(self.predictor.parameters(), self.clip)
            self.optimizer.step()


class Windows(lightning.Callback):
    """Times the trainer's windows and the bare loop's, in turn."""

    def __init__(self, bare: BareLoop, steps: int) -> None:
        self.bare, self.steps, self.batches = bare, steps, []
        self.seconds: list[tuple[float, float, int]] = []  # ours, bare, tokens

    def on_train_start(self, *_: object) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, _trainer: object, _module: object, _outputs: object, batch: Batch, _: int) -> None:
        self.batches.append(batch)
        if len(self.batches) < self.steps:
            return
        ours = time.perf_counter() - self.began
        began = time.perf_counter()
        self.bare.run(self.batches)
        bare = time.perf_counter() - began
        self.seconds.append((ours, bare, sum(int(batch.lengths.sum()) for batch in self.batches)))
        self.batches, self.began = [], time.perf_counter()


def measure(items: list[Trace], windows: int, steps: int) -> list[tuple[float, float, int]]:
    """Seconds of ours and of the bare loop, and tokens, of each window."""
    config = TrainPredictorConfig(max_steps=(windows + 1) * steps, tokens_per_batch=1024, threads=1)
    torch.set_num_threads(config.threads)
    shape = MoeShape("qwen3_moe", tuple(range(L)), E, K, V, D, L)
    predictor = fresh_predictor(config, shape, "hash", torch.randn(V, D)).train()
    timed = Windows(BareLoop(copy.deepcopy(predictor), config), steps)
    data = TraceDataModule(items, [], BatchLimits(tokens=config.tokens_per_batch))
    module = PredictorModule(predictor, config, data.train_dataloader())
    with tempfile.TemporaryDirectory() as logs:
        trainer = make_trainer(config, Path(logs), callbacks=(timed,))
        run_trainer(trainer, module, EndlessBatches(data.train_dataloader()))
    return timed.seconds[1:]


def main(tokens: str = "5000000", windows: str = "11", steps: str = "200", folder: str | None = None) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        traces = Path(folder or temporary) / "traces"
        if not (traces / MANIFEST).exists():
            write_trace(traces, int(tokens))
        began = time.perf_counter()
        items = list(read_traces(traces))
        seconds_per_token = (time.perf_counter() - began) / sum(len(item.input_ids) for item in items)
    found = measure(items, int(windows), int(steps))
    rates = [(count / (ours + seconds_per_token * count), count / bare) for ours, bare, count in found]
    ratio = statistics.median(ours / bare for ours, bare in rates)
    ours, bare = (statistics.median(side) for side in zip(*rates, strict=True))
    print(f"{len(rates)} windows of {steps} steps: ours {ours:,.0f} tokens/s, a bare loop {bare:,.0f} tokens/s")
    print(f"median ratio {ratio:.3f} (limit {LIMIT}); reading takes {1e6 * seconds_per_token:.2f} s a million tokens")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
