"""The expert predictor: model, loss, metrics, the simple predictors it must beat, training, `ecospec-train`.

Its names resolve on first use, so that importing the package stays light.
"""

from importlib import import_module

_EXPORTS = {
    "ExpertPredictor": "model",
    "ExpertPredictorConfig": "model",
    "expert_loss": "loss",
    "excess_loss": "loss",
    "top_experts": "metrics",
    "fit_frequency": "simple",
    "fit_token": "simple",
    "load_embedding": "embedding",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name in _EXPORTS:
        return getattr(import_module(f"ecospec.predictor.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
