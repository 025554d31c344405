"""The one place that decides which engine runs the target of a decoding loop."""

from collections.abc import Sequence

from torch import nn
from transformers import Cache

from ecospec.inference.target.session import TargetSession
from ecospec.inference.target.transformers import TransformersSession


def open_session(model: nn.Module, cache: Cache, feature_layers: Sequence[int] = (), rows: int = 1) -> TargetSession:
    """A session of `rows` texts on a Transformers model; `cache` is empty, and for several texts a `DynamicCache`.

    `feature_layers` as in `Drafter`. Raises InputError for a layer that the model does not have.
    """
    return TransformersSession(model, cache, feature_layers, rows)
