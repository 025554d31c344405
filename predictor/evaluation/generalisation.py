"""How far a predictor carries: to data sets it was not trained on, and how many traced tokens it takes.

Every model is trained from the same start under the same limits, on samples of the `train` split alone, and chosen and
measured on those of the `test` split, as `ecospec-train predictor` does; the yardstick among the kinds that need no
training, counted on the same samples, stands beside each.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ecospec.data.traces import Trace, Traces
from ecospec.errors import InputError
from ecospec.files import replace_folder, write_text
from ecospec.predictor.config import GeneraliseConfig
from ecospec.predictor.evaluation.evaluate import measure_beside_baselines
from ecospec.predictor.evaluation.metrics import GeneralisationMetrics, PredictorMetrics
from ecospec.predictor.evaluation.page import render_generalisation
from ecospec.predictor.kinds import yardstick
from ecospec.predictor.samples import Samples, subset
from ecospec.predictor.training.fit import fit
from ecospec.predictor.training.start import open_training_traces, prepare_process, require_answers
from ecospec.predictor.training.task import open_task
from ecospec.progress import progress
from ecospec.provenance import Provenance

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the training samples, for the learning curve


def generalise(config: GeneraliseConfig) -> GeneralisationMetrics:
    """Train on all data sets, on all but each in turn, and on growing shares; returns what `metrics.json` holds.

    Raises InputError as training does, and for traces of a single data set.
    """
    traces = open_training_traces(config)
    require_answers(traces, config)
    names = sorted({item.dataset for item in traces})
    if len(names) < 2:
        raise InputError(f"--traces {config.traces}: all samples are of {names[0]}; leaving one out takes two")
    require_every_part(traces, names, config)
    prepare_process(config)
    task = open_task(config, traces)
    subsets = {name: without(task.traces, name) for name in names}
    subsets |= {share: part_of(task.traces, share, config.seed) for share in SHARES}

    def measured(samples: Samples) -> PredictorMetrics:
        model = copy.deepcopy(task.model)
        with tempfile.TemporaryDirectory() as folder:
            fit(model, samples, config.one_training(f"{folder}/model"))
        return measure_beside_baselines(model, samples)

    found = {key: measured(subsets[key]) for key in progress(list(subsets), "models trained")}
    whole = found[SHARES[-1]]
    metrics = GeneralisationMetrics(
        whole,
        {name: _seen_and_unseen(name, whole, found[name]) for name in names},
        [_point(subsets[share], found[share]) for share in SHARES],
    )
    replace_folder(Path(config.output), lambda folder: _write(folder, metrics, config))
    return metrics


def require_every_part(traces: Traces, names: list[str], config: GeneraliseConfig) -> None:
    """Raises InputError unless every data set has held-out answers, and every part of the samples some to train on."""
    held_out = {item.dataset for item in traces if item.split == "test" and len(item.input_ids) > item.prompt_len}
    for name in names:
        if name not in held_out:
            raise InputError(f"--traces {config.traces}: {name} has no held-out answers; trace more samples of it")
        require_answers(without(traces, name), config)
    require_answers(part_of(traces, min(SHARES), config.seed), config)


def without(traces: Traces, dataset: str) -> Samples:
    """The training samples of the other data sets, and all held-out samples."""
    return _those(traces, lambda item: item.split == "test" or item.dataset != dataset)


def part_of(traces: Traces, share: float, seed: int) -> Samples:
    """A share of the training samples, each smaller one a part of the larger, and all held-out samples."""
    train = [item.key for item in traces if item.split == "train"]
    order = np.random.default_rng(seed).permutation(len(train))
    kept = {train[index] for index in order[: max(1, round(share * len(train)))]}
    return _those(traces, lambda item: item.split == "test" or item.key in kept)


def _those(traces: Traces, wanted: Callable[[Trace], bool]) -> Samples:
    return subset(traces, [item for item in traces if wanted(item)])


def _seen_and_unseen(name: str, seen: PredictorMetrics, unseen: PredictorMetrics) -> dict[str, float]:
    beside = yardstick().name
    return {
        "seen": seen.numbers.overlap_by_dataset[name],
        "unseen": unseen.numbers.overlap_by_dataset[name],
        f"{beside}_seen": seen.ladder[beside].overlap_by_dataset[name],
        f"{beside}_unseen": unseen.ladder[beside].overlap_by_dataset[name],
    }


def _point(traces: Samples, metrics: PredictorMetrics) -> dict[str, float]:
    tokens, beside = sum(len(item.input_ids) for item in traces if item.split == "train"), yardstick().name
    return {"tokens": tokens, "overlap": metrics.numbers.overlap, beside: metrics.ladder[beside].overlap}


def _write(folder: Path, metrics: GeneralisationMetrics, config: GeneraliseConfig) -> None:
    made = Provenance.of(config)
    metrics.write(folder)
    made.write(folder)
    write_text(folder / "report.html", render_generalisation(metrics, made.to_json()))
