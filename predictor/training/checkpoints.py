"""What training leaves on disk while it goes on: a state to resume from, and the predictors worth keeping.

All of it lies beside the output, in `<output>.training`: `run.json` (which state is the last, of which configuration),
that state as Lightning writes it (a file; a folder for DeepSpeed), the predictor folders `best` and `overlap-0.5`, …
with the held-out overlap in their `metrics.json`, and the logs. No embedding table is in any of it.
"""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import lightning
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ecospec.data.module import Batch
from ecospec.errors import InputError
from ecospec.files import read_json, replace_folder, write_json
from ecospec.predictor.config import ModelFitConfig
from ecospec.predictor.evaluation.metrics import METRICS
from ecospec.predictor.kinds import trained_kinds
from ecospec.predictor.kinds.routing import RoutingConfig, RoutingModel
from ecospec.predictor.objective.overlap import Overlap
from ecospec.predictor.training.module import PredictorModule
from ecospec.provenance import Provenance
from ecospec.tracing.store.manifest import PartFile

RUN, BEST = "run.json", "best"
MAY_CHANGE = ("output", "overwrite", "threads", "loggers")  # keys that a resumed run may change
MADE_FOR = {  # fields of a model's configuration → what they tell apart
    "target_config_sha256": "--target.name: its configuration has changed",
    "embedding_sha256": "--target.name: its embedding table has changed",
    **{field: change for kind in trained_kinds() for field, change in kind.made_for.items()},
}


def training_folder(config: ModelFitConfig) -> Path:
    return Path(f"{config.output.rstrip('/')}.training")


def run_identity(config: ModelFitConfig, parts: list[PartFile], model: RoutingConfig) -> dict:
    """What must be the same for a run to go on: the number of processes, the traces' parts, the keys, what `model` is
    made for.
    """
    keys = {name: value for name, value in asdict(config).items() if name not in MAY_CHANGE}
    made_for = {name: value for name, value in model.to_dict().items() if name in MADE_FOR}
    return {"processes": config.processes, "parts": [part.sha256 for part in parts], **keys, **made_for}


def state_to_resume(folder: Path, run: dict) -> Path | None:
    """The state that an interrupted run left in `folder`, or None.

    Raises InputError, naming both sides, when that run was another one than `run`.
    """
    if not (folder / RUN).exists():
        return None
    left = read_json(folder / RUN)
    now, before = _flat(run), _flat(left["run"])
    for key in now:
        if now[key] != before.get(key):
            raise InputError(
                f"{_named(key, now[key])}: the interrupted run in {folder} had {before.get(key)}; run it with that,"
                " or remove the folder to start afresh"
            )
    return folder / left["last"]


def save_predictor(folder: Path, predictor: RoutingModel) -> None:
    """Weights in float32, whatever they were trained in, and the configuration."""
    state = {name: weight.detach().float().cpu() for name, weight in predictor.state_dict().items()}
    predictor.save_pretrained(folder, state_dict=state)


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """`replace_folder`. Raises OSError also where safetensors could not write."""
    try:
        replace_folder(folder, write)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from None


