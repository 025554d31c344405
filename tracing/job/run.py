"""`ecospec-trace run`: prompts → target → trace folder. The thin shell around plan, engine and store."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ecospec.data.prompts import after, answered, read_prompts, split_of
from ecospec.errors import DamageError, InputError, first_few
from ecospec.progress import progress
from ecospec.tracing.config import RunConfig
from ecospec.tracing.job.engine import Engine, Sampling, TransformersEngine
from ecospec.tracing.job.header import key_identity, trace_header
from ecospec.tracing.job.plan import PlannedBatch, Sample, Shard, plan_rounds, plan_samples, refusals
from ecospec.tracing.job.validation import EngineError, Rejected, Routed
from ecospec.tracing.job.vllm import VllmEngine, engine_settings
from ecospec.tracing.store.folder import TraceFolder, header_differences
from ecospec.tracing.store.layout import MANIFEST, REJECTED, encode_experts
from ecospec.tracing.store.manifest import Header, Manifest
from ecospec.tracing.target.loading import (
    MoeShape,
    context_of,
    load_target,
    load_target_config,
    load_tokenizer,
    shape_of,
)
from ecospec.tracing.target.replicas import Replica, broadcast, close_process_group, replica_of
from ecospec.tracing.target.requests import Request, answer_text, encode
from ecospec.tracing.target.routers import require_k_experts

SHOWN_REJECTIONS = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """All that can be known, and refused, without weights. `rounds`: one after the other, of this worker's batches."""

    config: RunConfig
    shape: MoeShape
    tokenizer: PreTrainedTokenizerBase
    header: Header
    samples: list[Sample]
    rounds: list[list[PlannedBatch]]
    replica: Replica

    @property
    def keys(self) -> list[str]:
        return [sample.key for sample in self.samples]


def run_trace(config: RunConfig) -> None:
    """Trace this worker's share of the prompts into `config.output`; what is finished there is kept.

    Raises InputError for bad prompts, a dense target (before any weight is read) or a folder of something else,
    DamageError when a finished folder lacks some of its samples, EngineError when the engine is beyond retry.
    """
    if config.output is None:
        raise InputError("no folder to write to: give --output DIR")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    job = _prepare(config)
    folder = TraceFolder(config.output, job.header)
    if config.retry_rejected:
        folder.forget_rejected()
    elif folder.complete:
        folder.require_finished(job.keys)
        _say_complete(job, folder, "is already complete, nothing to do")
        return
    pending = [_pending(batches, folder) for batches in job.rounds]
    todo = sum(map(len, pending))
    log.info("%d samples in all; here %d of %d batches to do", len(job.samples), todo, sum(map(len, job.rounds)))
    if todo:
        _trace(job, folder, pending)
    if job.replica.writes:
        _conclude(job, folder)


def _prepare(config: RunConfig) -> Job:
    prompts = read_prompts(config)
    model_config = load_target_config(config.target)
    shape = shape_of(model_config, config.target.trust_remote_code)
    require_k_experts(model_config)
    _require_context(config, model_config)
    tokenizer = load_tokenizer(config.target, shape.vocab_size)
    refused = refusals(prompts, config.teacher_force, config.max_new_tokens)
    if len(refused) == len(prompts):
        raise InputError(f"nothing is left to trace: sample {prompts[0].sample_id} {refused[prompts[0].sample_id]}")
    ready = [p for p in prompts if p.sample_id not in refused and (config.teacher_force or p.follows is None)]
    requests = encode(ready, tokenizer, config.teacher_force, config.chat_template)
    header = trace_header(config, model_config, shape, _engine_identity(config, shape), tokenizer, prompts)
    samples = plan_samples(prompts, requests, key_identity(header), refused)
    replica = replica_of(config.target)
    shard = Shard.parse(config.shard).within(replica.index, replica.count)
    rounds = [[batch for batch in batches if shard.owns(batch)] for batches in plan_rounds(samples, config.batch_size)]
    return Job(config, shape, tokenizer, header, samples, rounds, replica)


