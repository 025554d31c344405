"""Keys that several subcommands share, in groups and bases. Every field's docstring is its line in `--help`.

Imports nothing heavy: `--help` must answer within a second.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass
class TargetConfig:
    name: str = "lab"
    """The MoE target: a hub id, a folder, `lab` (the shipped one), or a folder name of `configs/`."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the weights; `auto` takes the checkpoint's."""
    revision: str | None = None
    """Revision of a hub model."""
    experts_implementation: Literal["grouped_mm", "eager"] = "eager"
    """How Transformers computes the experts; both read each active expert once."""
    expert_mib: float | None = None
    """Widen every expert to this many MiB without changing the function (lab only; see the model card)."""
    device_map: str | None = None
    """Spread the weights over devices as Transformers does, for instance `auto`; one device by default."""
    tp_size: int | None = None
    """Split every weight over this many processes of one `torchrun` (tensor parallel)."""
    ep_size: int | None = None
    """Split the experts as well over this many processes of one `torchrun` (what GPT-OSS needs)."""
    dequantize: bool = False
    """Load FP8 or MXFP4 weights as plain ones (MXFP4 kernels hide which experts run)."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""


@dataclass
class PredictorConfig:
    path: str | None = None
    """Folder that `ecospec-train predictor` exported; the lab's own where the lab is the target."""


@dataclass
class OutputConfig:
    output: str | None = None
    """Folder to write; it must be empty or absent."""
    overwrite: bool = False
    """Replace what an earlier run of the same command wrote into the output folder."""


@dataclass
class PromptConfig:
    prompts: str | None = None
    """JSON Lines file of rows with `prompt` (and `answer`), or text with a prompt a line; wins over `datasets`."""
    datasets: list[str] | None = None
    """Prompt sets: the lab's (`lab/maths`, `lab/train/maths`, …), files of `data_dir`, or benchmarks (`gsm8k`, …)."""
    data_dir: str | None = None
    """Folder of further prompt sets, `NAME.jsonl` each; benchmarks that it lacks come from the hub."""
    samples: int | None = None
    """Rows per data set, from its start, with all their turns; all rows by default."""
    chat_template: bool | None = None
    """Put prompts in the target's chat template; by default where data set and tokenizer both are made for it."""
