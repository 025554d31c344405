"""What a vLLM server is asked and what its answers mean. Pure: no sockets, no waiting.

Facts of vLLM 0.22 to 0.33, read in its source: a server started with `--enable-return-routed-experts` adds to each
completion the base64 of a whole `.npy` file, [rows, decoder layers, K], with rows = prompt + new tokens - 1. Before
0.22 rows could be missing, or be of one node alone.

Letters: T tokens, D decoder layers, K experts per token.
"""

import base64
import io
import re

import numpy as np

from ecospec.errors import InputError, brief
from ecospec.seeds import batch_seed
from ecospec.tracing.job.engine import Sampling
from ecospec.tracing.job.validation import EngineError, Rejected, Report
from ecospec.tracing.target.loading import MoeShape
from ecospec.tracing.target.requests import Request

FLAG = "--enable-return-routed-experts"
OLDEST = (0, 22)  # the first whose rows are complete on every node and behind a prefix cache
KEYED = (0, 31)  # from here on rows are kept by KV block
HEADER_BYTES = 4096  # of an .npy file, generously


def require_version(url: str, version: str) -> None:
    """Raises InputError for a vLLM whose routes are not to be trusted."""
    if _numbers(version) < OLDEST:
        raise InputError(f"--engine.url {url}: vLLM {version} loses routing in silence; use 0.22 or newer")


def advice(version: str) -> str:
    """What to try when a server of `version` returns no routing, or zeros."""
    keyed = "with prefix caching on and Model Runner V2 (0.31 and newer keep routing by KV block), "
    return (
        f"start it with {FLAG}, {keyed if _numbers(version) >= KEYED else ''}without pipeline or context parallelism, "
        "and where the MoE kernel routes by itself (MXFP4 on Hopper, FlashInfer TRTLLM) with --moe-backend marlin"
    )


def tracing_body(model: str, ids: list[int]) -> dict:
    """One row for each of `ids` and none more: the one new token never goes through the model."""
    return _body(model, ids, 1, Sampling(1))


def generating_body(model: str, request: Request, sampling: Sampling) -> dict:
    """As many new tokens as `sampling` says, drawn from its seed and the sample's id alone."""
    body = _body(model, request.prompt_ids, sampling.max_new_tokens, sampling)
    return body if sampling.temperature == 0 else body | {"seed": batch_seed(sampling.seed, [request.prompt.sample_id])}


def _body(model: str, ids: list[int], max_tokens: int, sampling: Sampling) -> dict:
    """Every setting is given: a server takes what is left out from the checkpoint's own generation settings."""
    return {
        "model": model,
        "prompt": ids,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }


def report_of(answer: object, max_tokens: int, shape: MoeShape) -> Report | Rejected | None:
    """What an answer says about its one sequence; None where the server records no routing at all."""
    try:
        (choice,) = answer["choices"]
        read_ids, new_ids = list(choice["prompt_token_ids"]), list(choice["token_ids"])
        value, end = choice["routed_experts"], choice["finish_reason"]
    except (TypeError, KeyError, ValueError):
        return Rejected("the engine's answer lacks its token ids or routing field")
    if end not in ("stop", "length"):
        return Rejected(f"the engine ended it early ({end})")
    if not 1 <= len(new_ids) <= max_tokens:
        return Rejected(f"the engine chose {len(new_ids)} new tokens where 1 to {max_tokens} were asked for")
    if value is None:
        return None
    rows = len(read_ids) + len(new_ids)
    try:
        experts = decode_routing(value, rows * shape.num_layers * shape.top_k * np.dtype(np.int64).itemsize)
    except (TypeError, ValueError, EOFError, MemoryError) as error:
        return Rejected(f"the engine's routing cannot be read ({brief(error)})")
    return Report(read_ids, new_ids, experts)


def decode_routing(value: str, most_bytes: int) -> np.ndarray:
    """The array in base64 of an `.npy` file. Raises ValueError, TypeError, EOFError or MemoryError for anything else.

    Never unpickles; `most_bytes` bounds the ids.
    """
    if len(value) > (most_bytes + HEADER_BYTES) * 4 / 3:
        raise ValueError(f"{len(value)} characters where at most {most_bytes} bytes can be due")
    return np.lib.format.read_array(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)


def refusal(url: str, status: int, body: object) -> str:
    """Why a server refuses one sample with a 4xx. Raises EngineError where it would refuse them all."""
    message = message_of(body)
    if status in (401, 403):
        raise EngineError(f"{url}: asks for a key (HTTP {status}); start the server without --api-key")
    if status in (404, 405):
        raise EngineError(f"{url}: not found there (HTTP {status}: {message}); give the server's root as --engine.url")
    return f"the engine refused it (HTTP {status}: {message})"


def message_of(body: object) -> str:
    """The message of an error answer, old form or new, in one line of at most 300 characters."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
