"""Benchmark: what recording costs beside the same forward passes without it, on the lab and on a wider random model.

    python tests/benchmarks/recording_overhead.py [rounds]

Passes with and without recording alternate; the median of their ratios must stay within 3 %.
"""

import statistics
import sys
import time
from contextlib import nullcontext

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec.configs.schema import TargetConfig
from ecospec.tracing.store.layout import encode_experts
from ecospec.tracing.target.loading import load_target
from ecospec.tracing.target.recorder import RoutingRecorder

LIMIT = 1.03
B, T = 8, 128


def wide_model() -> nn.Module:
    """Eight layers of width 1,024, 32 experts of which a token uses 4."""
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def seconds(model: nn.Module, ids_BT: torch.Tensor, recording: bool) -> float:
    """One pass; recorded ids are taken and turned into bytes as a run does."""
    began = time.perf_counter()
    with RoutingRecorder(model) if recording else nullcontext() as recorder:
        model.base_model(input_ids=ids_BT, use_cache=False)
        if recording:
            experts_TLK = recorder.take(ids_BT.numel()).numpy()
            encode_experts(experts_TLK, int(experts_TLK.max()) + 1)
    return time.perf_counter() - began


def ratio(model: nn.Module, rounds: int) -> float:
    ids_BT = torch.randint(model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(0))
    seconds(model, ids_BT, True)
    pairs = [(seconds(model, ids_BT, True), seconds(model, ids_BT, False)) for _ in range(rounds)]
    print(f"plain pass {1000 * statistics.median(plain for _, plain in pairs):.0f} ms", end=", ")
    return statistics.median(recorded / plain for recorded, plain in pairs)


def main(rounds: str = "15") -> int:
    failed = 0
    lab = load_target(TargetConfig(name="lab", dtype="float32", experts_implementation="grouped_mm")).model
    for name, model in (("lab", lab), ("8 layers of width 1,024", wide_model())):
        print(f"{name}, {B} × {T} tokens: ", end="")
        found = ratio(model, int(rounds))
        failed += found > LIMIT
        print(f"with recording {found:.3f} of it (limit {LIMIT})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
