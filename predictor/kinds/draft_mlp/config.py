"""Keys of the draft MLP. Imports nothing heavy."""

from dataclasses import dataclass, field

from ecospec.errors import InputError


@dataclass
class MLPConfig:
    """Sizes of a draft MLP."""

    hidden_size: int = 256
    """Width of a draft MLP."""
    intermediate_size: int = 512
    """Width inside each of its blocks."""
    num_blocks: int = 1
    """Gated blocks, one after the other."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise InputError(f"--mlp.{name} {value}: must be positive")


@dataclass
class HeadInputConfig:
    """The draft head whose hidden input a draft MLP reads."""

    path: str | None = None
    """Folder of the EAGLE-3 head whose hidden input a draft MLP reads; the lab's own where the lab is the target."""
    steps: int = 3
    """How many tokens deep its drafts go."""
    feature_layers: list[int] | None = None
    """Hidden states of the target that the head is fed; by default what its checkpoint says."""
    rope_theta: float | None = None
    """Base of the head's rotary positions; by default what its checkpoint says."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"--drafter.steps {self.steps}: must be at least 1")


@dataclass
class EvaluationKeys:
    """What measuring a draft MLP needs."""

    drafter: HeadInputConfig = field(default_factory=HeadInputConfig)


@dataclass
class TrainingKeys(EvaluationKeys):
    """What training a draft MLP needs."""

    mlp: MLPConfig = field(default_factory=MLPConfig)
