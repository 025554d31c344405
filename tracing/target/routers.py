"""Find the routed experts of a loaded Transformers model.

A MoE site is the experts module of one decoder layer. Transformers computes experts in one `*Experts` module whose
`forward` takes the chosen ids, so those ids are what really runs: after correction bias, groups and all.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache

from torch import nn
from transformers import PreTrainedConfig

from ecospec.errors import InputError

ID_ARGUMENTS = ("top_k_index", "router_indices")
TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
REFUSED = {
    "llama4": "its experts run on every token, so routing changes no cost",
    "llama4_text": "its experts run on every token, so routing changes no cost",
    "jetmoe": "its experts take sorted lists, not ids",
    "doge": "it has product-key memories, not experts",
}
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")


@dataclass(frozen=True)
class MoeSite:
    """The experts module of one decoder layer: `layer` is the model's own layer number."""

    layer: int
    name: str
    module: nn.Module
    id_position: int  # of the [tokens, K] ids among the positional arguments of the module's forward
    id_name: str

    @property
    def num_experts(self) -> int:
        """Experts with weights: ids from here on mean that a token passes unchanged (LongCat)."""
        return int(getattr(self.module, "num_routed_experts", None) or self.module.num_experts)


def find_sites(model: nn.Module) -> list[MoeSite]:
    """The MoE sites of `model` in layer order. Raises InputError when there is none or the family is unsupported."""
    family = model.config.get_text_config().model_type
    if family in REFUSED:
        raise InputError(f"target family {family} is not supported: {REFUSED[family]}")
    sites = [site for name, module in model.named_modules() if (site := _site(name, module))]
    if not sites:
        raise InputError(f"{model.config.name_or_path or family}: no routed experts found; EcoSpec needs a MoE target")
    return sorted(sites, key=lambda site: site.layer)


def top_k_of(config: PreTrainedConfig) -> int:
    """K, experts per token, under whichever name the family keeps it. Raises InputError when none is set."""
    values = config.get_text_config().to_dict()
    values.update(values.get("ffn_config") or {})  # where DBRX keeps it
    attribute_map = getattr(config.get_text_config(), "attribute_map", None) or {}
    for name in TOP_K_NAMES:
        value = values.get(name, values.get(attribute_map.get(name, name)))
        if isinstance(value, int):
            return value
    raise InputError(f"model type {config.model_type}: its config does not say how many experts a token uses")


def require_k_experts(config: PreTrainedConfig) -> None:
    """Raises InputError for a model whose tokens may use fewer than K experts with weights, which no trace can hold."""
    text = config.get_text_config()
    without = getattr(text, "zero_expert_num", None)
    if without:
        raise InputError(
            f"target family {text.model_type} cannot be traced: {without} of its experts have no weights, so that a "
            "token may use fewer than K, and a trace holds exactly K for each token and layer"
        )


def _site(name: str, module: nn.Module) -> MoeSite | None:
    ids = _id_argument(type(module))
    layer = _LAYER.search(name) if ids else None
    return MoeSite(int(layer.group(1)), name, module, *ids) if layer else None


@cache
def _id_argument(kind: type[nn.Module]) -> tuple[int, str] | None:
    """Position and name of the chosen ids in the forward of experts modules, None for other modules."""
    parameters = list(inspect.signature(kind.forward).parameters)[1:]
    for position, parameter in enumerate(parameters):
        if parameter in ID_ARGUMENTS and any("weights" in other for other in parameters):
            return position, parameter
    return None
