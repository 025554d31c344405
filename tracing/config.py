"""Keys of `ecospec-trace`. Imports nothing heavy: `--help` must answer within a second."""

from dataclasses import dataclass, field
from typing import Literal

from ecospec.configs.errors import InputError
from ecospec.configs.schema import PromptConfig, TargetConfig


@dataclass
class TraceConfig(PromptConfig):
    """Record which experts a MoE target uses for each token of its prompts and answers."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """The model to trace."""
    output: str | None = None
    """Folder to write to: the trace folder of `run` (which resumes what it finds there), the results of the others."""
    compare: str | None = None
    """Second trace folder of the same text (other engine or type): `stats` says how far the two agree."""
    max_new_tokens: int = 128
    """Tokens generated per prompt at most."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    teacher_force: bool = False
    """Run each prompt followed by its given answer instead of generating."""
    batch_size: int = 16
    """Sequences per forward pass."""
    seed: int = 0
    """Seed of the sampling; a batch's draws depend on it and on the batch's samples alone."""
    threads: int | None = None
    """CPU threads; all cores by default."""
    layout: Literal["tokens"] = "tokens"
    """Form of `export`: `tokens` gives a row a token with a list column per MoE layer."""
    overwrite: bool = False
    """Let `export` and `stats` replace the files of a folder that is not empty."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "must be at least 1"),
            "temperature": (self.temperature >= 0, "must not be negative"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "batch_size": (self.batch_size >= 1, "must be at least 1"),
            "threads": (self.threads is None or self.threads >= 1, "must be at least 1"),
        }
        for key, (holds, rule) in rules.items():
            if not holds:
                raise InputError(f"--{key} {getattr(self, key)}: {rule}")
