"""Keys that EAGLE-3 heads read beside those of all trees. Loads no torch."""

import math
from dataclasses import dataclass

from ecospec.errors import InputError
from ecospec.inference.drafters.kind import TreeKeys


@dataclass
class Eagle3Keys(TreeKeys):
    feature_layers: list[int] | None = None
    """Target layers whose outputs an EAGLE-3 head is fed (0: embeddings); by default what its checkpoint says."""
    rope_theta: float | None = None
    """Base of an EAGLE-3 head's rotary embedding; by default what its checkpoint says."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        if self.rope_theta is not None and not 0 < self.rope_theta < math.inf:
            raise InputError("must be positive", key="drafter.rope_theta", value=self.rope_theta)
        if self.feature_layers is not None and not self.feature_layers:
            raise InputError("give at least one layer", key="drafter.feature_layers", value=self.feature_layers)
        super().__post_init__()
