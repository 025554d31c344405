"""From configuration to working parts: drafter, predictor, footprint source, and the methods of a comparison."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ecospec.configs.keys import SHORT_FORMS, override
from ecospec.configs.schema import PredictorConfig
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
from ecospec.inference.footprints import FootprintSource
from ecospec.inference.selection.config import SelectionConfig
from ecospec.predictor.kinds import kind_named
from ecospec.predictor.kinds.base import FootprintOptions, Kind
from ecospec.tracing.target.loading import Target, part_folder, resolve_target


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
    def kind(self) -> Kind | None:
        """The kind of its footprints, None without any."""
        return kind_named(self.selection.footprints) if self.needs_footprints else None

    @property
    def trained_folder(self) -> Path | None:
        """Folder of the trained model behind the footprints, None without one. Raises InputError where it is none."""
        return self.kind.folder(self.predictor.path) if self.kind else None


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
        self._loaded: dict[tuple, object] = {}

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
        kind = plan.kind
        loaded = self.loaded(kind, plan.predictor.path)
        kind.check_head(loaded, self._reading_head(plan.drafter), plan.drafter.steps)
        return kind.source(loaded)

    def loaded(self, kind: Kind, path: str | None) -> object:
        """What the sources of a kind share, loaded once. Raises InputError when it does not fit the target."""
        key = (kind.name, path if kind.trained else None)
        if key not in self._loaded:
            self._loaded[key] = kind.load(FootprintOptions(path, self.traces), self.target)
        return self._loaded[key]

    def _reading_head(self, config: DrafterConfig) -> DraftHead | None:
        """The draft head that reads the target's features; None for a drafter that has none."""
        if config.kind == "prompt_lookup":
            return None
        head = self.head(config)
        return head if head.feature_layers else None


def draft_model_source(config: DrafterConfig) -> str:
    """Folder or hub id of a draft language model. Raises InputError when none is named."""
    if config.path is None:
        raise InputError("--drafter.path: not given; say which draft model, a folder or hub id")
    return resolve_target(config.path)


def mtp_source(config: DrafterConfig, target_path: str) -> str:
    """Where the MTP layer is read from: the target's own checkpoint unless another is named."""
    return target_path if config.path in (None, "lab") else config.path
