"""`ecospec-trace run`: prompts → target → trace folder. The thin shell around batches, engine and store."""

import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from ecospec.configs.errors import DamageError, InputError
from ecospec.configs.files import sha256_json
from ecospec.configs.progress import progress
from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt, read_prompts
from ecospec.tracing.batches import plan_batches
from ecospec.tracing.config import TraceConfig
from ecospec.tracing.engine import Engine, Sampling, TransformersEngine
from ecospec.tracing.layout import SCHEMA_VERSION, encode_experts, id_dtype, split_of
from ecospec.tracing.requests import Request, encode, request_key, require_context, tokenizer_sha256
from ecospec.tracing.store import TraceFolder
from ecospec.tracing.target import (
    MoeShape,
    config_hash,
    load_target,
    load_target_config,
    load_tokenizer,
    shape_of,
    weights_hash,
)
from ecospec.tracing.validation import Rejected, Routed
from ecospec.tracing.vllm import VllmEngine

log = logging.getLogger(__name__)


def run_trace(config: TraceConfig) -> None:
    """Trace every prompt into `config.output`; what an earlier run of the same command finished there is kept.

    Raises InputError for bad prompts, a dense target (before any weight is read) or a folder of something else,
    DamageError when a finished folder lacks some of its samples.
    """
    if config.output is None:
        raise InputError("no folder to write to: give --output DIR")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    shape, header, requests = _prepare(config)
    folder = TraceFolder(config.output, header)
    if folder.complete:
        folder.require_finished(requests)
        log.info("%s is already complete: %d samples, nothing to do", config.output, len(requests))
        return
    keys = list(requests)
    planned = plan_batches([len(request.ids) for request in requests.values()], config.batch_size)
    batches = [{keys[index]: requests[keys[index]] for index in batch} for batch in planned]
    pending = [batch for batch in batches if not folder.finished.issuperset(batch)]
    log.info("%d samples in %d batches, %d batches to do", len(keys), len(batches), len(pending))
    if pending:
        _trace_batches(config, shape, folder, pending)
    folder.finalise(keys)
    log.info("%s is complete: %d samples", config.output, len(keys))


def _prepare(config: TraceConfig) -> tuple[MoeShape, dict, dict[str, Request]]:
    """All that can be known, and refused, without weights: the target's shape, the header, and the requests by key."""
    prompts = read_prompts(config)
    model_config = load_target_config(config.target)
    shape = shape_of(model_config, config.target.trust_remote_code)
    tokenizer = load_tokenizer(config.target, shape.vocab_size)
    requests = encode(prompts, tokenizer, config.teacher_force)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    require_context(requests, context, config.max_new_tokens)
    header = trace_header(config, model_config, shape, prompts) | {"tokenizer_sha256": tokenizer_sha256(tokenizer)}
    identity = {name: header[name] for name in ("schema", "target", "engine", "generation")}
    return shape, header, {request_key(identity, request): request for request in requests}


def trace_header(
    config: TraceConfig, model_config: PreTrainedConfig, shape: MoeShape, prompts: Sequence[Prompt]
) -> dict:
    """What the manifest says about a run before any sample is traced; a folder is resumed under the same only."""
    return {
        "schema": SCHEMA_VERSION,
        "target": {
            "name": config.target.name,
            "revision": config.target.revision,
            "dtype": _dtype_name(config.target, model_config),
            "config_sha256": config_hash(model_config),
            "weights_sha256": weights_hash(config.target),
            "experts_implementation": config.target.experts_implementation,
            "expert_mib": config.target.expert_mib,
        },
        "engine": _engine_identity(config, shape),
        "family": shape.family,
        "vocab_size": shape.vocab_size,
        "moe_layers": list(shape.layers),
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "id_dtype": id_dtype(shape.num_experts).name,
        "layout": "T,L,K",
        "prompts": prompt_sources(prompts),
        "generation": {
            "max_new_tokens": None if config.teacher_force else config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "teacher_force": config.teacher_force,
            "batch_size": config.batch_size,
            "seed": config.seed,
        },
    }


def prompt_sources(prompts: Sequence[Prompt]) -> list[dict]:
    """Each data set with its number of samples and a hash of their texts."""
    texts: dict[str, list] = {}
    for prompt in prompts:
        texts.setdefault(prompt.dataset, []).append([prompt.sample_id, prompt.text, prompt.answer])
    return [{"dataset": name, "samples": len(rows), "sha256": sha256_json(rows)} for name, rows in texts.items()]


def _trace_batches(
    config: TraceConfig, shape: MoeShape, folder: TraceFolder, batches: Sequence[dict[str, Request]]
) -> None:
    engine = make_engine(config, shape)
    keys = {request.prompt.sample_id: key for batch in batches for key, request in batch.items()}
    try:
        for batch, outcomes in engine.trace(progress([list(batch.values()) for batch in batches], "batches traced")):
            for request, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, Rejected):
                    raise DamageError(f"sample {request.prompt.sample_id}: {outcome.reason}")
            each = zip(batch, outcomes, strict=True)
            folder.add([_row(keys[request.prompt.sample_id], request, routed, shape) for request, routed in each])
    except KeyboardInterrupt:
        folder.commit()  # whole batches only: what was being traced is lost, what was traced is kept
        raise


def _engine_identity(config: TraceConfig, shape: MoeShape) -> dict:
    """What of the engine goes into the manifest; loads no weights, but asks a vLLM server."""
    return make_engine(config, shape).identity if config.engine.kind == "vllm" else TransformersEngine.identity


def make_engine(config: TraceConfig, shape: MoeShape) -> Engine:
    """The engine that `config` names, ready to trace."""
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed)
    if config.engine.kind == "vllm":
        return VllmEngine(config.engine, shape, sampling)
    return TransformersEngine(load_target(config.target).model, shape, sampling)


def _row(key: str, request: Request, routed: Routed, shape: MoeShape) -> dict:
    expected = (len(routed.input_ids), len(shape.layers), shape.top_k)
    if routed.experts.shape != expected:
        raise DamageError(f"sample {request.prompt.sample_id}: routing {routed.experts.shape} instead of {expected}")
    prompt = request.prompt
    return {
        "key": key,
        "sample_id": prompt.sample_id,
        "dataset": prompt.dataset,
        "turn": prompt.turn,
        "input_ids": routed.input_ids,
        "prompt_len": routed.prompt_len,
        "experts": encode_experts(routed.experts, shape.num_experts),
        "split": split_of(prompt.dataset, prompt.row),
    }


def _dtype_name(target: TargetConfig, model_config: PreTrainedConfig) -> str:
    if target.dtype != "auto":
        return target.dtype
    if model_config.dtype is None:
        raise InputError(f"--target.name {target.name}: its config does not say its dtype; give --target.dtype")
    return str(model_config.dtype).removeprefix("torch.")
