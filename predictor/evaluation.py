"""What predictors are worth on traces: overlap and seconds a step, of a trained one and of the simple ones beside it.

Letters: N tokens of one decoding step, T tokens, L MoE layers, E experts, H hidden width.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from ecospec.configs.errors import InputError
from ecospec.configs.files import provenance, replace_folder, require_new_folder, write_json
from ecospec.data.traces import Trace, TraceSet, read_traces
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.embedding import load_embedding
from ecospec.predictor.loss import CHUNK_TOKENS
from ecospec.predictor.metrics import measure
from ecospec.predictor.model import ExpertPredictor, load_predictor
from ecospec.predictor.simple import FrequencyPredictor, TokenPredictor, fit_tables
from ecospec.tracing.target import MoeShape, config_hash, load_target_config, part_folder, shape_of, weights_hash

METRICS = "metrics.json"
STEP_TOKENS = 11  # nodes of the default draft tree (3 steps, top-2), root included
STEP_CONTEXT = 256  # tokens before them
STEP_REPEATS = 20


def evaluate_predictor(config: TrainConfig) -> dict:
    """The numbers of an exported predictor on any traces of its target, in the form of `metrics.json`.

    The simple ones beside it are counted from the `train` samples of the same traces, and `overlap` is of the `test`
    samples. Where `output` is given, `metrics.json` and `provenance.json` are written there. Raises InputError for
    missing traces, another target's traces or predictor, and samples without answers.
    """
    if config.traces is None:
        raise InputError("--traces: missing; give a trace folder")
    if config.output is not None:
        require_new_folder(Path(config.output), config.overwrite, METRICS)
    predictor = load_predictor(part_folder(config.predictor.path, "predictor"))
    traces, model_config = read_traces(config.traces), load_target_config(config.target)
    shape = shape_of(model_config, config.target.trust_remote_code)
    require_same_target(traces, config, shape, config_hash(model_config))
    metrics = evaluate(predictor.attach_embedding(load_embedding(config.target)), traces)
    if config.output is not None:
        replace_folder(Path(config.output), lambda folder: _write(folder, metrics, config))
    return metrics


@torch.inference_mode()
def evaluate(predictor: ExpertPredictor, traces: TraceSet) -> dict:
    """The content of `metrics.json`: the predictor's numbers, and under `ladder` those of what it must beat.

    `seconds_per_step` is the median time to predict one decoding step's draft tree.
    """
    predictor.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def stretches_of(item: Trace) -> Iterator[Tensor]:
        hidden_1TH = predictor.hidden(torch.from_numpy(item.input_ids.astype(np.int64))[None].to(predictor.device))
        return map(predictor.logits, hidden_1TH[0].split(CHUNK_TOKENS))

    ladder = fit_tables(traces, predictor.config.vocab_size)
    numbers = measure(stretches_of, traces) | {"seconds_per_step": _predictor_seconds(predictor)}
    return numbers | {"ladder": {name: _simple_numbers(simple, traces) for name, simple in ladder.items()}}


def require_same_target(traces: TraceSet, config: TrainConfig, shape: MoeShape, config_sha256: str) -> None:
    """Raises InputError, naming both sides, when the traces were recorded on another model, or on other weights."""
    target = traces.manifest["target"]
    recorded = [traces.manifest["moe_layers"], traces.num_experts, traces.top_k, target["config_sha256"]]
    given = [list(shape.layers), shape.num_experts, shape.top_k, config_sha256]
    weights = target.get("weights_sha256"), weights_hash(config.target)
    if None not in weights:
        recorded.append(weights[0])
        given.append(weights[1])
    if recorded != given:
        raise InputError(
            f"--traces {config.traces}: recorded on {target['name']} ({_identity(*recorded)}), not on"
            f" --target.name {config.target.name} ({_identity(*given)}); trace that target"
        )


def _write(folder: Path, metrics: dict, config: TrainConfig) -> None:
    write_json(folder / METRICS, metrics)
    write_json(folder / "provenance.json", provenance() | {"config": asdict(config)})


def _identity(layers: list[int], num_experts: int, top_k: int, config_sha256: str, weights_sha256: str = "") -> str:
    routing = f"{len(layers)} MoE layers, {top_k} of {num_experts} experts, configuration {config_sha256[:8]}"
    return f"{routing}, weights {weights_sha256[:8]}" if weights_sha256 else routing


def _simple_numbers(simple: FrequencyPredictor | TokenPredictor, traces: TraceSet) -> dict:
    ids_N = np.zeros(STEP_TOKENS, np.int32)

    def stretches_of(item: Trace) -> Iterator[Tensor]:
        firsts = range(0, len(item.input_ids), CHUNK_TOKENS)
        return (simple.logits(item.input_ids[first : first + CHUNK_TOKENS]) for first in firsts)

    return measure(stretches_of, traces) | {"seconds_per_step": _median_seconds(lambda: simple.predict(ids_N))}


def _predictor_seconds(predictor: ExpertPredictor) -> float:
    """Median seconds to predict one step's tree: STEP_TOKENS new tokens after a cached context."""
    ids = torch.arange(STEP_CONTEXT + STEP_TOKENS, device=predictor.device)[None] % predictor.config.vocab_size
    cache = DynamicCache(config=predictor.config.backbone)
    predictor(ids[:, :STEP_CONTEXT], cache=cache)

    def step() -> None:
        predictor(ids[:, STEP_CONTEXT:], cache=cache).cpu()
        cache.crop(-STEP_TOKENS)

    return _median_seconds(step)


def _median_seconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEP_REPEATS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
