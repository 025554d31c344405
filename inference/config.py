"""Keys of `ecospec-decode`, a dataclass for each subcommand from shared parts. Every field's docstring is its line in
`--help`. Imports nothing heavy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ecospec.configs.keys import SHORT_FORMS
from ecospec.configs.schema import OutputConfig, PredictorConfig, PromptConfig, TargetConfig
from ecospec.errors import InputError
from ecospec.inference.drafters.kind import DrafterName, drafter_kind, drafter_kinds
from ecospec.inference.selection.config import EPSILON, Policy, RuleConfig, RuleOptions
from ecospec.predictor.kinds import KindName

LEAST_TEMPERATURE = 1e-3  # below it logits overflow
BASELINES = ("none", "hf_greedy")  # our plain loop; Transformers' own `generate`
PARTS = ("drafter", "selection", "predictor")  # groups of keys that a method may change


# The most derived first, so that they can be bases of one class.
_DRAFTER_KEYS = sorted({kind.keys: None for kind in drafter_kinds()}, key=lambda keys: -len(keys.__mro__))


@dataclass
class DrafterConfig(*_DRAFTER_KEYS):
    kind: DrafterName = drafter_kinds()[0].name
    """What drafts: an EAGLE-3 head, the target's own MTP layer, a small language model, or earlier text."""
    path: str | None = None
    """Folder of the EAGLE-3 head or of the draft model; the lab's own where the lab is the target. An MTP layer is read
    from the target's checkpoint, lookup needs none."""


@dataclass
class SelectionConfig(RuleConfig):
    footprints: KindName = "predictor"
    """Where a draft's experts are learnt: a model (`predictor.path`), the last step, a table counted from `traces`."""


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

    def own(self, key: str) -> bool:
        """Whether the method gives this dotted key itself, or has a drafter of a kind that does not read it."""
        group, _, name = key.partition(".")
        changes = getattr(self, group)
        if not isinstance(changes, dict):
            return changes is not None and name == SHORT_FORMS[group]
        return name in changes or ("kind" in changes and name not in drafter_kind(changes["kind"]).read_keys)


@dataclass
class DecodingConfig(PromptConfig):
    """What all subcommands that decode, or check what is to be decoded with, share."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    traces: str | None = None
    """Trace folder from which footprints that are tables are counted."""
    max_new_tokens: int = 64
    """Tokens to generate per prompt, fewer where the text ends by itself."""

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")


@dataclass
class SeveralMethods:
    """A part of the subcommands that take several methods."""

    methods: list[MethodConfig] = field(default_factory=list)
    """What is compared, checked or recorded. The top-level keys are the defaults of every method, and by themselves the
    only method where none is listed."""

    def given_on_command_line(self, keys: frozenset[str]) -> None:
        """Raises InputError for an option that would not reach every method, or, of a path, none of them."""
        speculating = [method for method in self.methods if method.drafter not in BASELINES]
        for key in sorted(key for key in keys if key.partition(".")[0] in PARTS and speculating):
            own = [method.label for method in speculating if method.own(key)]
            shared = key.endswith(".path") and len(own) < len(speculating)
            if own and not shared:
                raise InputError(f"--{key}: the methods {', '.join(own)} give their own; take it out of `methods`")


@dataclass
class Sampled:
    """A part of the subcommands that draw."""

    temperature: list[float] = field(default_factory=lambda: [0.0])
    """Temperatures; 0 is greedy. Only `eval` takes several."""
    seed: int = 0
    """Seeds sampling, together with each prompt's sample id."""
    threads: int | None = None
    """CPU threads; PyTorch's choice by default."""

    def __post_init__(self) -> None:
        _require_threads(self.threads)
        _require_each_once("temperature", self.temperature)
        usable = all(t == 0 or LEAST_TEMPERATURE <= t < math.inf for t in self.temperature)
        _require(usable, "temperature", self.temperature, f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}")

    def only_temperature(self, command: str) -> float:
        """The one temperature. Raises InputError where `command` would have to ignore a second one."""
        _require(len(self.temperature) == 1, "temperature", self.temperature, f"{command} takes one")
        return self.temperature[0]


