"""Keys of `ecospec-trace`. Imports nothing heavy: `--help` must answer within a second."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from ecospec.configs.schema import OutputConfig, PromptConfig, TargetConfig
from ecospec.errors import InputError

LOADING = ("expert_mib", "device_map", "tp_size", "ep_size", "dequantize")  # keys of `target` for Transformers alone


@dataclass
class EngineConfig:
    """What runs the target."""

    kind: Literal["transformers", "vllm"] = "transformers"
    """`transformers` loads the target here; `vllm` asks servers started with --enable-return-routed-experts."""
    url: list[str] = field(default_factory=list)
    """Addresses of the vLLM servers, all with the same model, as http://host:8000."""
    in_flight: int = 32
    """Requests that each server works on at once."""
    retries: int = 12
    """Failures in a row, with waits that double up to a minute (6 minutes in all), before a server is given up."""
    timeout: float = 600.0
    """Seconds to wait for an answer."""
    retrace: bool = False
    """Generate first, then trace the whole text in one pass, rather than take the rows of generation."""
    launch: str | None = None
    """The command that started the servers, kept word for word in the manifest."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range, and for addresses where they are missing or not wanted."""
        vllm = self.kind == "vllm"
        rules = {
            "in_flight": (self.in_flight >= 1, "must be at least 1"),
            "retries": (self.retries >= 0, "must not be negative"),
            "timeout": (self.timeout > 0, "must be above 0"),
            "url": (bool(self.url) == vllm, "and --engine vllm go together; give http://host:8000, several by commas"),
            "launch": (vllm or not self.launch, "is for --engine vllm; leave it out"),
            "retrace": (vllm or not self.retrace, "is for --engine vllm; leave it out"),
        }
        require("engine.", self, rules)
        for url in self.url:
            if not _is_address(url):
                raise InputError("give it as http://host:8000", key="engine.url", value=url)


@dataclass
class RunConfig(PromptConfig):
    """Record which experts a MoE target uses for each token of its prompts and answers."""

    INSTEAD: ClassVar = {"overwrite": "run goes on with what is there; to trace anew give another --output"}

    target: TargetConfig = field(default_factory=TargetConfig)
    """The model to trace."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What runs it."""
    output: str | None = None
    """The trace folder to write; what an earlier run of the same job left there is kept and completed."""
    max_new_tokens: int = 128
    """Tokens generated per prompt at most; 0 records the routing of the prompts alone."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    teacher_force: bool = False
    """Run each prompt followed by its given answer instead of generating."""
    batch_size: int = 16
    """Sequences per forward pass."""
    shard: str = "0/1"
    """Trace part i of n of the batches (`i/n`, from 0); n may change between runs of one job."""
    retry_rejected: bool = False
    """Try the samples again that an earlier run rejected."""
    seed: int = 0
    """Seed of the sampling; a batch's draws depend on it and on the batch's samples alone."""
    threads: int | None = None
    """CPU threads; all cores by default."""

    def __post_init__(self) -> None:
        """Raises InputError for a value out of range."""
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 0, "must not be negative"),
            "temperature": (self.temperature >= 0, "must not be negative"),
            "top_p": (0 < self.top_p <= 1, "must be above 0 and at most 1"),
            "batch_size": (self.batch_size >= 1, "must be at least 1"),
            "retry_rejected": (
                not self.retry_rejected or self.shard == "0/1",
                "one worker alone can do it, without --shard",
            ),
            "threads": (self.threads is None or 1 <= self.threads <= 1024, "must be 1 to 1024"),
        }
        require("", self, rules)
        if self.engine.kind == "vllm":
            require("target.", self.target, {name: _unset(self.target, name) for name in LOADING})


@dataclass
class CheckConfig:
    """Verify a trace folder: columns, checksums, row counts, ids in range, no sample missing or twice."""


@dataclass
class StatsConfig(OutputConfig):
    """Expert load, unions of consecutive tokens, and reuse, as JSON and HTML."""

    compare: str | None = None
    """Second trace folder of the same text (other engine or type): how far do the two agree?"""


@dataclass
class ExportConfig(OutputConfig):
    """Rewrite a trace folder for people with SQL."""

    layout: Literal["tokens"] = "tokens"
    """`tokens` gives a row a token with a list column per MoE layer."""


def _unset(target: TargetConfig, name: str) -> tuple[bool, str]:
    return not getattr(target, name), "says how to load weights, which the servers do; leave it out"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


def require(prefix: str, config: object, rules: dict[str, tuple[bool, str]]) -> None:
    """Raises InputError for the first key of `config` whose rule does not hold."""
    for key, (holds, rule) in rules.items():
        if not holds:
            raise InputError(rule, key=prefix + key, value=getattr(config, key))
