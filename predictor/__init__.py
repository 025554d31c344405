"""The expert predictor: model, loss, metrics, the simple predictors it must beat, training, `ecospec-train`.

Names are imported on first use: this module loads nothing.
"""

from ecospec.configs.lazy import attributes

_HOMES = {
    "ExpertPredictor": "model",
    "ExpertPredictorConfig": "model",
    "load_predictor": "loading",
    "expert_loss": "loss",
    "excess_loss": "loss",
    "top_experts": "metrics",
    "fit_frequency": "simple",
    "fit_token": "simple",
    "load_embedding": "embedding",
}
__all__ = list(_HOMES)
__getattr__ = attributes(__name__, _HOMES)
