"""One of the processes that share a target: `torchrun tests/split_decoding.py TARGET PLAN OUTPUT`.

PLAN is `tensor` (every weight split) or `expert` (each process has some of the experts). Decodes a text with
Transformers' own loop and with ours, and writes what came out to OUTPUT/<process number>.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.selection.config import selector
from tests.stand_ins import GREEDY, NoisyOracle

PLANS = {
    "tensor": {"tp_plan": "auto"},
    "expert": {"distributed_config": DistributedConfig(tp_size=2, ep_size=2)},
}
NEW_TOKENS = 24


def decode(model: torch.nn.Module) -> dict:
    """Both texts, and the active experts a pass."""
    ids = torch.arange(5, 12)[None]
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, **GREEDY}
    plain = model.generate(ids, **options)
    method = Method(NoisyOracle(plain[0].tolist(), 0.7), selector("confidence"))
    ours, run = generate_with(model, method, ids, **options)
    return {
        "plain": plain.tolist(),
        "ours": ours.tolist(),
        "active": run.active_experts,
        "alpha": run.acceptance_length,
    }


def main(target: str, plan: str, output: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **PLANS[plan])
    split = sum(isinstance(weight, DTensor) for weight in model.parameters())
    values = {**decode(model), "split": split, "processes": distributed.get_world_size()}
    Path(output, f"{os.environ['RANK']}.json").write_text(json.dumps(values))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
