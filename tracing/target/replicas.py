"""Which process of a `torchrun` this is: of a model split over all of them, or a replica that has the model alone.

Transformers splits one model over all processes of a `torchrun` (its mesh must fill the world). So several split
replicas are several `torchrun`s, each with a shard of its own, and without a split each process is a replica.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from ecospec.configs.schema import TargetConfig
from ecospec.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Replica:
    """One of `count` data-parallel copies of the model; only one process of each copy `writes`."""

    index: int
    count: int
    writes: bool


def model_parallel_size(config: TargetConfig) -> int:
    """Processes that share one copy of the model. Raises InputError for sizes that do not go together."""
    sizes = {size for size in (config.tp_size, config.ep_size) if size is not None}
    if len(sizes) > 1:
        raise InputError(
            f"--target.ep_size {config.ep_size}: Transformers splits experts over the processes of "
            f"--target.tp_size {config.tp_size}; give both the same size, or one of them"
        )
    size = next(iter(sizes), 1)
    if size < 1:
        raise InputError(f"--target.tp_size or ep_size {size}: must be at least 1")
    return size


def replica_of(config: TargetConfig, environment: Mapping[str, str] = os.environ) -> Replica:
    """What this process is, by torchrun's RANK and WORLD_SIZE (one process where they are not set).

    Raises InputError when the processes are not as many as the model is to be split over.
    """
    size = model_parallel_size(config)
    rank, world = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    if size == 1:
        return Replica(rank, world, writes=True)
    if world != size:
        raise InputError(
            f"--target.tp_size or ep_size {size}: started as {world} process(es); start {size} with "
            f"torchrun --nproc-per-node, and one torchrun for each further copy of the model"
        )
    return Replica(0, 1, writes=rank == 0)


def broadcast(value: T, config: TargetConfig) -> T:
    """What the first process of a split model has, on all of them; the model is loaded already."""
    if model_parallel_size(config) == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def close_process_group(config: TargetConfig) -> None:
    """Let the processes of a split model wait for each other and close their connections: nothing is computed after."""
    if model_parallel_size(config) > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def split_options(config: TargetConfig, model_config: PreTrainedConfig) -> dict:
    """Options of `from_pretrained` that split a model over the running processes; none for a whole one.

    Raises InputError when the processes are not as many as that, for a family that Transformers cannot split, and for
    experts computed one by one where they are split: those of GPT-OSS then stumble over another process's experts.
    """
    size = model_parallel_size(config)
    if size == 1:
        return {}
    replica_of(config)
    kind = "tp" if config.ep_size is None else "ep"
    text = model_config.get_text_config()
    if not getattr(text, f"base_model_{kind}_plan", None):
        raise InputError(f"--target.{kind}_size {size}: Transformers has no plan to split {text.model_type} so")
    if kind == "ep" and config.experts_implementation == "eager":
        raise InputError("--target.ep_size needs --target.experts_implementation grouped_mm")
    return {"distributed_config": DistributedConfig(tp_size=size, ep_size=1 if kind == "tp" else size)}
