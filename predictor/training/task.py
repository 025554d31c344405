"""What is to be learnt: traces of a target, checked against it, and a fresh model of the kind asked for.

For a predictor or a linear probe it never loads the target, only its configuration and its embedding table. A draft MLP
learns from what a draft head is fed, so the target runs over every sample first.

Letters: T tokens, L MoE layers, E experts, K experts per token, V vocabulary, D width of the target's embeddings.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import Trace, TraceSet, read_traces
from ecospec.errors import InputError
from ecospec.inference.drafters.eagle3.checkpoint import load_head
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.kinds.base import RoutingModel, embedding_hash
from ecospec.predictor.kinds.draft_mlp.head_inputs import read_fed, require_rollout
from ecospec.predictor.kinds.predictor.backbone import FRESH_RMS, backbone_config, pretrained_backbone, require_causal
from ecospec.predictor.kinds.predictor.model import ExpertPredictor, ExpertPredictorConfig
from ecospec.predictor.kinds.rungs import DraftMLP, DraftMLPConfig, LinearConfig, LinearPredictor, fingerprint
from ecospec.tracing.store.manifest import Manifest
from ecospec.tracing.target.loading import (
    MoeShape,
    Target,
    config_hash,
    load_target,
    load_target_config,
    shape_of,
    weights_hash,
)
from ecospec.tracing.target.names import part_folder


@dataclass(frozen=True)
class Samples(Sequence[Trace]):
    """Samples in memory, with the shape and the manifest of the trace folder they come from."""

    items: list[Trace]
    num_layers: int
    num_experts: int
    top_k: int
    manifest: Manifest

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Trace:
        return self.items[index]


def some(traces: TraceSet | Samples, items: list[Trace]) -> Samples:
    """These items as samples of `traces`."""
    return Samples(items, traces.num_layers, traces.num_experts, traces.top_k, traces.manifest)


@dataclass(frozen=True)
class Task:
    """Samples to learn from and to be measured on, and a model, on the target's embedding table, that has seen none."""

    traces: TraceSet | Samples
    model: RoutingModel


def open_task(config: TrainConfig, traces: TraceSet) -> Task:
    """The task of `config` on traces of its target. Raises InputError for a draft head that cannot be rolled out."""
    torch.manual_seed(config.seed)
    if config.kind == "draft_mlp":
        target = load_target(config.target)
        head = attached_head(config, target)
        identity = identity_of(config, target.shape, target.config_sha256, load_embedding(config.target))
        return Task(fed_by(config, traces, target, head), new_draft_mlp(config, identity, head))
    identity = identity_of(config, *known_of(config.target), load_embedding(config.target))
    return Task(traces, (new_predictor if config.kind == "predictor" else new_linear)(config, identity))


@dataclass(frozen=True)
class Identity:
    """The fields of a `RoutingConfig` that say whose routing is learnt, and that target's embedding table."""

    fields: dict
    table_VD: Tensor


def identity_of(config: TrainConfig, shape: MoeShape, config_sha256: str, table_VD: Tensor) -> Identity:
    """The identity of the target with this shape, configuration hash and embedding table."""
    fields = {
        "num_layers": len(shape.layers),
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "moe_layers": list(shape.layers),
        "target": config.target.name,
        "target_config_sha256": config_sha256,
        "vocab_size": table_VD.shape[0],
        "embedding_size": table_VD.shape[1],
        "embedding_sha256": embedding_hash(table_VD),
    }
    return Identity(fields, table_VD)


def new_predictor(config: TrainConfig, identity: Identity) -> ExpertPredictor:
    """A predictor whose backbone is fresh or from `backbone.path`."""
    predictor_config = ExpertPredictorConfig(backbone=backbone_config(config.backbone), **identity.fields)
    predictor, fed_rms = ExpertPredictor(predictor_config), FRESH_RMS
    if config.backbone.path is not None and config.backbone.pretrained:
        predictor.backbone, fed_rms = pretrained_backbone(config.backbone.path)
    require_causal(predictor.backbone, config.backbone.path)
    if config.gradient_checkpointing:
        predictor.backbone.activation_checkpointing_enable()
    table_VD = identity.table_VD
    rms = table_VD.float().square().mean().sqrt()
    nn.init.normal_(predictor.projection.weight, std=float(fed_rms / (rms * table_VD.shape[1] ** 0.5)))
    return predictor.attach_embedding(table_VD)


def new_linear(config: TrainConfig, identity: Identity) -> LinearPredictor:
    """A fresh linear probe."""
    return LinearPredictor(LinearConfig(**identity.fields)).attach_embedding(identity.table_VD)


def new_draft_mlp(config: TrainConfig, identity: Identity, head: Eagle3Head) -> DraftMLP:
    """A fresh MLP for what `head` is fed."""
    of_head = {"draft_size": head.config.hidden_size, "drafter_fingerprint": fingerprint(head)}
    own = asdict(config.mlp) | of_head | {"steps": config.drafter.steps}
    return DraftMLP(DraftMLPConfig(**own, **identity.fields)).attach_embedding(identity.table_VD)


def attached_head(config: TrainConfig, target: Target) -> Eagle3Head:
    """The draft head at `drafter.path`, on the target's embeddings. Raises InputError when it cannot be rolled out."""
    given = config.drafter
    folder = part_folder(given.path, "drafter")
    head = load_head(folder, target.model.config, given.feature_layers, given.rope_theta).attach(target.model)
    require_rollout(head)
    return head.to(target.model.get_input_embeddings().weight.device)


def fed_by(config: TrainConfig, traces: TraceSet, target: Target, head: Eagle3Head) -> Samples:
    """The samples of `traces` with what `head` is fed at each token."""
    return some(traces, read_fed(target.model, head, list(traces), config.drafter.steps))


def open_target_traces(config: TrainConfig) -> TraceSet:
    """The trace folder. Raises InputError when it is missing, or was recorded on another target than `target.name`."""
    if config.traces is None:
        raise InputError("--traces: missing; give a trace folder")
    traces = read_traces(config.traces)
    require_same_target(traces, config, *known_of(config.target))
    return traces


def known_of(target: TargetConfig) -> tuple[MoeShape, str]:
    """Shape and configuration hash of a target whose weights are not loaded."""
    model_config = load_target_config(target)
    return shape_of(model_config, target.trust_remote_code), config_hash(model_config)


def require_same_target(traces: TraceSet, config: TrainConfig, shape: MoeShape, config_sha256: str) -> None:
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
            f"--traces {config.traces}: recorded on {target.name} ({_identity(*recorded)}), not on"
            f" --target.name {config.target.name} ({_identity(*given)}); trace that target"
        )


def _identity(layers: list[int], num_experts: int, top_k: int, config_sha256: str, weights_sha256: str = "") -> str:
    routing = f"{len(layers)} MoE layers, {top_k} of {num_experts} experts, configuration {config_sha256[:8]}"
    return f"{routing}, weights {weights_sha256[:8]}" if weights_sha256 else routing
