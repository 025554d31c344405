"""A stand-in for a vLLM server: the same wire format, routing that is a hash of the text so far, and faults on request.

Equal texts have equal routing up to where they part, as with a real causal model. `StubServer.fault` names a fault
of `FAULTS` for a request body, or None; requests that only ask whether the server is sound are not given to it.

Letters: T tokens, D decoder layers, L MoE layers, E experts, K experts per token, V vocabulary.
"""

import base64
import hashlib
import io
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import numpy as np

from ecospec.tracing.job.vllm import PROBE
from ecospec.tracing.target.loading import MoeShape

END_ID = 0


def hashed_experts(ids: list[int], shape: MoeShape) -> np.ndarray:
    """int64 [T, L, K], distinct within K: the truth that a sound stub tells."""
    digests, running = [], hashlib.sha512()
    for token in ids:
        running.update(token.to_bytes(4, "little"))
        digests.append(np.frombuffer(running.digest(), np.uint16)[: len(shape.layers)])
    first_TL = np.stack(digests).astype(np.int64)
    return (first_TL[..., None] + np.arange(shape.top_k)) % shape.num_experts


def hashed_text(ids: list[int], new: int, seed: int | None, vocabulary: int) -> list[int]:
    """At most `new` tokens after `ids`, up to and with the end token."""
    text = []
    while len(text) < new and END_ID not in text:
        digest = hashlib.sha256(json.dumps([ids, text, seed]).encode()).digest()
        text.append(int.from_bytes(digest[:4], "little") % vocabulary)
    return text


def all_layers(experts_TLK: np.ndarray, shape: MoeShape) -> np.ndarray:
    """[T, D, K] as vLLM gives it: zeros in dense layers, the narrowest type."""
    T, _, K = experts_TLK.shape
    experts_TDK = np.zeros((T, shape.num_layers, K), np.min_scalar_type(shape.num_experts - 1))
    experts_TDK[:, list(shape.layers)] = experts_TLK
    return experts_TDK


def _changed(change: Callable[[np.ndarray, MoeShape], None]) -> Callable[[np.ndarray, MoeShape], np.ndarray]:
    def fault(experts_TDK: np.ndarray, shape: MoeShape) -> np.ndarray:
        copy = experts_TDK.astype(np.int16)
        change(copy, shape)
        return copy

    return fault


def _physical(experts: np.ndarray, shape: MoeShape) -> None:
    experts[-1, shape.layers[0], -1] = shape.num_experts + 1


def _minus(experts: np.ndarray, shape: MoeShape) -> None:
    experts[0, list(shape.layers)] = -1


def _double(experts: np.ndarray, shape: MoeShape) -> None:
    experts[-1, shape.layers[-1], 0] = experts[-1, shape.layers[-1], -1]


def _zero_prompt(experts: np.ndarray, _shape: MoeShape) -> None:
    experts[0] = 0


def _zero_end(experts: np.ndarray, _shape: MoeShape) -> None:
    experts[-1] = 0