@dataclass
class CheckConfig(SeveralMethods, DecodingConfig):
    """See whether target, drafters and footprints fit, without loading weights."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Texts to be decoded together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_sizes(self.batch_size)


@dataclass
class GenerateConfig(Sampled, DecodingConfig):
    """Decode with one method, text in, text out."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)

    def __post_init__(self) -> None:
        Sampled.__post_init__(self)
        DecodingConfig.__post_init__(self)


@dataclass
class EvalConfig(OutputConfig, SeveralMethods, Sampled, DecodingConfig):
    """Compare methods on prompts; one of `methods` must be plain (`drafter: none`)."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Texts decoded together; several sizes are compared one after the other."""
    notice: str | None = None
    """Sentence to print above the report's table."""

    def __post_init__(self) -> None:
        Sampled.__post_init__(self)
        DecodingConfig.__post_init__(self)
        _require_sizes(self.batch_size)


@dataclass
class RecordedSelection:
    """The sources that are recorded; the whole pool is verified, so nothing is selected."""

    policy: Policy = "marginal"
    """A policy that needs no footprints records none."""
    footprints: KindName = "predictor"
    """Where a draft's experts are learnt."""

    def rule(self) -> SelectionConfig:
        """As the defaults of methods."""
        return SelectionConfig(self.policy, footprints=self.footprints)


@dataclass
class RecordConfig(OutputConfig, SeveralMethods, Sampled, DecodingConfig):
    """Note along plain decoding's texts what any selection would get; what the methods' footprints predict is kept."""

    selection: RecordedSelection = field(default_factory=RecordedSelection)

    def __post_init__(self) -> None:
        Sampled.__post_init__(self)
        DecodingConfig.__post_init__(self)


@dataclass
class ReplayedSelection(RuleOptions):
    """What is replayed: every policy with every footprint source, γ and ε."""

    policy: list[Policy] = field(default_factory=lambda: ["confidence", "marginal", "global"])
    """Policies."""
    footprints: list[str] | None = None
    """Footprint sources, `oracle` for the target's own; by default all that trees and traces give."""
    gamma: list[int] = field(default_factory=lambda: list(range(1, 8)))
    """Tokens verified per step, the root included."""
    epsilon: list[float] = field(default_factory=lambda: [EPSILON])
    """Added to the number of new (layer, expert) pairs."""

    def __post_init__(self) -> None:
        for name in ("policy", "gamma", "epsilon"):
            _require_each_once(f"selection.{name}", getattr(self, name))
        for gamma in self.gamma:
            RuleConfig(gamma=gamma)
        for epsilon in self.epsilon:
            RuleConfig(epsilon=epsilon)


@dataclass
class ReplayConfig(OutputConfig):
    """Step through recorded trees as decoding would; no target is loaded."""

    trees: str | None = None
    """Folder that `record` wrote, or its tree file; `lab` is the shipped one."""
    traces: str | None = None
    """Trace folder from which footprints that are tables are counted."""
    selection: ReplayedSelection = field(default_factory=ReplayedSelection)
    threads: int | None = None
    """CPU threads; PyTorch's choice by default."""

    def __post_init__(self) -> None:
        _require_threads(self.threads)


@dataclass
class ReportConfig(OutputConfig):
    """Tables and plots of run folders as HTML, Markdown and CSV."""


def _require_threads(threads: int | None) -> None:
    _require(threads is None or 1 <= threads <= 1024, "threads", threads, "must be 1 to 1024")


def _require_sizes(sizes: Sequence[int]) -> None:
    _require_each_once("batch_size", sizes)
    _require(all(size >= 1 for size in sizes), "batch_size", sizes, "must be at least 1")


def _require_each_once(name: str, values: Sequence) -> None:
    _require(bool(values), name, values, "give at least one")
    _require(len(set(values)) == len(values), name, values, "give each once")


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise InputError(rule, key=key, value=value)