def _require_context(config: RunConfig, model_config: PreTrainedConfig) -> None:
    """Raises InputError where no prompt at all could fit; single samples that do not are rejected."""
    context = context_of(model_config)
    if not config.teacher_force and context is not None and config.max_new_tokens > context:
        raise InputError(f"--max_new_tokens {config.max_new_tokens}: the target's context is {context} tokens")


def _pending(batches: Sequence[PlannedBatch], folder: TraceFolder) -> list[PlannedBatch]:
    return [batch for batch in batches if not folder.done.issuperset(batch.keys)]


def _trace(job: Job, folder: TraceFolder, pending: Sequence[Sequence[PlannedBatch]]) -> None:
    engine = _open_engine(job)
    if job.config.retry_rejected and job.replica.writes:
        folder.delete_rejected()
    try:
        for batches in filter(None, pending):
            _trace_round(job, engine, folder, batches)
        close_process_group(job.config.target)
    except (KeyboardInterrupt, EngineError):
        if job.replica.writes:
            folder.commit()  # whole batches only: what was being traced is lost, what was traced is kept
        raise


def _open_engine(job: Job) -> Engine:
    config = job.config
    if config.engine.kind == "transformers":
        return TransformersEngine(load_target(config.target).model, job.shape, _sampling(config))
    engine = VllmEngine(config.engine, job.shape, _sampling(config))
    differences = header_differences(engine.identity, job.header.engine)
    if differences:
        raise InputError(
            f"--output {config.output}: began with another engine ({first_few(differences, separator='; ')})"
        )
    return engine


def _engine_identity(config: RunConfig, shape: MoeShape) -> dict:
    """What the engine says of itself; of a finished folder's servers its manifest says it, so that none is asked."""
    if config.engine.kind == "transformers":
        sizes = {"tp_size": config.target.tp_size, "ep_size": config.target.ep_size}
        return TransformersEngine.identity | {name: size for name, size in sizes.items() if size is not None}
    if (Path(config.output) / MANIFEST).exists():
        return (Manifest.read(config.output).engine or {}) | engine_settings(config.engine)
    return VllmEngine(config.engine, shape, _sampling(config)).identity


def _sampling(config: RunConfig) -> Sampling:
    return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed)


def _trace_round(job: Job, engine: Engine, folder: TraceFolder, batches: Sequence[PlannedBatch]) -> None:
    """Trace one round's batches, all earlier rounds being committed or rejected."""
    folder.commit()
    samples = {sample.prompt.sample_id: sample for batch in batches for sample in batch.samples}
    ready = _ready(job, folder, batches) if job.replica.writes else None
    requests, refused = broadcast(ready, job.config.target)
    keep = folder.add if job.replica.writes else _discard
    keep([], [_rejected_row(samples[sample_id], refusal) for sample_id, refusal in refused.items()])
    with closing(engine.trace(requests)) as traced:
        for batch, outcomes in progress(traced, "batches traced", len(requests)):
            of_batch = (samples[request.prompt.sample_id] for request in batch)
            pairs = list(zip(of_batch, outcomes, strict=True))
            rejected = [_rejected_row(sample, outcome) for sample, outcome in pairs if isinstance(outcome, Rejected)]
            keep([_row(*pair, job.shape) for pair in pairs if isinstance(pair[1], Routed)], rejected)


