"""What is to be learnt: traces of a target, checked against it, and a fresh model of the kind asked for.

By itself it never loads the target, only its configuration and its embedding table; a kind may (`TrainedKind.new`).

Letters: V vocabulary, D width of the target's embeddings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import Traces, TraceSet, read_traces
from ecospec.errors import InputError
from ecospec.predictor.config import ModelFitConfig, TracedConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.kinds import trained_kind
from ecospec.predictor.kinds.routing import RoutingModel, TargetIdentity, embedding_hash
from ecospec.tracing.target.loading import MoeShape, config_hash, load_target_config, shape_of, weights_hash


@dataclass(frozen=True)
class Task:
    """Samples to learn from and to be measured on, and a model, on the target's embedding table, that has seen none."""

    traces: Traces
    model: RoutingModel


def open_task(config: ModelFitConfig, traces: Traces) -> Task:
    """The task of `config` on traces of its target. Raises InputError as `TrainedKind.new` does."""
    torch.manual_seed(config.seed)
    identity = identity_of(config.target.name, *inspect_target(config.target), load_embedding(config.target))
    model, samples = trained_kind(config.kind).new(config, identity, traces)
    return Task(samples, model)


def identity_of(name: str, shape: MoeShape, config_sha256: str, table_VD: Tensor) -> TargetIdentity:
    """The identity of the target with this name, shape, configuration hash and embedding table."""
    fields = {
        "num_layers": len(shape.layers),
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_layers": list(shape.layers),
        "target": name,
        "target_config_sha256": config_sha256,
        "vocab_size": table_VD.shape[0],
        "embedding_size": table_VD.shape[1],
        "embedding_sha256": embedding_hash(table_VD),
    }
    return TargetIdentity(fields, table_VD)


def open_target_traces(config: TracedConfig) -> TraceSet:
    """The trace folder. Raises InputError when it is missing, or was recorded on another target than `target.name`."""
    if config.traces is None:
        raise InputError("--traces: missing; give a trace folder")
    traces = read_traces(config.traces)
    require_same_target(traces, config, *inspect_target(config.target))
    return traces


def inspect_target(target: TargetConfig) -> tuple[MoeShape, str]:
    """Shape and configuration hash of a target whose weights are not loaded."""
    model_config = load_target_config(target)
    return shape_of(model_config, target.trust_remote_code), config_hash(model_config)


def require_same_target(traces: TraceSet, config: TracedConfig, shape: MoeShape, config_sha256: str) -> None:
    """Raises InputError, naming both sides, when the traces were recorded on another model, or on other weights."""
    target = traces.manifest.target
    recorded = [traces.manifest.moe_layers, traces.num_experts, traces.top_k, target.config_sha256]
    given = [list(shape.layers), shape.num_experts, shape.top_k, config_sha256]
    weights = target.weights_sha256, weights_hash(config.target)
    if None not in weights:
        recorded.append(weights[0])
        given.append(weights[1])
    if recorded != given:
        raise InputError(
            f"--traces {config.traces}: recorded on {target.name} ({_described(*recorded)}), not on"
            f" --target.name {config.target.name} ({_described(*given)}); trace that target"
        )


def _described(layers: list[int], num_experts: int, top_k: int, config_sha256: str, weights_sha256: str = "") -> str:
    routing = f"{len(layers)} MoE layers, {top_k} of {num_experts} experts, configuration {config_sha256[:8]}"
    return f"{routing}, weights {weights_sha256[:8]}" if weights_sha256 else routing
