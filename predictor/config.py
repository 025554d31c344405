"""Keys of `ecospec-train`, a dataclass for each subcommand. Every field's docstring is its line in `--help`.

Imports nothing heavy. What only one kind of model reads is in that kind's own `config.py`, and joins the keys here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ecospec.configs.schema import PredictorConfig, TargetConfig
from ecospec.errors import InputError
from ecospec.predictor.kinds import TrainedKindName, trained_kinds


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
class TracedConfig:
    """What every subcommand works with: a target, traces of it, and a place for the results."""

    target: TargetConfig = field(default_factory=TargetConfig)
    traces: str | None = None
    """Trace folder to learn from: its `train` samples; its `test` samples are held out."""
    output: str | None = None
    """Folder to write; it must be empty or absent."""
    overwrite: bool = False
    """Replace a non-empty output folder."""
    threads: int | None = None
    """CPU threads; PyTorch's choice by default."""

    def __post_init__(self) -> None:
        require_positive(self, "threads")


@dataclass
class FitConfig(TracedConfig):
    """What all training needs. It ends at the first of max_minutes, max_steps and max_epochs."""

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
    tokens_per_batch: int = 4096
    """Most tokens in one batch of one process, padding included; a longer sample is a batch by itself."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic of training, in Lightning's words; exports are float32."""
    seed: int = 0
    """Seeds the initial weights and the order of the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = ("max_minutes", "max_steps", "max_epochs")
        require_positive(self, *limits, "learning_rate", "gradient_clip", "tokens_per_batch")
        require_not_negative(self, "warmup_steps", "weight_decay", "seed")


@dataclass
class ModelFitConfig(FitConfig, *dict.fromkeys(kind.training_keys for kind in trained_kinds())):
    """What training a model of routing needs, whichever its kind; `kind` says which of the kinds' own keys are read.

    It is done by one process, which keeps the best weights alone and logs nothing, where a subcommand has no keys for
    that.
    """

    checkpoint_overlaps: ClassVar[Sequence[float]] = ()
    strategy: ClassVar[str] = "auto"
    devices: ClassVar[int] = 1
    num_nodes: ClassVar[int] = 1
    loggers: ClassVar[Sequence[str]] = ()
    kind: TrainedKindName = "predictor"
    """What is trained; docs/training.md says what each reads."""
    batch_size: int | None = None
    """Samples in one optimizer step, over all processes and accumulated batches; by default `tokens_per_batch` alone
    decides."""
    accumulate: int = 1
    """Batches of each process whose gradients are averaged for one optimizer step."""
    validate_every: int = 500
    """Optimizer steps between measurements of held-out overlap, each of which leaves a state to resume from; 0: none
    until the end, and the last weights are exported, not the best."""
    early_stopping: int | None = None
    """End training after this many measurements in a row without a better held-out overlap; never by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "batch_size", "accumulate", "early_stopping")
        require_not_negative(self, "validate_every")
        if self.batch_size is not None and self.batch_size % (self.processes * self.accumulate):
            raise InputError(
                f"--batch_size {self.batch_size}: must be a multiple of {self.processes * self.accumulate}"
                " (devices x num_nodes x accumulate)"
            )
        if self.early_stopping is not None and not self.validate_every:
            raise InputError("--early_stopping: needs held-out overlap to watch; give validate_every")

    @property
    def processes(self) -> int:
        """Processes that share the work."""
        return self.devices * self.num_nodes

    @property
    def samples_per_batch(self) -> int | None:
        """Of one process; None where only tokens limit it."""
        return None if self.batch_size is None else self.batch_size // (self.processes * self.accumulate)

    def given_on_command_line(self, keys: frozenset[str]) -> None:
        """Raises InputError for a key that only another kind than `kind` reads."""
        for key in sorted(keys):
            group = key.partition(".")[0]
            readers = [kind.name for kind in trained_kinds() if group in kind.own_keys]
            if readers and self.kind not in readers:
                raise InputError(f"--{key}: --kind {self.kind} does not read it (only {', '.join(readers)})")


@dataclass
class TrainPredictorConfig(ModelFitConfig):
    """Train a model of a target's routing. Training ends at the first of max_minutes, max_steps and max_epochs."""

    checkpoint_overlaps: list[float] = field(default_factory=list)
    """Keep a predictor folder of the first weights that reach each of these held-out overlaps."""
    strategy: Literal["auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2"] = "auto"
    """How several processes share the work, in Lightning's words; DeepSpeed needs GPUs and `ecospec[deepspeed]`."""
    devices: int = 1
    """Processes on each node, a GPU each where there are any."""
    num_nodes: int = 1
    """Machines; start the same command on each with `torchrun`, with `output` on a disk that all of them share."""
    loggers: list[Literal["csv", "tensorboard", "wandb"]] = field(default_factory=lambda: ["csv", "tensorboard"])
    """Where loss, learning rate and held-out overlap are written down; `wandb` must be installed."""

    def __post_init__(self) -> None:
        require_positive(self, "devices", "num_nodes")
        super().__post_init__()
        for overlap in self.checkpoint_overlaps:
            if not 0 < overlap <= 1:
                raise InputError(f"--checkpoint_overlaps {overlap}: must be above 0 and at most 1")


@dataclass
class GeneraliseConfig(ModelFitConfig):
    """Train on all data sets but one in turn, and on growing parts of the samples, each time under the same limits."""


@dataclass
class TrainDrafterConfig(FitConfig):
    """Train an EAGLE-3 head on a target's own text, to the first of max_minutes, max_steps and max_epochs."""

    head: HeadConfig = field(default_factory=HeadConfig)


@dataclass
class EvaluateConfig(TracedConfig, *dict.fromkeys(kind.evaluation_keys for kind in trained_kinds())):
    """Measure an exported predictor on traces of its target, beside the simple ones."""

    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    rungs: list[str] = field(default_factory=list)
    """Models of other kinds to measure beside it: folders, or the lab's, as `lab/KIND`."""
    given: ClassVar[frozenset[str]] = frozenset()

    def given_on_command_line(self, keys: frozenset[str]) -> None:
        """Note the keys given: which of them are read, the kinds of the folders say."""
        self.given = keys


def require_positive(config: object, *names: str) -> None:
    """Raises InputError for a number that is not positive and finite; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name} {value}: must be positive and finite")


def require_not_negative(config: object, *names: str) -> None:
    """Raises InputError for a number that is negative or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise InputError(f"--{name} {value}: must be 0 or more, and finite")
