"""A predictor that has learnt nothing yet, on a fresh backbone or one of Transformers'."""

from torch import nn

from ecospec.predictor.kinds.predictor.backbone import FRESH_RMS, backbone_config, pretrained_backbone, require_causal
from ecospec.predictor.kinds.predictor.config import TrainingKeys
from ecospec.predictor.kinds.predictor.model import ExpertPredictor, ExpertPredictorConfig
from ecospec.predictor.kinds.routing import TargetIdentity


def new_predictor(config: TrainingKeys, identity: TargetIdentity) -> ExpertPredictor:
    """A predictor whose backbone is fresh or from `backbone.path`.

    Raises InputError for a backbone that cannot be read or sees later tokens.
    """
    predictor_config = ExpertPredictorConfig(backbone=backbone_config(config.backbone), **identity.fields)
    predictor, input_rms = ExpertPredictor(predictor_config), FRESH_RMS
    if config.backbone.path is not None and config.backbone.pretrained:
        predictor.backbone, input_rms = pretrained_backbone(config.backbone.path)
    require_causal(predictor.backbone, config.backbone.path)
    if config.gradient_checkpointing:
        predictor.backbone.activation_checkpointing_enable()
    table_VD = identity.table_VD
    rms = table_VD.float().square().mean().sqrt()
    nn.init.normal_(predictor.projection.weight, std=float(input_rms / (rms * table_VD.shape[1] ** 0.5)))
    return predictor.attach_embedding(table_VD)
