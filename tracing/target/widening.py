"""Widen the experts of a tiny model until they cost memory traffic as a real model's do, without changing its function.

Each expert's hidden width is padded: random gate and up rows, zero down columns. A padded unit multiplies zeros, so the
output is the same up to rounding, while the bytes read per active expert are `expert_mib`.
"""

import os

import torch
from torch import nn

from ecospec.errors import InputError
from ecospec.tracing.target.routers import find_sites

MIB = 2**20


def widened_width(hidden_size: int, expert_mib: float, itemsize: int) -> int:
    """Expert width at which gate, up and down rows of `hidden_size` together take `expert_mib` MiB."""
    return round(expert_mib * MIB / (3 * hidden_size * itemsize))


@torch.no_grad()
def widen_experts(model: nn.Module, expert_mib: float, seed: int = 0) -> None:
    """Widen every expert of `model` in place.

    Raises InputError when the experts are not fused gate/up/down matrices or are already larger.
    """
    generator = torch.Generator().manual_seed(seed)
    sites = find_sites(model)
    _require_room(expert_mib, sum(site.num_experts for site in sites))
    for site in sites:
        experts = site.module
        _require_plain(experts, site.name)
        E, D, F = experts.down_proj.shape
        width = widened_width(D, expert_mib, experts.down_proj.element_size())
        if width < F:
            raise InputError(f"--target.expert_mib {expert_mib}: the experts already take more than that")
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        gate_up = torch.empty(E, 2, width, D, dtype=gate.dtype)
        if not gate.is_meta:
            gate_up[:, :, F:].normal_(0.0, float(gate.float().std()), generator=generator)
        gate_up[:, 0, :F], gate_up[:, 1, :F] = gate, up
        down = torch.zeros(E, D, width, dtype=gate.dtype)
        down[:, :, :F] = experts.down_proj
        experts.gate_up_proj = nn.Parameter(gate_up.view(E, 2 * width, D), requires_grad=False)
        experts.down_proj = nn.Parameter(down, requires_grad=False)


def _require_room(expert_mib: float, experts: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not 0 < expert_mib * MIB * experts <= memory:
        raise InputError(
            f"--target.expert_mib {expert_mib}: must be positive, and {experts} such experts must fit into "
            f"{memory / 2**30:.0f} GiB"
        )


def _require_plain(experts: nn.Module, name: str) -> None:
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    plain = isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)
    if not plain or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        raise InputError(f"--target.expert_mib: {name} does not keep gate, up and down as plain fused matrices")
