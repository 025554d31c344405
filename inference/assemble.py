"""From configuration to working parts: drafter, predictor, footprint source, and the methods of a comparison."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ecospec.configs.keys import SHORT_FORMS, override
from ecospec.configs.schema import PredictorConfig
from ecospec.data.traces import TraceSet, read_traces
from ecospec.errors import InputError
from ecospec.inference.config import (
    BASELINES,
    DecodeConfig,
    DrafterConfig,
    MethodConfig,
)
from ecospec.inference.decoding.method import Method
from ecospec.inference.drafters.base import BatchDrafter, DraftHead, EachRow
from ecospec.inference.drafters.draft_lm.head import load_language_model_head
from ecospec.inference.drafters.eagle3.checkpoint import load_head
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.drafters.mtp.head import load_mtp_head
from ecospec.inference.drafters.prompt_lookup.lookup import PromptLookupDrafter
from ecospec.inference.footprints.sources import (
    DraftMLPFootprints,
    FootprintSource,
    LastStepFootprints,
    LinearFootprints,
    PredictorFootprints,
    TableFootprints,
)
from ecospec.inference.selection.config import SelectionConfig
from ecospec.predictor.kinds.base import RoutingModel
from ecospec.predictor.kinds.loading import kind_of_model, load_predictor, predictor_values
from ecospec.predictor.kinds.tables import fit_tables
from ecospec.tracing.target.loading import Target, check_moe
from ecospec.tracing.target.names import part_folder, resolve_target

TRAINED = {  # footprints of a model in an exported folder, and what runs it
    "predictor": PredictorFootprints,
    "linear": LinearFootprints,
    "draft_mlp": DraftMLPFootprints,
}
COUNTED = ("frequency", "token")  # footprints counted from traces


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
        return self.baseline is None and self.selection.build().needs_footprints

    @property
    def footprints(self) -> str | None:
        """The name of the footprint source, None without one."""
        return self.selection.footprints if self.needs_footprints else None

    @property
    def trained_folder(self) -> Path | None:
        """Folder of the trained model behind the footprints. Raises InputError when there is none."""
        return part_folder(self.predictor.path, self.footprints) if self.footprints in TRAINED else None


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
        self._heads: dict[tuple, DraftHead] = {}
        self._trained: dict[Path, RoutingModel] = {}

    def method(self, plan: MethodPlan) -> Method:
        """A working method. Raises InputError when head, predictor or traces do not fit the target."""
        return Method(
            drafter=None if plan.baseline else self.drafter(plan.drafter),
            selector=plan.selection.build(),
            footprints=self.footprints(plan) if plan.needs_footprints else None,
        )

    def drafter(self, config: DrafterConfig) -> BatchDrafter:
        """A drafter of its own, on a head that may be shared. Raises InputError when it does not fit the target."""
        if config.kind == "prompt_lookup":
            return EachRow(PromptLookupDrafter(config.steps, config.topk))
        return TreeDrafter(self.head(config), config.steps, config.topk)

    def head(self, config: DrafterConfig) -> DraftHead:
        """A draft head, one for all drafters of a configuration. Raises InputError when it does not fit the target."""
        key = (config.kind, config.path, tuple(config.feature_layers or ()), config.rope_theta)
        if key not in self._heads:
            self._heads[key] = self._load_head(config)
        return self._heads[key]

    def _load_head(self, config: DrafterConfig) -> DraftHead:
        model = self.target.model
        if config.kind == "mtp":
            return load_mtp_head(mtp_source(config, self.target.path), model)
        if config.kind == "draft_lm":
            return load_language_model_head(draft_model_source(config), model, self.target.tokenizer)
        head = load_head(part_folder(config.path, "drafter"), model.config, config.feature_layers, config.rope_theta)
        return head.attach(model).to(model.get_input_embeddings().weight.device)

    def footprints(self, plan: MethodPlan) -> FootprintSource:
        """A source of the method's own, on a model that may be shared. Raises InputError when it does not fit."""
        source, num_experts = plan.selection.footprints, self.target.shape.num_experts
        if source in TRAINED:
            model = self.trained(source, plan.trained_folder)
            if source == "draft_mlp" and plan.drafter.kind in ("eagle3", "mtp"):  # others have no hidden input to give
                model.require_head(self.head(plan.drafter), plan.drafter.steps)
            return TRAINED[source](model)
        if source == "last_step":
            return LastStepFootprints(num_experts)
        if source not in COUNTED:
            raise InputError(
                f"--selection.footprints {source}: is none of {', '.join((*TRAINED, 'last_step', *COUNTED))}"
            )
        return TableFootprints(self._tables[source], num_experts)

    def trained(self, source: str, folder: Path) -> RoutingModel:
        """The trained model of a folder, on the target's embedding. Raises InputError when it does not fit."""
        if folder not in self._trained:
            model = load_trained(source, folder)
            shape = (model.config.num_layers, model.config.num_experts, model.config.num_experts_per_tok)
            check_moe(f"--predictor.path {folder}", shape, self.target.shape.counts)
            model.attach_embedding(self.target.model.get_input_embeddings())
            self._trained[folder] = model.to(self.target.model.device).eval()
        return self._trained[folder]

    @cached_property
    def _tables(self) -> dict:
        traces = open_traces(self.traces, self.target.shape.counts, self.target.config_sha256)
        return fit_tables(traces, self.target.shape.vocab_size)


def source_of(model: RoutingModel) -> FootprintSource:
    """What runs a trained model, whichever kind it is."""
    return TRAINED[kind_of_model(model)](model)


def load_trained(source: str, folder: Path) -> RoutingModel:
    """The trained model behind `source`, without an embedding table. Raises InputError for anything else's folder."""
    predictor_values(folder, source)
    return load_predictor(folder)


def draft_model_source(config: DrafterConfig) -> str:
    """Folder or hub id of a draft language model. Raises InputError when none is named."""
    if config.path is None:
        raise InputError("--drafter.path: not given; say which draft model, a folder or hub id")
    return resolve_target(config.path)


def mtp_source(config: DrafterConfig, target_path: str) -> str:
    """Where the MTP layer is read from: the target's own checkpoint unless another is named."""
    return target_path if config.path in (None, "lab") else config.path


def open_traces(path: str | None, counts: tuple[int, int, int], config_sha256: str | None = None) -> TraceSet:
    """The traces that tables are counted from, of the target with this (L, E, K) and configuration hash.

    Raises InputError when there are none or they are another target's.
    """
    if path is None:
        raise InputError("--selection.footprints: frequency and token are counted from traces; give --traces DIR")
    traces = read_traces(path)
    check_moe(f"--traces {path}", (traces.num_layers, traces.num_experts, traces.top_k), counts)
    recorded = traces.manifest.target
    if config_sha256 not in (None, recorded.config_sha256):
        raise InputError(f"--traces {path}: recorded on {recorded.name}, another target; trace this one")
    return traces