def _ready(
    job: Job, folder: TraceFolder, batches: Sequence[PlannedBatch]
) -> tuple[list[list[Request]], dict[str, Rejected]]:
    """The requests of each batch, later turns after the answers traced so far, and what is refused beforehand."""
    said = _said(job, folder, batches)
    requests, refused = [], {}
    for batch in batches:
        asked = []
        for sample in batch.samples:
            if sample.refusal is not None:
                refused[sample.prompt.sample_id] = Rejected(sample.refusal)
            elif sample.request is not None:
                asked.append(sample.request)
            elif sample.prompt.follows in said:
                asked += encode([after(sample.prompt, said)], job.tokenizer, False, job.config.chat_template)
            else:
                refused[sample.prompt.sample_id] = Rejected(f"follows {sample.prompt.follows}, which was rejected")
        requests += [asked] if asked else []
    return requests, refused


def _said(job: Job, folder: TraceFolder, batches: Sequence[PlannedBatch]) -> dict[str, tuple[str, ...]]:
    """By sample id the conversations that the batches' later turns follow, as far as they were traced."""
    by_id = {sample.prompt.sample_id: sample for sample in job.samples}
    chains = [_ancestors(sample, by_id) for batch in batches for sample in batch.samples]
    answers = folder.answers({sample.key for chain in chains for sample in chain})
    said: dict[str, tuple[str, ...]] = {}
    for chain in chains:
        for sample in chain:
            if sample.key in answers and (sample.prompt.follows is None or sample.prompt.follows in said):
                text = answer_text(answers[sample.key], job.tokenizer)
                said[sample.prompt.sample_id] = answered(after(sample.prompt, said), text)
    return said


def _ancestors(sample: Sample, by_id: dict[str, Sample]) -> list[Sample]:
    """The turns before one without a request, first turn first."""
    chain = []
    while sample.request is None and sample.refusal is None:
        sample = by_id[sample.prompt.follows]
        chain.insert(0, sample)
    return chain


def _discard(rows: list[dict], rejected: list[dict]) -> None:
    """What a process that does not write does with its share of a split model's results."""


def _conclude(job: Job, folder: TraceFolder) -> None:
    """Write the manifest if this was the last worker. Raises DamageError when samples of its own are missing."""
    complete = folder.finalise(job.keys)
    lost = sum(key not in folder.done for batches in job.rounds for batch in batches for key in batch.keys)
    if lost:
        raise DamageError(f"{folder.folder}: {lost} samples were neither written nor rejected; run the command again")
    if not complete:
        left = len(set(job.keys) - folder.done)
        log.info("%s: this shard is done; %d of %d samples are left to others", folder.folder, left, len(job.keys))
        return
    _say_complete(job, folder, "is complete")


def _say_complete(job: Job, folder: TraceFolder, how: str) -> None:
    """Log what a complete folder holds. Raises DamageError when nothing but rejected samples."""
    refused = folder.rejected()
    for sample_id, reason in list(refused.items())[:SHOWN_REJECTIONS]:
        log.warning("rejected: sample %s: %s", sample_id, reason)
    if len(refused) > SHOWN_REJECTIONS:
        log.warning("rejected: %d more, in %s", len(refused) - SHOWN_REJECTIONS, folder.folder / REJECTED)
    counts = (len(job.keys), len(job.keys) - len(refused), len(refused))
    log.info("%s %s: %d samples expected = %d written + %d rejected", folder.folder, how, *counts)
    if len(refused) == len(job.keys):
        raise DamageError(f"{folder.folder}: every sample was rejected, for the reasons above")


def _row(sample: Sample, routed: Routed, shape: MoeShape) -> dict:
    return _identified(sample) | {
        "input_ids": routed.input_ids,
        "prompt_len": routed.prompt_len,
        "experts": encode_experts(routed.experts, shape.num_experts),
        "split": split_of(sample.prompt.dataset, sample.prompt.row),
    }


def _rejected_row(sample: Sample, rejected: Rejected) -> dict:
    return _identified(sample) | {"reason": rejected.reason}


def _identified(sample: Sample) -> dict:
    prompt = sample.prompt
    return {
        "key": sample.key,
        "sample_id": prompt.sample_id,
        "dataset": prompt.dataset,
        "turn": prompt.turn,
        "source_id": prompt.source_id,
    }
