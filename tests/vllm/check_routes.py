"""A real vLLM server and Transformers record the same experts: `python -m tests.vllm.check_routes VLLM_PYTHON`.

Serves a tiny random float32 Qwen3-MoE with the vLLM of VLLM_PYTHON's environment, on the CPU, traces texts through it
and requires every set of experts to be that of a Transformers pass over the same ids. Texts are longer than the token
budget of a step (so that prefill comes in chunks), repeated and with common beginnings (so that the prefix cache is
hit), many at once, generated greedily and sampled, in one request and in two. Prints JSON; exits 1 for any difference.

Sampled texts go one at a time and begin short: on a CPU, vLLM 0.30.0 dies when the prefill of a request with a seed is
split ("CPU Generator does not use offset").

Letters: T tokens, L MoE layers, K experts per token.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import numpy as np

from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt
from ecospec.tracing.config import EngineConfig
from ecospec.tracing.job.engine import Outcome, Sampling, TransformersEngine
from ecospec.tracing.job.validation import Rejected
from ecospec.tracing.job.vllm import VllmEngine
from ecospec.tracing.target.loading import Target, load_target
from ecospec.tracing.target.requests import Request
from tests.tiny import tiny_target_folder

STEP_TOKENS, BLOCK, CONTEXT = 64, 32, 256
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
SERVED = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "HF_HUB_OFFLINE": "1",
}
SAMPLINGS = {"greedy": Sampling(24), "sampled": Sampling(24, 1.0, 0.95, seed=3)}


def forced_requests(seed: int = 0) -> list[Request]:
    """Texts of 1 to 200 tokens, each twice, and eight that share their first 100 tokens."""
    generator = np.random.default_rng(seed)
    draw = lambda tokens: generator.integers(0, 256, tokens).tolist()  # noqa: E731
    texts = [draw(tokens) for tokens in (1, 2, 31, 32, 33, 63, 64, 65, 97, 128, 150, 200)] * 2
    beginning = draw(100)
    texts += [beginning + draw(tokens) for tokens in (1, 5, 20, 28, 29, 60, 90, 100)]
    return [Request(Prompt(f"f/{row}/0", "f", row, 0, ""), ids, []) for row, ids in enumerate(texts)]


def open_requests(longest: int) -> list[Request]:
    prompts = forced_requests(seed=1)
    return [Request(request.prompt, request.prompt_ids[:longest], None) for request in prompts]


@contextmanager
def served(python: str, folder: Path) -> Iterator[str]:
    """The address of a vLLM that serves `folder`; its log goes to `folder`/vllm.log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--enable-return-routed-experts", "--enforce-eager", "--dtype", "float32", "--host", "127.0.0.1"]
    command += ["--block-size", str(BLOCK), "--max-model-len", str(CONTEXT), "--enable-prefix-caching"]
    command += ["--max-num-batched-tokens", str(STEP_TOKENS), "--enable-chunked-prefill", "--max-num-seqs", "16"]
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | SERVED, stdout=output, stderr=output)
    try:
        wait_for(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def wait_for(process: subprocess.Popen, url: str, log: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        except httpx2.RequestError:
            time.sleep(1)
    sys.exit(f"vLLM did not come up; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")


def cache_hits(url: str) -> int:
    """Prompt tokens that the server found in its prefix cache so far."""
    found = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", httpx2.get(f"{url}/metrics").text, re.M)
    return int(sum(map(float, found)))


def compared(outcomes: list[tuple[Request, Outcome]], target: Target) -> dict:
    """Sets of experts of a token and layer, all and those that Transformers has otherwise; samples refused."""
    reference, sets, unequal, refused = TransformersEngine(target.model, target.shape, Sampling(1)), 0, 0, []
    for request, outcome in outcomes:
        if isinstance(outcome, Rejected):
            refused.append(f"{request.prompt.sample_id}: {outcome.reason}")
            continue
        ((_, (truth,)),) = reference.trace([[Request(request.prompt, outcome.input_ids.tolist(), [])]])
        equal_TL = (np.sort(outcome.experts, -1) == np.sort(truth.experts, -1)).all(-1)
        sets, unequal = sets + equal_TL.size, unequal + int((~equal_TL).sum())
    return {"samples": len(outcomes), "sets": sets, "unequal": unequal, "refused": refused}


def traced(engine: VllmEngine, requests: list[Request]) -> list[tuple[Request, Outcome]]:
    batches = [requests[start : start + 4] for start in range(0, len(requests), 4)]
    return [pair for batch, outcomes in engine.trace(batches) for pair in zip(batch, outcomes, strict=True)]


def greedy_texts_differ(outcomes: list[tuple[Request, Outcome]], target: Target) -> int:
    """Samples whose greedy text is not the Transformers engine's."""
    engine = TransformersEngine(target.model, target.shape, SAMPLINGS["greedy"])
    differ = 0
    for request, outcome in outcomes:
        ((_, (own,)),) = engine.trace([[request]])
        differ += not np.array_equal(own.input_ids, outcome.input_ids)
    return differ


def check(url: str, target: Target) -> dict:
    cases = {name: (Sampling(1), {}, forced_requests()) for name in ("forced", "forced again")}
    for retrace in (False, True):
        for name, sampling in SAMPLINGS.items():
            greedy = sampling.temperature == 0
            settings = {"retrace": retrace, "in_flight": 32 if greedy else 1}
            cases[name + ", traced again" * retrace] = (sampling, settings, open_requests(200 if greedy else 60))
    results = {}
    for name, (sampling, settings, requests) in cases.items():
        engine = VllmEngine(EngineConfig(kind="vllm", url=[url], retries=3, **settings), target.shape, sampling)
        before, start = cache_hits(url), time.monotonic()
        outcomes = traced(engine, requests)
        seconds, hits = round(time.monotonic() - start, 2), cache_hits(url) - before
        results[name] = {**compared(outcomes, target), "seconds": seconds, "cached_tokens": hits}
        if name == "greedy":
            results[name]["other_texts"] = greedy_texts_differ(outcomes, target)
    long = Request(Prompt("long/0/0", "long", 0, 0, ""), [7] * (CONTEXT + 1), [])
    ((_, verdict),) = traced(engine, [long])
    return {"vllm": engine.identity["version"], "cases": results, "too_long": str(verdict)}


def sound(result: dict) -> bool:
    cases = result["cases"].values()
    counted = all(case["sets"] and not case["unequal"] and not case["refused"] for case in cases)
    return counted and result["cases"]["forced again"]["cached_tokens"] > 0 and "Rejected" in result["too_long"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("vllm_python", help="the Python of an environment with vLLM")
    python = parser.parse_args().vllm_python
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_target_folder(Path(folder, "target"), "qwen3_moe", **SIZES)
        target = load_target(TargetConfig(name=str(path), dtype="float32"))
        with served(python, path) as url:
            result = check(url, target)
    print(json.dumps(result, indent=1))
    sys.exit(0 if sound(result) else 1)


if __name__ == "__main__":
    main()
