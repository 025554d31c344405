"""Keys of `ecospec-decode`. Every field's docstring is its line in `--help`. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ecospec.configs.schema import PredictorConfig, PromptConfig, TargetConfig
from ecospec.errors import InputError
from ecospec.inference.selection.config import SelectionConfig

LEAST_TEMPERATURE = 1e-3  # below it logits overflow
BASELINES = ("none", "hf_greedy")  # our plain loop; Transformers' own `generate`


@dataclass
class DrafterConfig:
    kind: Literal["eagle3", "mtp", "draft_lm", "prompt_lookup"] = "eagle3"
    """What drafts: an EAGLE-3 head, the target's own MTP layer, a small language model, or earlier text."""
    path: str | None = "lab"
    """Folder of the EAGLE-3 head (or `lab`) or draft model; `mtp` reads the target's checkpoint, lookup needs none."""
    steps: int = 3
    """Forward steps of the drafter per tree, which is the tree's depth."""
    topk: int = 2
    """Children of a node, and nodes of a level that are expanded."""
    feature_layers: list[int] | None = None
    """Target layers whose outputs an EAGLE-3 head is fed (0: embeddings); by default what its checkpoint says."""
    rope_theta: float | None = None
    """Base of an EAGLE-3 head's rotary embedding; by default what its checkpoint says."""

    def __post_init__(self) -> None:
        for name, most in (("steps", 64), ("topk", 256)):
            value = getattr(self, name)
            _require(1 <= value <= most, f"drafter.{name}", value, f"must be 1 to {most}")
        base, layers = self.rope_theta, self.feature_layers
        _require(base is None or 0 < base < math.inf, "drafter.rope_theta", base, "must be positive")
        _require(layers is None or bool(layers), "drafter.feature_layers", layers, "give at least one layer")


@dataclass
class MethodConfig:
    label: str
    """Name in the report."""
    drafter: dict[str, Any] | str | None = None
    """`none` (our plain loop), `hf_greedy` (Transformers' own), a folder, or keys that differ from the top level's."""
    selection: dict[str, Any] | str | None = None
    """A policy, or keys that differ from the top level's."""
    predictor: dict[str, Any] | str | None = None
    """A folder, or keys that differ from the top level's."""


@dataclass
class DecodeConfig(PromptConfig):
    """Speculative decoding of a MoE target. The top-level keys are the defaults of every method."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    methods: list[MethodConfig] = field(default_factory=list)
    """Methods of `eval` (one must be plain: `drafter: none`) and `check`; `record` keeps what their sources predict."""
    traces: str | None = None
    """Trace folder from which the footprints `frequency` and `token` are counted."""
    trees: str | None = None
    """Folder that `record` wrote, or its tree file, for `replay`; `lab` is the shipped one."""
    temperature: list[float] = field(default_factory=lambda: [0.0])
    """Temperatures; 0 is greedy."""
    max_new_tokens: int = 64
    """Tokens to generate per prompt, fewer where the text ends by itself."""
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Texts decoded together; several sizes are compared one after the other."""
    seed: int = 0
    """Seeds sampling, together with each prompt's sample id."""
    threads: int | None = None
    """CPU threads; PyTorch's choice by default."""
    notice: str | None = None
    """Sentence to print above the report's table."""
    output: str | None = None
    """Folder to write; it must be empty or absent."""
    overwrite: bool = False
    """Replace what an earlier run wrote into the output folder."""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        _require(self.threads is None or 1 <= self.threads <= 1024, "threads", self.threads, "must be 1 to 1024")
        for name in ("batch_size", "temperature"):
            values = getattr(self, name)
            _require(bool(values), name, values, "give at least one")
            _require(len(set(values)) == len(values), name, values, "give each once")
        _require(all(size >= 1 for size in self.batch_size), "batch_size", self.batch_size, "must be at least 1")
        usable = all(t == 0 or LEAST_TEMPERATURE <= t < math.inf for t in self.temperature)
        _require(usable, "temperature", self.temperature, f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}")


def only_one(config: DecodeConfig, command: str) -> None:
    """Raises InputError where `command` would have to ignore a second temperature or a batch."""
    _require(len(config.temperature) == 1, "temperature", config.temperature, f"{command} takes one")
    _require(config.batch_size == [1], "batch_size", config.batch_size, f"{command} decodes text by text")


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise InputError(f"--{key} {value}: {rule}")
