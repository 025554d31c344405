"""Keys of the expert predictor. Imports nothing heavy."""

from dataclasses import dataclass, field

from ecospec.errors import InputError


@dataclass
class BackboneConfig:
    path: str | None = None
    """Hub id or folder of a dense decoder to start from; none: a fresh one of the sizes below."""
    pretrained: bool = True
    """Start from the weights at `backbone.path`; false: from its configuration alone, with random weights."""
    hidden_size: int = 128
    """Width of a fresh backbone."""
    num_layers: int = 2
    """Decoder layers of a fresh backbone."""
    num_heads: int = 4
    """Attention heads of a fresh backbone."""
    intermediate_size: int = 256
    """Width of a fresh backbone's MLP."""

    def __post_init__(self) -> None:
        if min(self.hidden_size, self.num_layers, self.num_heads, self.intermediate_size) <= 0:
            raise InputError(f"--backbone: sizes must be positive, got {self}")
        if self.hidden_size % (2 * self.num_heads):
            raise InputError(
                f"--backbone.num_heads {self.num_heads}: backbone.hidden_size {self.hidden_size} must be a multiple of"
                f" {2 * self.num_heads}"
            )


@dataclass
class TrainingKeys:
    """What training a predictor needs."""

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    gradient_checkpointing: bool = False
    """Compute the backbone's activations again in the backward pass instead of keeping them: less memory, more time."""