class Checkpoints(lightning.Callback):
    """Measures held-out overlap every so many steps and at the end, keeps what is worth it, and ends a run early.

    `held_out` gives this process's batches, `made` tells how what is kept came about. An interrupt saves the
    step's state, too.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelFitConfig,
        run: dict,
        held_out: Callable[[], Iterable[Batch]],
        made: Provenance,
    ) -> None:
        self.folder, self.options, self.run, self.held_out, self.made = folder, config, run, held_out, made
        self.best, self.best_step, self.since_best = -1.0, 0, 0
        self.reached: list[float] = []

    def state_dict(self) -> dict:
        names = ("best", "best_step", "since_best", "reached")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.since_best, self.reached = state["since_best"], state["reached"]

    def on_train_start(self, trainer: lightning.Trainer, module: PredictorModule) -> None:
        self._stop_early(trainer)  # a run that was cut off after it had decided to

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: PredictorModule, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        if not module.step_ended(batch_idx):
            return
        every, ended = self.options.validate_every, module.progress() >= 1
        due = every > 0 and (trainer.global_step % every == 0 or ended)
        if not (due or ended or module.interrupted):
            return
        module.require_finite_weights()
        if due:
            self._validate(trainer, module)
        self._save_state(trainer)

    @torch.no_grad()
    def _validate(self, trainer: lightning.Trainer, module: PredictorModule) -> None:
        predictor, metric = module.predictor.eval(), Overlap().to(module.device)
        for batch in self.held_out():
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            metric.update(predictor, batch)
        predictor.train()
        overlap = float(metric.compute())
        module.write_row({"overlap": overlap})
        module.beside_bar["overlap"] = overlap
        module.log_line(f"held-out overlap {overlap:.4f}")
        if trainer.is_global_zero:
            self._keep(overlap, module, trainer.global_step)
        self._remember(overlap, trainer)

    def _keep(self, overlap: float, module: PredictorModule, step: int) -> None:
        names = [f"overlap-{level:g}" for level in self._newly_reached(overlap)]
        for name in [BEST, *names] if overlap > self.best else names:
            write_folder(self.folder / name, lambda folder: self._write(folder, module, overlap, step))

    def _write(self, folder: Path, module: PredictorModule, overlap: float, step: int) -> None:
        save_predictor(folder, module.predictor)
        write_json(folder / METRICS, {"overlap": overlap, "step": step})
        self.made.write(folder)

    def _remember(self, overlap: float, trainer: lightning.Trainer) -> None:
        self.reached += self._newly_reached(overlap)
        self.since_best = 0 if overlap > self.best else self.since_best + 1
        if overlap > self.best:
            self.best, self.best_step = overlap, trainer.global_step
        self._stop_early(trainer)

    def _stop_early(self, trainer: lightning.Trainer) -> None:
        if self.options.early_stopping is not None and self.since_best >= self.options.early_stopping:
            trainer.should_stop = True

    def _newly_reached(self, overlap: float) -> list[float]:
        return [level for level in self.options.checkpoint_overlaps if level <= overlap and level not in self.reached]

    def _save_state(self, trainer: lightning.Trainer) -> None:
        """The new state beside the old one, then the word that it is the last, then the old one goes."""
        name = f"step-{trainer.global_step}.ckpt"
        trainer.save_checkpoint(self.folder / name)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            write_json(self.folder / RUN, {"last": name, "run": self.run})
            remove_states(self.folder, keep=name)


def remove_states(folder: Path, keep: str | None = None) -> None:
    """Remove states to resume from, of which there are several only for a moment, or after a kill."""
    _remove([path for path in folder.glob("step-*.ckpt") if path.name != keep])


def require_nothing_kept(folder: Path, config: ModelFitConfig) -> None:
    """Raises InputError when an earlier run kept predictors that a new one would remove, and `overwrite` is off."""
    if _kept(folder) and not config.overwrite:
        raise InputError(
            f"--output {config.output}: {folder} holds predictors of an earlier run; move them away, choose another"
            " output or add --overwrite"
        )


def start_afresh(folder: Path) -> None:
    """Remove what an earlier run kept, and states that were not finished; its logs stay."""
    remove_states(folder)
    _remove([*_kept(folder), *_unfinished(folder)])


def finish(folder: Path) -> None:
    """The result of training is written: nothing is left to resume, what was kept stays."""
    (folder / RUN).unlink(missing_ok=True)
    remove_states(folder)
    _remove(_unfinished(folder))


def load_weights(predictor: RoutingModel, folder: Path) -> None:
    """Give a float32 `predictor` the weights that were kept in `folder`."""
    predictor.load_state_dict(load_file(folder / "model.safetensors"))


def _kept(folder: Path) -> list[Path]:
    return [*folder.glob(BEST), *folder.glob("overlap-*")]


def _unfinished(folder: Path) -> list[Path]:
    """What `configs.files` had begun to write, or to replace, when it was killed."""
    return [*folder.glob(".*.partial"), *folder.glob(".*.old")]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _named(key: str, value: object) -> str:
    if key in MADE_FOR:
        return MADE_FOR[key]
    if key == "parts":
        return "--traces: their parts have changed"
    return f"this run has {value} processes" if key == "processes" else f"--{key} {value}"
