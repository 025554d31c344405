"""The expert predictor: model, loss, metrics, the simple kinds it must beat, training, `ecospec-train`.

Names are imported on first use: this module loads nothing.
"""

from typing import TYPE_CHECKING

from ecospec.lazy import offered

if TYPE_CHECKING:
    from ecospec.predictor.embedding import load_embedding as load_embedding
    from ecospec.predictor.kinds.loading import load_predictor as load_predictor
    from ecospec.predictor.kinds.predictor.model import ExpertPredictor as ExpertPredictor
    from ecospec.predictor.kinds.predictor.model import ExpertPredictorConfig as ExpertPredictorConfig
    from ecospec.predictor.objective.loss import excess_loss as excess_loss
    from ecospec.predictor.objective.loss import expert_loss as expert_loss
    from ecospec.predictor.objective.metrics import top_experts as top_experts
else:
    __all__, __getattr__ = offered(__name__)
