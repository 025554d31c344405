"""What only a GPU can tell about decoding: `python -m tests.gpu.check_decoding [--device cuda] [--output FILE]`.

1. Losslessness of three families, greedy, against `model.generate` on the device: exact in float32, within rounding
   at every first difference in bfloat16.
2. The parts of a step, timed with events, on a random target of real width.
3. Verification seconds against active experts: a least-squares line over passes of 1 to 8 nodes.

Prints JSON; exits 1 when a text differs by more than rounding. Made to end within 8 minutes. Runs on a CPU too, with
`--small`, to try the script itself.

Letters: N nodes of a pass.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig

from ecospec.inference.decoding.generation import generate_with
from ecospec.inference.decoding.method import Method
from ecospec.inference.decoding.statistics import PHASES, StepClock
from ecospec.inference.drafters.eagle3.head import Eagle3Head, default_feature_layers
from ecospec.inference.drafters.growth import TreeDrafter
from ecospec.inference.evaluation.lossless import Probe, compare, first_difference, routed
from ecospec.inference.selection.config import selector
from ecospec.inference.target.cache import RowCache
from ecospec.inference.target.transformers import verify
from ecospec.inference.tree import DraftTree, depths_of, stack
from ecospec.tracing.target.recorder import RoutingRecorder
from tests.tiny import VOCABULARY, tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
NEW_TOKENS = 96
LARGE = {
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 32000,
}
SMALL = {"num_hidden_layers": 6}


def random_head(model: nn.Module) -> TreeDrafter:
    """An untrained EAGLE-3 head of the model's width: its drafts are bad, its cost is right."""
    config = model.config.get_text_config()
    torch.manual_seed(0)
    head = Eagle3Head(
        LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            num_hidden_layers=1,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
        ),
        feature_layers=default_feature_layers(config.num_hidden_layers),
    )
    return TreeDrafter(head.attach_embedding(model.get_input_embeddings()).to(model.device, model.dtype).eval())


def lossless(family: str, dtype: torch.dtype, device: str) -> dict:
    """Texts of three prompts beside stock `generate`; at a first difference both passes' scores."""
    model = tiny_model(family, num_hidden_layers=6).to(device, dtype)
    model.generation_config.eos_token_id = None
    drafter, verdicts = random_head(model), []
    for seed in range(3):
        ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(seed)).to(device)
        expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        found, _ = decode(model, Method(drafter, selector("confidence", 7)), ids, NEW_TOKENS)
        same = torch.equal(expected, found)
        verdicts.append("exact" if same else vars(_difference(model, drafter, ids, expected, found)))
    return {"family": family, "dtype": str(dtype), "texts": verdicts}


def _difference(model: nn.Module, drafter: TreeDrafter, ids: torch.Tensor, expected: torch.Tensor, found: torch.Tensor):
    texts = [text[0, ids.shape[1] :].tolist() for text in (expected, found)]
    at = first_difference(*texts)
    prefix = expected[0, : ids.shape[1] + at]
    scores, experts = [], []
    for method in (Method(), Method(drafter, selector("confidence", 7))):
        probe = Probe(prefix)
        _, run = decode(model, method, ids, at + 1, logits_processor=[probe])
        scores.append(probe.scores_V)
        experts.append(routed(run, 0, at))
    return compare("", at, (texts[0][at], texts[1][at]), scores, experts, model.dtype, sampled=False)


def decode(model: nn.Module, method: Method, ids: torch.Tensor, new_tokens: int, **options):
    return generate_with(model, method, ids, max_new_tokens=new_tokens, do_sample=False, **options)


def step_parts(model: nn.Module, drafter: TreeDrafter) -> dict:
    """Median milliseconds of each part of a step, and of a plain step."""
    ids = torch.randint(3, 200, (1, 64), device=model.device)
    parts = {}
    for name, method in (("plain", Method()), ("speculative", Method(drafter, selector("confidence", 4)))):
        decode(model, method, ids, 16)
        _, run = decode(model, method, ids, 64)
        seconds = [step.clock.seconds() | {"total": step.clock.total()} for step in run.steps]
        parts[name] = {key: 1e3 * float(np.median([s[key] for s in seconds])) for key in (*PHASES, "total")}
    return parts


@torch.inference_mode()
def experts_fit(model: nn.Module, repeats: int) -> dict:
    """seconds = fixed + per_expert · active (layer, expert) pairs + per_token · nodes, and R²."""
    rows = []
    with RoutingRecorder(model) as recorder:
        cache = RowCache(DynamicCache(config=model.config))
        model(torch.randint(3, 200, (1, 64), device=model.device), cache=cache.cache)
        cache.lengths = [64]
        recorder.take()
        for trial in range(-8, repeats):  # negative: warm-up
            N = 1 + trial % 8
            tokens_N = torch.randint(3, 200, (N,), device=model.device)
            parents_N = torch.arange(N, device=model.device) - 1
            trees = stack([DraftTree(tokens_N, parents_N, torch.ones(N, device=model.device), depths_of(parents_N))])
            clock = StepClock(model.device)
            verify(model, cache, trees)
            seconds = clock.stop().total()
            cache.keep([[]], N)
            experts_NLK = recorder.take()
            if trial >= 0:
                active = sum(len(layer.unique()) for layer in experts_NLK.transpose(0, 1))
                rows.append((1.0, active, N, seconds))
    table = np.array(rows)
    solution, *_ = np.linalg.lstsq(table[:, :3], table[:, 3], rcond=None)
    residual = table[:, 3] - table[:, :3] @ solution
    r2 = 1 - residual.var() / table[:, 3].var()
    return dict(zip(("fixed", "per_expert", "per_token"), solution.tolist(), strict=True)) | {"r2": float(r2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny target for parts 2 and 3")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    dtypes = (torch.float32, torch.bfloat16)
    results = {"lossless": [lossless(family, dtype, arguments.device) for family in FAMILIES for dtype in dtypes]}
    model = tiny_model("qwen3_moe", **(SMALL if arguments.small else LARGE)).to(torch.bfloat16).to(arguments.device)
    model.generation_config.eos_token_id = None
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        results[implementation] = {
            "step_ms": step_parts(model, random_head(model)),
            "verify_fit": experts_fit(model, 40 if arguments.small else 400),
        }
    results["seconds"] = time.monotonic() - began
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    broken = [
        verdict
        for case in results["lossless"]
        for verdict in case["texts"]
        if verdict != "exact" and (case["dtype"] == "torch.float32" or not verdict["within_rounding"])
    ]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
