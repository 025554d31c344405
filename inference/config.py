"""Keys of `ecospec-decode`. Every field's docstring is its line in `--help`. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ecospec.configs.errors import InputError
from ecospec.configs.schema import PromptConfig, TargetConfig

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
        for name in ("steps", "topk"):
            _require(getattr(self, name) >= 1, f"drafter.{name}", getattr(self, name), "must be 1 or more")


@dataclass
class PredictorConfig:
    path: str | None = "lab"
    """Folder that `ecospec-train predictor` exported, or `lab`."""


@dataclass
class SelectionConfig:
    policy: Literal["marginal", "confidence", "global", "random"] = "marginal"
    """Which drafts to verify: `marginal` (EcoSpec), `confidence` (EAGLE), `global` (its static ablation), `random`."""
    footprints: Literal["predictor", "frequency", "token"] = "predictor"
    """Where `marginal` and `global` learn a draft's experts: the predictor, or a table counted from `traces`."""
    gamma: int = 4
    """Tokens verified per step, the root included."""
    epsilon: float = 1e-6
    """Added to the number of new (layer, expert) pairs; larger values approach EAGLE's rule."""
    joint: bool = False
    """In a batch, choose over all texts at once with one shared set of experts; else each text alone."""

    def __post_init__(self) -> None:
        _require(self.gamma >= 1, "selection.gamma", self.gamma, "must be 1 or more (1 verifies the root alone)")
        _require(self.epsilon > 0, "selection.epsilon", self.epsilon, "must be positive")


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
    """Methods that `eval` and `check` go through; `eval` needs a plain one (`drafter: none`)."""
    traces: str | None = None
    """Trace folder from which the footprints `frequency` and `token` are counted."""
    trees: str | None = None
    """Folder that `record` wrote, or its tree file, for `replay`."""
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
        for name in ("max_new_tokens", "threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "must be at least 1")
        for name in ("batch_size", "temperature"):
            values = getattr(self, name)
            _require(bool(values), name, values, "give at least one")
            _require(len(set(values)) == len(values), name, values, "give each once")
        _require(all(size >= 1 for size in self.batch_size), "batch_size", self.batch_size, "must be at least 1")
        _require(all(t >= 0 for t in self.temperature), "temperature", self.temperature, "must not be negative")


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise InputError(f"--{key} {value}: {rule}")
