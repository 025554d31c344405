"""From configuration to working parts: drafter, predictor, footprint source, and the methods of a comparison."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ecospec.configs.cli import SHORT_FORMS, override
from ecospec.configs.errors import InputError
from ecospec.data.traces import TraceSet, read_traces
from ecospec.inference.config import (
    BASELINES,
    DecodeConfig,
    DrafterConfig,
    MethodConfig,
    PredictorConfig,
    SelectionConfig,
)
from ecospec.inference.decoder import Method
from ecospec.inference.drafters.eagle3 import Eagle3Drafter, Eagle3Head, default_feature_layers
from ecospec.inference.footprints import FootprintSource, PredictorFootprints, TableFootprints
from ecospec.inference.selection import NEEDS_FOOTPRINTS
from ecospec.predictor.model import ExpertPredictor, load_predictor
from ecospec.predictor.simple import fit_frequency, fit_token
from ecospec.tracing.target import MoeShape, Target, lab_folder


@dataclass(frozen=True)
class MethodPlan:
    """One method of a comparison with every default filled in; `baseline` is `none`, `hf_greedy` or None."""

    label: str
    baseline: str | None
    drafter: DrafterConfig
    selection: SelectionConfig
    predictor: PredictorConfig

    @property
    def needs_footprints(self) -> bool:
        return self.baseline is None and self.selection.policy in NEEDS_FOOTPRINTS


def plan_methods(config: DecodeConfig) -> list[MethodPlan]:
    """The methods of `config`, or the one that its top level describes. Raises InputError naming the method's key."""
    methods = config.methods or [MethodConfig(label="EcoSpec")]
    labels = [method.label for method in methods]
    if len(set(labels)) < len(labels):
        raise InputError(f"methods: the labels {labels} are not distinct")
    if sum(method.drafter == "none" for method in methods) > 1:
        raise InputError("methods: only one can be plain (drafter: none); it is what the others are measured against")
    return [_plan(config, method, f"methods[{index}]") for index, method in enumerate(methods)]


def _plan(config: DecodeConfig, method: MethodConfig, where: str) -> MethodPlan:
    baseline = method.drafter if method.drafter in BASELINES else None
    return MethodPlan(
        method.label,
        baseline,
        config.drafter if baseline else _changed(config.drafter, method.drafter, "drafter", where),
        _changed(config.selection, method.selection, "selection", where),
        _changed(config.predictor, method.predictor, "predictor", where),
    )


def _changed(base: object, changes: dict | str | None, group: str, where: str):
    if changes is None:
        return dataclasses.replace(base)
    if not isinstance(changes, dict):
        changes = {SHORT_FORMS[group]: changes}
    return override(base, changes, f"{where}.{group}")


class Workshop:
    """Loads each head, predictor and table once, for all methods that share it."""

    def __init__(self, target: Target, traces: str | None = None) -> None:
        self.target = target
        self.traces = traces
        self._heads: dict[Path, Eagle3Head] = {}
        self._predictors: dict[Path, ExpertPredictor] = {}

    def method(self, plan: MethodPlan) -> Method:
        """A working method. Raises InputError when head, predictor or traces do not fit the target."""
        selection = plan.selection
        return Method(
            drafter=None if plan.baseline else self.drafter(plan.drafter),
            policy=selection.policy,
            gamma=selection.gamma,
            epsilon=selection.epsilon,
            footprints=self.footprints(selection.footprints, plan.predictor) if plan.needs_footprints else None,
        )

    def drafter(self, config: DrafterConfig) -> Eagle3Drafter:
        folder = part_folder(config.path, "drafter")
        if folder not in self._heads:
            head = Eagle3Head.load(folder).attach_embedding(self.target.model.get_input_embeddings())
            self._heads[folder] = head.to(self.target.model.device)
        layers = default_feature_layers(self.target.model.config.get_text_config().num_hidden_layers)
        return Eagle3Drafter(self._heads[folder], layers, config.steps, config.topk)

    def footprints(self, source: str, config: PredictorConfig) -> FootprintSource:
        if source == "predictor":
            return PredictorFootprints(self.predictor(config))
        return TableFootprints(self._tables[source], self.target.shape.num_experts)

    def predictor(self, config: PredictorConfig) -> ExpertPredictor:
        folder = part_folder(config.path, "predictor")
        if folder not in self._predictors:
            predictor = load_predictor(folder)
            shape = (predictor.config.num_layers, predictor.config.num_experts, predictor.config.num_experts_per_tok)
            check_moe(f"--predictor.path {config.path}", shape, self.target.shape)
            predictor.attach_embedding(self.target.model.get_input_embeddings())
            self._predictors[folder] = predictor.to(self.target.model.device).eval()
        return self._predictors[folder]

    @cached_property
    def _tables(self) -> dict:
        traces = open_traces(self.traces, self.target.shape)
        return {"frequency": fit_frequency(traces), "token": fit_token(traces, self.target.shape.vocab_size)}


def part_folder(path: str | None, part: str) -> Path:
    """The folder of a drafter or predictor; `lab` is the shipped one. Raises InputError when there is none."""
    if path is None:
        raise InputError(f"--{part}.path: not given")
    folder = lab_folder(part) if path == "lab" else Path(path)
    if not (folder / "config.json").is_file():
        raise InputError(f"--{part}.path {path}: the folder {folder} has no config.json")
    return folder


def open_traces(path: str | None, shape: MoeShape) -> TraceSet:
    """The traces that tables are counted from. Raises InputError when there are none or they are another target's."""
    if path is None:
        raise InputError("--selection.footprints: frequency and token are counted from traces; give --traces DIR")
    traces = read_traces(path)
    check_moe(f"--traces {path}", (traces.num_layers, traces.num_experts, traces.top_k), shape)
    return traces


def check_moe(what: str, found: tuple[int, int, int], shape: MoeShape) -> None:
    """Raises InputError unless (L, E, K) are the target's."""
    expected = (len(shape.layers), shape.num_experts, shape.top_k)
    if found != expected:
        raise InputError(
            f"{what}: made for a target with {found[0]} MoE layers of {found[1]} experts, top-{found[2]}; "
            f"this target has {expected[0]} of {expected[1]}, top-{expected[2]}"
        )
