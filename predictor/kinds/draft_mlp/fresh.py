"""A fresh draft MLP and what it learns from: the target runs over every sample first, with the draft head beside it."""

from ecospec.configs.schema import TargetConfig
from ecospec.data.traces import Traces
from ecospec.inference.drafters.eagle3.checkpoint import load_head
from ecospec.inference.drafters.eagle3.head import Eagle3Head
from ecospec.predictor.kinds.draft_mlp.config import EvaluationKeys, HeadInputConfig, TrainingKeys
from ecospec.predictor.kinds.draft_mlp.head_inputs import read_head_inputs, require_rollout
from ecospec.predictor.kinds.draft_mlp.model import DraftMLP, DraftMLPConfig, fingerprint
from ecospec.predictor.kinds.routing import TargetIdentity
from ecospec.predictor.samples import subset
from ecospec.tracing.target.loading import Target, load_target
from ecospec.tracing.target.names import own_part, part_folder


def new_draft_mlp(config: TrainingKeys, identity: TargetIdentity, traces: Traces) -> tuple[DraftMLP, Traces]:
    """See `TrainedKind.new`."""
    target, head = _target_and_head(config.target, config.drafter)
    samples = _with_head_inputs(traces, target, head, config.drafter.steps)
    model_config = DraftMLPConfig(
        draft_size=head.config.hidden_size,
        hidden_size=config.mlp.hidden_size,
        intermediate_size=config.mlp.intermediate_size,
        num_blocks=config.mlp.num_blocks,
        drafter_fingerprint=fingerprint(head),
        steps=config.drafter.steps,
        **identity.fields,
    )
    return DraftMLP(model_config).attach_embedding(identity.table_VD), samples


def samples_for(config: EvaluationKeys, traces: Traces, model: DraftMLP) -> Traces:
    """See `TrainedKind.samples_for`."""
    target, head = _target_and_head(config.target, config.drafter)
    model.require_head(head, config.drafter.steps)
    return _with_head_inputs(traces, target, head, config.drafter.steps)


def _target_and_head(target_config: TargetConfig, config: HeadInputConfig) -> tuple[Target, Eagle3Head]:
    """The target, and the draft head on its embeddings. Raises InputError when the head cannot be rolled out."""
    folder = part_folder(own_part(config.path, target_config.name), "drafter")
    target = load_target(target_config)
    head = load_head(folder, target.model.config, config.feature_layers, config.rope_theta).attach(target.model)
    require_rollout(head)
    return target, head.to(target.model.get_input_embeddings().weight.device)


def _with_head_inputs(traces: Traces, target: Target, head: Eagle3Head, steps: int) -> Traces:
    return subset(traces, read_head_inputs(target.model, head, list(traces), steps))
