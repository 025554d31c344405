"""How far a predictor carries: to data sets it was not trained on, and how many traced tokens it takes.

Every model is trained from the same start under the same limits, on samples of the `train` split alone, and chosen and
measured on those of the `test` split, as `ecospec-train predictor` does; the `token` table, counted on the same
samples, stands beside each.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ecospec.data.traces import Trace, TraceSet
from ecospec.errors import InputError
from ecospec.files import provenance, replace_folder, write_json, write_text
from ecospec.predictor.config import TrainConfig
from ecospec.predictor.evaluation.evaluate import evaluate
from ecospec.predictor.evaluation.page import render_generalisation
from ecospec.predictor.training.fit import fit, open_traces, prepare_process, require_answers
from ecospec.predictor.training.task import Samples, open_task, some
from ecospec.progress import progress

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the training samples, for the learning curve


def generalise(config: TrainConfig) -> dict:
    """Train on all data sets, on all but each in turn, and on growing shares; returns what `metrics.json` holds.

    `generalisation` has for each data set the overlap on its held-out samples when it was trained on (`seen`) and when
    it was not (`unseen`), of the model and of the `token` table; `learning_curve` a list of `tokens` trained on and the
    held-out overlap of both. The other numbers are those of the model that saw everything. Raises InputError as
    training does, and for traces of a single data set.
    """
    traces = open_traces(config)
    require_answers(traces, config)
    names = sorted({item.dataset for item in traces})
    if len(names) < 2:
        raise InputError(f"--traces {config.traces}: all samples are of {names[0]}; leaving one out takes two")
    if config.processes > 1:
        raise InputError(f"--devices {config.devices}: generalise trains one model after another; give it one process")
    require_every_part(traces, names, config)
    prepare_process(config)
    task = open_task(config, traces)
    subsets = {name: without(task.traces, name) for name in names}
    subsets |= {share: part_of(task.traces, share, config.seed) for share in SHARES}

    def measured(samples: Samples) -> dict:
        model = copy.deepcopy(task.model)
        with tempfile.TemporaryDirectory() as folder:
            fit(model, samples, replace(config, output=f"{folder}/model", loggers=[]))
        return evaluate(model, samples)

    found = {key: measured(subsets[key]) for key in progress(list(subsets), "models trained")}
    whole = found[SHARES[-1]]
    metrics = whole | {
        "generalisation": {name: _seen_and_unseen(name, whole, found[name]) for name in names},
        "learning_curve": [_point(subsets[share], found[share]) for share in SHARES],
    }
    replace_folder(Path(config.output), lambda folder: _write(folder, metrics, config))
    return metrics


def require_every_part(traces: TraceSet, names: list[str], config: TrainConfig) -> None:
    """Raises InputError unless every data set has held-out answers, and every part of the samples some to train on."""
    held_out = {item.dataset for item in traces if item.split == "test" and len(item.input_ids) > item.prompt_len}
    for name in names:
        if name not in held_out:
            raise InputError(f"--traces {config.traces}: {name} has no held-out answers; trace more samples of it")
        require_answers(without(traces, name), config)
    require_answers(part_of(traces, min(SHARES), config.seed), config)


def without(traces: TraceSet | Samples, dataset: str) -> Samples:
    """The training samples of the other data sets, and all held-out samples."""
    return _some(traces, lambda item: item.split == "test" or item.dataset != dataset)


def part_of(traces: TraceSet | Samples, share: float, seed: int) -> Samples:
    """A share of the training samples, each smaller one a part of the larger, and all held-out samples."""
    train = [item.key for item in traces if item.split == "train"]
    order = np.random.default_rng(seed).permutation(len(train))
    kept = {train[index] for index in order[: max(1, round(share * len(train)))]}
    return _some(traces, lambda item: item.split == "test" or item.key in kept)


def _some(traces: TraceSet | Samples, wanted: Callable[[Trace], bool]) -> Samples:
    return some(traces, [item for item in traces if wanted(item)])


def _seen_and_unseen(name: str, seen: dict, unseen: dict) -> dict:
    token_seen, token_unseen = (metrics["ladder"]["token"]["overlap_by_dataset"][name] for metrics in (seen, unseen))
    return {
        "seen": seen["overlap_by_dataset"][name],
        "unseen": unseen["overlap_by_dataset"][name],
        "token_seen": token_seen,
        "token_unseen": token_unseen,
    }


def _point(traces: Samples, metrics: dict) -> dict:
    tokens = sum(len(item.input_ids) for item in traces if item.split == "train")
    return {"tokens": tokens, "overlap": metrics["overlap"], "token": metrics["ladder"]["token"]["overlap"]}


def _write(folder: Path, metrics: dict, config: TrainConfig) -> None:
    made = provenance() | {"config": asdict(config)}
    write_json(folder / "metrics.json", metrics)
    write_json(folder / "provenance.json", made)
    write_text(folder / "report.html", render_generalisation(metrics, made))
