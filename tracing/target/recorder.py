"""Record the expert ids that a model's forward passes execute.

Sees only what enters the experts modules; knows nothing about tokens, padding or files.

Letters: T tokens (batch · sequence, flattened row by row), L MoE layers, K experts per token.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from ecospec.errors import DamageError
from ecospec.tracing.target.routers import MoeSite, find_sites

NO_EXPERT = -1  # stands for an expert without weights, which passes a token on and costs nothing


class RoutingRecorder:
    """While entered, keeps the ids each MoE layer computes with, as executed (not sorted); the hooks copy nothing.

    Raises InputError for a model without routed experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sites = find_sites(model)
        self._records: list[list[Tensor]] = [[] for _ in self._sites]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        self._clear()
        for site, record in zip(self._sites, self._records, strict=True):
            hook = _keep_ids(site, record)
            self._handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def experts(self, expected_rows: int | None = None) -> Tensor:
        """int64 [T, L, K]: the ids of all forward passes since entry or the last `take`, one pass after the other.

        `NO_EXPERT` where a token was routed to an expert without weights, which only LongCat has.

        Raises DamageError when a MoE layer did not run, when layers saw different numbers of tokens, or when the
        number of tokens is not `expected_rows`.
        """
        rows = [sum(len(ids) for ids in record) for record in self._records]
        for site, count in zip(self._sites, rows, strict=True):
            if count == 0:
                raise DamageError(f"{site.name}: recorded no routing; the model computes its experts by another path")
            if count != rows[0]:
                raise DamageError(f"{site.name}: routed {count} tokens where {self._sites[0].name} routed {rows[0]}")
        if expected_rows is not None and rows[0] != expected_rows:
            raise DamageError(f"recorded the routing of {rows[0]} tokens where {expected_rows} were expected")
        experts_TLK = torch.stack([torch.cat(record) for record in self._records], dim=1)
        if getattr(self._sites[0].module, "zero_expert_num", 0):
            experts_TLK = experts_TLK.masked_fill(experts_TLK >= self._sites[0].num_experts, NO_EXPERT)
        return experts_TLK

    def take(self, expected_rows: int | None = None) -> Tensor:
        """As `experts`, and forget them."""
        experts_TLK = self.experts(expected_rows)
        self._clear()
        return experts_TLK

    def _clear(self) -> None:
        for record in self._records:
            record.clear()


def _keep_ids(site: MoeSite, record: list[Tensor]) -> Callable[[nn.Module, tuple, dict], None]:
    def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        ids = args[site.id_position] if len(args) > site.id_position else kwargs[site.id_name]
        record.append(ids.detach())

    return hook
