"""Keys of `ecospec-train`. Every field's docstring is its line in `--help`; imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ecospec.configs.errors import InputError
from ecospec.configs.schema import PredictorConfig, TargetConfig

_POSITIVE = (
    "max_minutes",
    "max_steps",
    "max_epochs",
    "learning_rate",
    "gradient_clip",
    "tokens_per_batch",
    "threads",
)
_NOT_NEGATIVE = ("warmup_steps", "weight_decay", "seed")


@dataclass
class BackboneConfig:
    path: str | None = None
    """Hub id or folder of a dense decoder whose weights to start from; none: a fresh one of the sizes below."""
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
class HeadConfig:
    """An EAGLE-3 head, in the words of published ones. Its hidden width and token embedding are the target's."""

    draft_vocab_size: int = 2048
    """Tokens that can be drafted: the most frequent of the training text."""
    intermediate_size: int = 384
    """Width of the head's MLP."""
    num_attention_heads: int = 4
    """Attention heads of the head's one layer."""
    num_key_value_heads: int = 2
    """Key and value heads; they divide the attention heads."""
    head_dim: int = 32
    """Width of an attention head; even."""
    rope_theta: float = 10000.0
    """Base of the head's rotary positions, independent of the target's."""
    steps: int = 3
    """Draft steps rolled out in training, each fed the output of the one before."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise InputError(f"--head.{name} {value}: must be positive and finite")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"--head.num_key_value_heads {self.num_key_value_heads}: must divide the "
                f"{self.num_attention_heads} attention heads"
            )
        if self.head_dim % 2:
            raise InputError(f"--head.head_dim {self.head_dim}: must be even")


@dataclass
class TrainConfig:
    """Train on what a MoE target did. Training ends at the first of max_minutes, max_steps and max_epochs."""

    target: TargetConfig = field(default_factory=TargetConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    traces: str | None = None
    """Trace folder to learn from: its `train` samples; its `test` samples are held out."""
    output: str | None = None
    """Folder to write; it must be empty or absent."""
    overwrite: bool = False
    """Replace a non-empty output folder."""
    max_minutes: float | None = None
    """Wall-clock limit of training, in minutes."""
    max_steps: int | None = None
    """Limit in optimizer steps."""
    max_epochs: int | None = None
    """Limit in passes over the training samples."""
    learning_rate: float = 3e-3
    """Peak of the schedule: linear warm-up, then cosine to a twentieth as the limit is approached."""
    warmup_steps: int = 20
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.05
    """AdamW's decay of matrices (vectors have none)."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    tokens_per_batch: int = 4096
    """Tokens in one optimizer step, padding included; a longer sample is a batch by itself."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic of training, in Lightning's words; weights and exports are float32."""
    seed: int = 0
    """Seeds the initial weights and the order of the samples."""
    threads: int | None = None
    """CPU threads; PyTorch's choice by default."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"--{name} {value}: must be positive and finite")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError(f"--{name} {value}: must be 0 or more, and finite")
