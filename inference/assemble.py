"""From configuration to working parts: the methods that are meant, and their drafters and footprint sources."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ecospec.configs.keys import SHORT_FORMS, override, renamed
from ecospec.configs.schema import PredictorConfig
from ecospec.errors import InputError
from ecospec.inference.config import (
    BASELINES,
    DecodingConfig,
    DrafterConfig,
    MethodConfig,
    SelectionConfig,
)
from ecospec.inference.decoding.method import Method
from ecospec.inference.drafters.base import BatchDrafter, DraftHead
from ecospec.inference.drafters.kind import DrafterKind, TreeKeys, drafter_kind
from ecospec.inference.footprints import FootprintSource
from ecospec.predictor.kinds import kind_named
from ecospec.predictor.kinds.base import FootprintOptions, Kind
from ecospec.tracing.target.loading import Target


@dataclass(frozen=True)
class MethodPlan:
    """One method of a comparison with every default filled in; `baseline` is `none`, `hf_greedy` or None."""

    label: str
    baseline: str | None
    drafter: DrafterConfig
    selection: SelectionConfig
    predictor: PredictorConfig

    @property
    def drafter_kind(self) -> DrafterKind:
        """The kind of its drafter."""
        return drafter_kind(self.drafter.kind)

    @property
    def kind(self) -> Kind | None:
        """The kind of its footprints, None without any."""
        needed = self.baseline is None and self.selection.build().needs_footprints
        return kind_named(self.selection.footprints) if needed else None

    @property
    def footprints(self) -> str | None:
        """The name of the footprint source, None without one."""
        return self.kind.name if self.kind else None

    @property
    def trained_folder(self) -> Path | None:
        """Folder of the trained model behind the footprints, None without one. Raises InputError where it is none."""
        return self.kind.folder(self.predictor.path) if self.kind else None

    @property
    def tree(self) -> dict[str, int] | None:
        """The shape of its drafts, as its drafter describes it; None for a baseline."""
        return None if self.baseline else self.drafter_kind.shape(self.drafter).described


def plan_methods(
    config: DecodingConfig, selection: SelectionConfig, methods: Sequence[MethodConfig] = ()
) -> list[MethodPlan]:
    """The methods listed, or the one that the top level of `config` and `selection` describe.

    Raises InputError naming the method's key.
    """
    methods = methods or [MethodConfig(label="EcoSpec")]
    labels = [method.label for method in methods]
    if len(set(labels)) < len(labels):
        raise InputError(f"methods: the labels {labels} are not distinct")
    if sum(method.drafter == "none" for method in methods) > 1:
        raise InputError("methods: only one can be plain (drafter: none); it is what the others are measured against")
    return [_plan(config, selection, method, f"methods[{index}]") for index, method in enumerate(methods)]


def _plan(config: DecodingConfig, selection: SelectionConfig, method: MethodConfig, where: str) -> MethodPlan:
    baseline = method.drafter if method.drafter in BASELINES else None
    predictor = _changed(config.predictor, method.predictor, "predictor", where)
    return MethodPlan(
        method.label,
        baseline,
        config.drafter if baseline else _drafter(config, method, where),
        _changed(selection, method.selection, "selection", where),
        predictor_of(config.target.name, predictor.path),
    )


def predictor_of(target: str, path: str | None) -> PredictorConfig:
    """The predictor at `path`, by default the lab's own where the lab is the target."""
    return PredictorConfig(path="lab" if path is None and target == "lab" else path)


def _drafter(config: DecodingConfig, method: MethodConfig, where: str) -> DrafterConfig:
    """The method's drafter; of another kind than the top level's it inherits what both kinds read, and no path."""
    base, changes = config.drafter, method.drafter
    if isinstance(changes, dict) and changes.get("kind", base.kind) != base.kind:
        shared = drafter_kind(base.kind).read_keys & drafter_kind(changes["kind"]).read_keys - {"path"}
        base = DrafterConfig(**{key: getattr(base, key) for key in shared})
    changed = _changed(base, changes, "drafter", where)
    with renamed(f"{where}.drafter"):
        return drafter_kind(changed.kind).complete(changed, config.target.name)


def _changed(base: object, changes: dict | str | None, group: str, where: str):
    if changes is None:
        return dataclasses.replace(base)
    if not isinstance(changes, dict):
        changes = {SHORT_FORMS[group]: changes}
    return override(base, changes, f"{where}.{group}")


class PartsLoader:
    """Loads each head, predictor and table once, for all methods that share it."""

    def __init__(self, target: Target, traces: str | None = None) -> None:
        self.target = target
        self.traces = traces
        self._heads: dict[str, DraftHead | None] = {}
        self._loaded: dict[tuple, object] = {}

    def method(self, plan: MethodPlan) -> Method:
        """A working method. Raises InputError when head, predictor or traces do not fit the target."""
        return Method(
            drafter=None if plan.baseline else self.drafter(plan.drafter),
            selector=plan.selection.build(),
            footprints=self.footprints(plan) if plan.kind else None,
        )

    def drafter(self, config: DrafterConfig) -> BatchDrafter:
        """A drafter of its own, on a head that may be shared. Raises InputError when it does not fit the target."""
        return drafter_kind(config.kind).drafter(self.head(config), config)

    def head(self, config: DrafterConfig) -> DraftHead | None:
        """What drafters of a configuration share, whatever their trees. Raises InputError when it does not fit."""
        shape = {key.name for key in dataclasses.fields(TreeKeys)}
        key = repr({name: value for name, value in vars(config).items() if name not in shape})
        if key not in self._heads:
            self._heads[key] = drafter_kind(config.kind).load_head(config, self.target)
        return self._heads[key]

    def footprints(self, plan: MethodPlan) -> FootprintSource:
        """A source of the method's own, on what may be shared. Raises InputError when it does not fit."""
        loaded = self.loaded(plan.kind, plan.predictor.path)
        head, depth = self.head(plan.drafter), plan.drafter_kind.shape(plan.drafter).depth
        plan.kind.check_head(loaded, head if head is not None and head.feature_layers else None, depth)
        return plan.kind.source(loaded)

    def loaded(self, kind: Kind, path: str | None) -> object:
        """What the sources of a kind share, loaded once. Raises InputError when it does not fit the target."""
        key = (kind.name, path if kind.trained else None)
        if key not in self._loaded:
            self._loaded[key] = kind.load(FootprintOptions(path, self.traces), self.target)
        return self._loaded[key]
