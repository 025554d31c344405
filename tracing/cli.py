"""`ecospec-trace`. Everything heavy is imported by the command that needs it, so that `--help` answers at once."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ecospec.configs import cli
from ecospec.errors import InputError
from ecospec.files import require_new_folder
from ecospec.tracing.config import TraceConfig


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `ecospec-trace ARGV`."""
    return cli.main("ecospec-trace", SUBCOMMANDS, argv)


def _run(config: TraceConfig) -> None:
    from transformers.utils import logging as transformers_logging

    from ecospec.tracing.job.run import run_trace

    if config.overwrite:
        raise InputError("--overwrite: run goes on with what is there; to trace anew give another --output")
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    run_trace(config)


def _check(_config: TraceConfig, folders: list[str]) -> None:
    from ecospec.tracing.store.check import check_folder

    manifest = check_folder(folders[0])
    print(f"{folders[0]}: sound; {manifest.samples.written} samples in {len(manifest.parts)} parts, ", end="")
    print(f"{manifest.num_layers} MoE layers, {manifest.top_k} of {manifest.num_experts} experts per token")


def _stats(config: TraceConfig, folders: list[str]) -> None:
    from ecospec.tracing.stats.command import PAGE_FILE, STATS_FILE, write_stats
    from ecospec.tracing.stats.page import text_table

    _require_output(config, STATS_FILE)
    stats = write_stats(folders[0], config.output, config.compare)
    print(f"{text_table(stats)}\n{config.output}/{PAGE_FILE}")


def _export(config: TraceConfig, folders: list[str]) -> None:
    from ecospec.tracing.store.export import TOKENS_FILE, export_tokens

    _require_output(config, TOKENS_FILE)
    rows = export_tokens(folders[0], config.output)
    print(f"{config.output}/{TOKENS_FILE}: {rows} tokens")


def _require_output(config: TraceConfig, artifact: str) -> None:
    if config.output is None:
        raise InputError("no folder to write to: give --output DIR")
    require_new_folder(Path(config.output), config.overwrite, artifact)


SUBCOMMANDS = (
    cli.Subcommand("run", "trace prompts into the folder --output; running it again resumes", _run, TraceConfig),
    cli.Subcommand("check", "verify the trace folder DIR", _check, TraceConfig, folders=1),
    cli.Subcommand("stats", "expert load, union and reuse over the trace folder DIR", _stats, TraceConfig, folders=1),
    cli.Subcommand("export", "rewrite the trace folder DIR for other tools", _export, TraceConfig, folders=1),
)
