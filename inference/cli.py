"""`ecospec-decode`: check, generate, eval, record, replay, report."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ecospec.configs import cli
from ecospec.inference.config import (
    CheckConfig,
    EvalConfig,
    GenerateConfig,
    RecordConfig,
    ReplayConfig,
    ReportConfig,
)


def check(config: CheckConfig) -> None:
    from ecospec.inference.assemble import plan_methods
    from ecospec.inference.evaluation.runfolder import prompts_in_context
    from ecospec.inference.preflight import preflight

    for finding in preflight(config, plan_methods(config, config.selection, config.methods), config.batch_size):
        print(f"{finding.what:<24} {finding.value}")
    if config.prompts or config.datasets:
        print(f"{'prompts':<24} {len(prompts_in_context(config))}, which fit the target's context")
    print("everything fits")


def generate(config: GenerateConfig) -> None:
    """Decode with the method that the top-level keys describe, streaming text to stdout and statistics to stderr."""
    from transformers import TextStreamer

    from ecospec.inference.api import EcoSpecDecoder
    from ecospec.inference.assemble import PartsLoader, plan_methods
    from ecospec.inference.evaluation.evaluate import sampling_options
    from ecospec.inference.evaluation.runfolder import prompts_in_context
    from ecospec.inference.evaluation.turns import Turns
    from ecospec.inference.preflight import preflight
    from ecospec.seeds import sample_seed
    from ecospec.tracing.target.loading import load_target
    from ecospec.tracing.target.requests import prompt_ids

    import torch  # isort: skip

    temperature = config.only_temperature("generate")
    prompts, (plan,) = prompts_in_context(config), plan_methods(config, config.selection)
    preflight(config, [plan])
    _prepare_process(config.threads)
    target = load_target(config.target)
    decoder = EcoSpecDecoder(target, PartsLoader(target, config.traces).method(plan))
    streamer = TextStreamer(target.tokenizer, skip_special_tokens=True)
    turns = Turns(config, target)
    for prompt in map(turns.complete, prompts):
        seed = sample_seed(config.seed, prompt.sample_id)
        torch.manual_seed(seed)
        ids = torch.tensor([prompt_ids(prompt, target.tokenizer, config.chat_template)])
        options = {"seed": seed, **sampling_options(temperature)}
        out = decoder.generate(ids, streamer=streamer, max_new_tokens=config.max_new_tokens, **options)
        turns.note([prompt], [out[0, ids.shape[1] :].tolist()])
        run = decoder.last_run
        summary = f"α {run.acceptance_length:.2f} · 𝓔 {run.active_experts:.1f} · {run.tokens_per_second:.1f} tokens/s"
        print(f"[{summary} · {run.new_tokens} tokens in {len(run.steps)} steps]", file=sys.stderr)


def evaluate(config: EvalConfig) -> None:
    from ecospec.inference.evaluation.runfolder import run_eval

    _prepare_process(config.threads)
    print(run_eval(config, cli.new_output(config, "results.json")))


def record(config: RecordConfig) -> None:
    from ecospec.inference.replay.command import TREES, run_record

    _prepare_process(config.threads)
    print(run_record(config, cli.new_output(config, TREES)))


def replay(config: ReplayConfig) -> None:
    from ecospec.inference.replay.command import REPLAY, run_replay

    _prepare_process(config.threads)
    print(run_replay(config, cli.new_output(config, REPLAY)))


def report(config: ReportConfig, folders: list[str]) -> None:
    from ecospec.inference.report.document import write_report

    for path in write_report([Path(folder) for folder in folders], cli.new_output(config, "report.html")):
        print(path)


SUBCOMMANDS = (
    cli.Subcommand("check", "see whether target, drafter and predictor fit, without weights", check, CheckConfig),
    cli.Subcommand("generate", "text in, text out", generate, GenerateConfig),
    cli.Subcommand("eval", "compare methods on prompts; writes a run folder", evaluate, EvalConfig),
    cli.Subcommand("record", "note along plain decoding's texts what any selection would get", record, RecordConfig),
    cli.Subcommand("replay", "every policy, source and γ on recorded trees; no target", replay, ReplayConfig),
    cli.Subcommand("report", "tables and plots of run folders", report, ReportConfig, folders="+"),
)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main("ecospec-decode", SUBCOMMANDS, argv)


def _prepare_process(threads: int | None) -> None:
    """CPU threads, and bars on a terminal only."""
    import torch
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
