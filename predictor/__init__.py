"""The expert predictor: model, loss, metrics, the simple kinds it must beat, training, `ecospec-train`.

Names are imported on first use: this module loads nothing.
"""

from ecospec.lazy import attributes

_HOMES = {
    "ExpertPredictor": "kinds.predictor.model",
    "ExpertPredictorConfig": "kinds.predictor.model",
    "load_predictor": "kinds.loading",
    "expert_loss": "objective.loss",
    "excess_loss": "objective.loss",
    "top_experts": "objective.metrics",
    "load_embedding": "embedding",
}
__all__ = list(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
