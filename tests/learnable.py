"""Traces in memory that a small predictor can learn, and the options to train it on them in a second.

Letters: T tokens, L MoE layers, E experts, K experts per token, V vocabulary, D embedding width.
"""

from types import SimpleNamespace

import numpy as np
import torch

from ecospec.predictor.config import TrainPredictorConfig
from ecospec.predictor.kinds.predictor.config import BackboneConfig
from ecospec.predictor.kinds.predictor.fresh import new_predictor as predictor_of
from ecospec.predictor.kinds.predictor.model import ExpertPredictor
from ecospec.predictor.training import task
from ecospec.predictor.training.fit import fit
from ecospec.tracing.store.manifest import Manifest, PartFile, PromptSource, SampleCounts, TracedTarget
from ecospec.tracing.target.loading import MoeShape

L, E, K, V, D = 2, 12, 3, 24, 16
SHAPE = MoeShape("qwen3_moe", (0, 1), E, K, V, D, 2)
SMALL = BackboneConfig(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=48)
TABLE = torch.randn(V, D, generator=torch.Generator().manual_seed(5))


class MemoryTraces(list):
    num_layers, num_experts, top_k = L, E, K
    manifest = Manifest(
        target=TracedTarget(name="synthetic", config_sha256="hash"),
        moe_layers=[0, 1],
        num_experts=E,
        top_k=K,
        id_dtype="uint8",
        prompts=[PromptSource(dataset="synthetic", samples=60)],
        samples=SampleCounts(60, 0),
        parts=[PartFile("part-0.parquet", 60, "of these")],
    )


def learnable_traces(seed: int, samples: int = 60, T: int = 16) -> MemoryTraces:
    """Layer 0 routes by token, layer 1 by the token before: what counting tokens cannot know."""
    rng = np.random.default_rng(seed)
    experts_VLK = np.sort(rng.random((V, L, E)).argsort(-1)[..., :K], axis=-1).astype(np.uint8)
    traces = MemoryTraces()
    for i in range(samples):
        ids = rng.integers(0, V, T).astype(np.int32)
        before = np.concatenate([ids[:1], ids[:-1]])
        experts_TLK = np.stack([experts_VLK[ids, 0], experts_VLK[before, 1]], axis=1)
        split = "test" if i % 5 == 0 else "train"
        names = {"sample_id": f"synthetic/{i}/0", "dataset": "synthetic"}
        traces.append(
            SimpleNamespace(input_ids=ids, prompt_len=3, experts=experts_TLK, split=split, columns={}, **names)
        )
    return traces


def options(**changes: object) -> TrainPredictorConfig:
    base = {"backbone": SMALL, "tokens_per_batch": 128, "learning_rate": 1e-2, "warmup_steps": 5, "threads": 1}
    return TrainPredictorConfig(**base | {"loggers": ["csv"]} | changes)


def fresh_predictor(
    config: TrainPredictorConfig, shape: MoeShape, config_sha256: str, table_VD: torch.Tensor
) -> ExpertPredictor:
    """A predictor, seeded as training does, for a target of which only this is known."""
    torch.manual_seed(config.seed)
    return predictor_of(config, task.identity_of(config.target.name, shape, config_sha256, table_VD))


def new_predictor(config: TrainPredictorConfig) -> ExpertPredictor:
    return fresh_predictor(config, SHAPE, "hash", TABLE)


def trained(traces: MemoryTraces, config: TrainPredictorConfig) -> tuple[ExpertPredictor, dict]:
    predictor = new_predictor(config)
    return predictor, fit(predictor, traces, config)