ROUTING_FAULTS: dict[str, Callable[[np.ndarray, MoeShape], np.ndarray]] = {
    "zeros": lambda experts, _: np.zeros_like(experts),
    "zeros first": _changed(_zero_prompt),
    "zeros last": _changed(_zero_end),
    "last row lost": lambda experts, _: experts[:-1],
    "a row too many": lambda experts, _: np.concatenate([experts, experts[-1:]]),
    "layers shifted": lambda experts, _: np.roll(experts, -1, axis=1),
    "a layer too many": lambda experts, _: np.concatenate([experts, experts[:, -1:]], axis=1),
    "another K": lambda experts, _: np.concatenate([experts, experts[..., :1]], axis=-1),
    "physical ids": _changed(_physical),
    "minus one": _changed(_minus),
    "one expert twice": _changed(_double),
    "fractions": lambda experts, _: experts.astype(np.float32),
    "flat": lambda experts, _: experts.reshape(-1),
}
TEXT_FAULTS = {  # of the base64 text
    "garbage": lambda _: "!!!not base64!!!",
    "no array": lambda _: base64.b64encode(b"not an array").decode(),
    "cut short": lambda text: text[: len(text) // 2 // 4 * 4],
    "pickled": lambda _: _as_text(np.array([{"a": 1}], dtype=object), pickled=True),
    "huge": lambda text: text + "A" * 100_000,
}
ANSWER_FAULTS = ("another's answer", "wrong prompt ids", "prompt cut", "no prompt ids", "aborted", "no choices")
FAULTS = (*ROUTING_FAULTS, *TEXT_FAULTS, *ANSWER_FAULTS, "no field", "not JSON", "HTTP 500", "HTTP 429", "dropped")


class StubServer:
    """A server on a free port of this machine; `requests` holds the body of every sample asked for."""

    def __init__(self, shape: MoeShape, version: str = "0.30.0", context: int = 10**6) -> None:
        self.shape, self.version, self.context = shape, version, context
        self.fault: Callable[[dict], str | None] = lambda body: None
        self.probe_fault: str | None = None
        self.requests: list[dict] = []
        self.probes = 0
        self.most_at_once = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = _Listener(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def fault_of(self, body: dict) -> str | None:
        with self._lock:
            if body["prompt"] == PROBE.ids:
                self.probes += 1
                return self.probe_fault
            self.requests.append(body)
            return self.fault(body)

    def busy(self, change: int) -> None:
        with self._lock:
            self._busy += change
            self.most_at_once = max(self.most_at_once, self._busy)

    def answer(self, body: dict, fault: str | None) -> dict:
        """The JSON of a completion."""
        ids, V = body["prompt"], self.shape.vocab_size
        if fault == "another's answer":
            ids = [(token + 1) % V for token in ids]
        new_ids = hashed_text(ids, body["max_tokens"], body.get("seed"), V)
        experts_TLK = hashed_experts(ids + new_ids[:-1], self.shape)
        choice = {
            "finish_reason": "abort" if fault == "aborted" else "length",
            "prompt_token_ids": ids,
            "token_ids": new_ids,
            "routed_experts": self._routing(experts_TLK, fault),
        }
        if fault == "wrong prompt ids":
            choice["prompt_token_ids"] = [*ids[:-1], (ids[-1] + 1) % V]
        if fault == "prompt cut":
            choice["prompt_token_ids"] = ids[1:]
        if fault == "no prompt ids":
            choice["prompt_token_ids"] = None
        return {"id": "cmpl-1", "choices": [] if fault == "no choices" else [choice]}

    def _routing(self, experts_TLK: np.ndarray, fault: str | None) -> str | None:
        if fault == "no field":
            return None
        experts = all_layers(experts_TLK, self.shape)
        if fault in ROUTING_FAULTS:
            experts = ROUTING_FAULTS[fault](experts, self.shape)
        text = _as_text(experts)
        return TEXT_FAULTS[fault](text) if fault in TEXT_FAULTS else text


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that leaves is no news: keep the test's output clean."""


class _Handler(BaseHTTPRequestHandler):
    stub: StubServer
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # head and content in one packet

    def do_GET(self) -> None:
        known = {
            "/version": {"version": self.stub.version},
            "/v1/models": {"data": [{"id": "stub", "max_model_len": self.stub.context}]},
        }
        self._send(200 if self.path in known else 404, known.get(self.path, {"message": "Not Found"}))

    def do_POST(self) -> None:
        self.stub.busy(1)
        try:
            self._complete(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        finally:
            self.stub.busy(-1)

    def _complete(self, body: dict) -> None:
        fault = self.stub.fault_of(body)
        if fault == "dropped":
            self.close_connection = True
        elif fault == "not JSON":
            self._send(200, None)
        elif fault is not None and fault.startswith("HTTP "):
            self._send(int(fault.split()[1]), {"error": {"message": "as the test asked"}})
        elif len(body["prompt"]) + body["max_tokens"] > self.stub.context:
            message = f"This model's maximum context length is {self.stub.context} tokens."
            self._send(400, {"error": {"message": message}})
        else:
            self._send(200, self.stub.answer(body, fault))

    def _send(self, status: int, value: object) -> None:
        content = b"<html>" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def _as_text(array: np.ndarray, pickled: bool = False) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return base64.b64encode(file.getvalue()).decode()
