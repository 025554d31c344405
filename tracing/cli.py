"""`ecospec-trace`. Everything heavy is imported by the command that needs it, so that `--help` answers at once."""

import sys
from collections.abc import Sequence

from ecospec.configs import cli
from ecospec.tracing.config import CheckConfig, ExportConfig, RunConfig, StatsConfig


def run(config: RunConfig) -> None:
    from transformers.utils import logging as transformers_logging

    from ecospec.tracing.job.run import run_trace

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    run_trace(config)


def check(_config: CheckConfig, folders: list[str]) -> None:
    from ecospec.tracing.store.check import check_folder

    manifest = check_folder(folders[0])
    print(f"{folders[0]}: sound; {manifest.samples.written} samples in {len(manifest.parts)} parts, ", end="")
    print(f"{manifest.num_layers} MoE layers, {manifest.top_k} of {manifest.num_experts} experts per token")


def stats(config: StatsConfig, folders: list[str]) -> None:
    from ecospec.tracing.stats.command import PAGE_FILE, STATS_FILE, write_stats
    from ecospec.tracing.stats.page import text_table

    output = cli.new_output(config, STATS_FILE)
    print(f"{text_table(write_stats(folders[0], output, config.compare))}\n{output}/{PAGE_FILE}")


def export(config: ExportConfig, folders: list[str]) -> None:
    from ecospec.tracing.store.export import LAYOUTS

    file, write = LAYOUTS[config.layout]
    output = cli.new_output(config, file)
    rows = write(folders[0], output)
    print(f"{output}/{file}: {rows} tokens")


SUBCOMMANDS = (
    cli.Subcommand("run", "trace prompts into the folder --output; running it again resumes", run, RunConfig),
    cli.Subcommand("check", "verify the trace folder DIR", check, CheckConfig, folders=1),
    cli.Subcommand("stats", "expert load, union and reuse over the trace folder DIR", stats, StatsConfig, folders=1),
    cli.Subcommand("export", "rewrite the trace folder DIR for other tools", export, ExportConfig, folders=1),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `ecospec-trace ARGV`."""
    return cli.main("ecospec-trace", SUBCOMMANDS, argv)
