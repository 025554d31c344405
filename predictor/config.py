"""Keys of `ecospec-train`. Every field's docstring is its line in `--help`; imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Literal

from ecospec.configs.schema import PredictorConfig, TargetConfig
from ecospec.errors import InputError

_POSITIVE = (
    "max_minutes",
    "max_steps",
    "max_epochs",
    "learning_rate",
    "gradient_clip",
    "batch_size",
    "tokens_per_batch",
    "accumulate",
    "early_stopping",
    "devices",
    "num_nodes",
    "threads",
)
_NOT_NEGATIVE = ("validate_every", "warmup_steps", "weight_decay", "seed")


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
class FeedingConfig:
    """The draft head whose hidden input a draft MLP reads."""

    path: str | None = "lab"
    """EAGLE-3 head whose hidden input a draft MLP reads: a folder, or `lab`."""
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
    kind: Literal["predictor", "linear", "draft_mlp"] = "predictor"
    """What `predictor` trains: the predictor (a small decoder), a linear probe on the token, or an MLP on what a draft
    head is fed."""
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    drafter: FeedingConfig = field(default_factory=FeedingConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    rungs: list[str] = field(default_factory=list)
    """Other trained kinds that `evaluate` measures beside the predictor: folders, `lab/linear`, `lab/draft_mlp`."""
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
    """AdamW's decay of matrices (vectors have none); with 0 it is Adam."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    batch_size: int | None = None
    """Samples in one optimizer step, over all processes and accumulated batches; by default `tokens_per_batch` alone
    decides."""
    tokens_per_batch: int = 4096
    """Most tokens in one batch of one process, padding included; a longer sample is a batch by itself."""
    accumulate: int = 1
    """Batches of each process whose gradients are averaged for one optimizer step."""
    gradient_checkpointing: bool = False
    """Compute the backbone's activations again in the backward pass instead of keeping them: less memory, more time."""
    validate_every: int = 500
    """Optimizer steps between measurements of held-out overlap, each of which leaves a state to resume from; 0: none
    until the end, and the last weights are exported, not the best."""
    early_stopping: int | None = None
    """End training after this many measurements in a row without a better held-out overlap; never by default."""
    checkpoint_overlaps: list[float] = field(default_factory=list)
    """Keep a predictor folder of the first weights that reach each of these held-out overlaps."""
    strategy: Literal["auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2"] = "auto"
    """How several processes share the work, in Lightning's words; DeepSpeed needs GPUs and `ecospec[deepspeed]`."""
    devices: int = 1
    """Processes on each node, a GPU each where there are any."""
    num_nodes: int = 1
    """Machines; start the same command on each with `torchrun`, with `output` on a disk that all of them share."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic of training, in Lightning's words; exports are float32."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = field(default_factory=lambda: ["csv", "tensorboard"])
    """Where loss, learning rate and held-out overlap are written down; `wandb` must be installed."""
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
        for overlap in self.checkpoint_overlaps:
            if not 0 < overlap <= 1:
                raise InputError(f"--checkpoint_overlaps {overlap}: must be above 0 and at most 1")
        if self.batch_size is not None and self.batch_size % (self.processes * self.accumulate):
            raise InputError(
                f"--batch_size {self.batch_size}: must be a multiple of {self.processes * self.accumulate}"
                " (devices x num_nodes x accumulate)"
            )
        if self.early_stopping is not None and not self.validate_every:
            raise InputError("--early_stopping: needs held-out overlap to watch; give validate_every")

    @property
    def processes(self) -> int:
        return self.devices * self.num_nodes

    @property
    def samples_per_batch(self) -> int | None:
        """Of one process; None where only tokens limit it."""
        return None if self.batch_size is None else self.batch_size // (self.processes * self.accumulate)
