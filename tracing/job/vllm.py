"""Trace through vLLM servers that somebody else started: post token ids, keep what the validator passes.

Each server works on `in_flight` requests at once and takes the next one when it is free, so fast servers take more.
A request that meets a failing server goes back to the queue, where any server may take it. A failing server is asked
again after a wait that doubles, first for a short text of which the routing must be sound, and is given up after
`retries` failures in a row; when no server is left, so is the run. A sample that makes a sound server fail waits by
itself and is rejected after `retries` failures for each server. One that the validator refuses is asked for once more.
"""

import asyncio
import logging
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import httpx2

from ecospec.data.prompts import Prompt
from ecospec.errors import InputError, first_few
from ecospec.tracing.config import EngineConfig
from ecospec.tracing.job.engine import Batch, Outcome, Sampling
from ecospec.tracing.job.validation import EngineError, Rejected, Report, prompt_fault, validate
from ecospec.tracing.job.vllm_wire import (
    advice,
    generating_body,
    message_of,
    refusal,
    report_of,
    require_version,
    tracing_body,
)
from ecospec.tracing.target.loading import MoeShape
from ecospec.tracing.target.requests import Request

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds
CONNECT_SECONDS = 10.0
PROBE = Request(Prompt("probe/0/0", "probe", 0, 0, ""), [], answer_ids=list(range(1, 9)))
TRANSIENT = (408, 429, 502, 503, 504)  # say nothing about the sample that met them
log = logging.getLogger(__name__)


class Unavailable(Exception):
    """A server did not answer, or answered that it cannot now. `on_sample`: the sample may be the cause."""

    def __init__(self, reason: str, on_sample: bool = False) -> None:
        super().__init__(reason)
        self.on_sample = on_sample


class Refused(Exception):
    """A server will not take this sample, now or later."""


@dataclass(eq=False)
class Server:
    """One address and how it has been doing."""

    url: str
    retries: int
    admitted: bool = False
    failures: int = 0  # in a row
    ready_at: float = 0.0  # seconds of the event loop's clock
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def given_up(self) -> bool:
        return self.failures > self.retries


@dataclass(eq=False)
class VllmJob:
    """One request on its way; `failures` counts the server errors that it may itself have caused."""

    request: Request
    outcome: asyncio.Future
    failures: int = 0


class VllmEngine:
    """Client of the servers in `config.url`, which must run one model on one version of vLLM."""

    def __init__(self, config: EngineConfig, shape: MoeShape, sampling: Sampling) -> None:
        self.config, self.shape, self.sampling = config, shape, sampling
        self.urls = [url.rstrip("/") for url in config.url]

    @cached_property
    def identity(self) -> dict:
        """Asks the servers on first use.

        Raises EngineError when none answers within the retries, InputError for a vLLM that is too old.
        """
        return engine_settings(self.config) | asyncio.run(self._identify())

    def trace(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, list[Outcome]]]:
        """As `Engine.trace`. Batches are taken as they are needed: at most two requests wait for each one in flight.

        Raises EngineError when no server is left, when one records no routing, or when they differ.
        """
        _ = self.identity
        stream, loop, stopped = self._stream(iter(batches)), asyncio.new_event_loop(), threading.Event()
        main = threading.current_thread() is threading.main_thread()
        handlers = _take_signals(loop, stopped) if main else {}
        try:
            while (item := loop.run_until_complete(_next(stream))) is not None and not stopped.is_set():
                yield item
            if stopped.is_set():
                raise KeyboardInterrupt
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            loop.run_until_complete(_end(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    async def _stream(self, batches: Iterator[Batch]) -> AsyncIterator[tuple[Batch, list[Outcome]]]:
        servers = [Server(url, self.config.retries) for url in self.urls]
        jobs: asyncio.Queue[VllmJob] = asyncio.Queue()
        async with self._client() as client:
            calls = _Calls(client, self)
            workers = {
                asyncio.create_task(calls.work(server, servers, jobs))
                for server in servers
                for _ in range(self.config.in_flight)
            }
            try:
                async for item in _collect(batches, jobs, set(workers), 2 * len(workers)):
                    yield item
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _identify(self) -> dict:
        """Version and model of the first server that answers."""
        async with self._client() as client:
            for attempt in range(1, self.config.retries + 2):
                for url in self.urls:
                    try:
                        return await _describe(client, url)
                    except Unavailable as failure:
                        if attempt == 1:
                            log.info("%s does not answer yet (%s)", url, failure)
                await asyncio.sleep(wait_before(attempt) if attempt <= self.config.retries else 0)
        raise _none_left(self.urls)

    def _client(self) -> httpx2.AsyncClient:
        timeout = httpx2.Timeout(self.config.timeout, connect=CONNECT_SECONDS)
        return httpx2.AsyncClient(timeout=timeout, limits=httpx2.Limits(max_connections=None))


class _Calls:
    """The requests of one trace, over one client."""

    def __init__(self, client: httpx2.AsyncClient, engine: VllmEngine) -> None:
        self.client, self.engine, self.model = client, engine, engine.identity["model"]

    async def work(self, server: Server, servers: list[Server], jobs: asyncio.Queue[VllmJob]) -> None:
        """Do jobs on `server`, one at a time, until it is given up. Raises EngineError when it was the last."""
        now = asyncio.get_running_loop().time
        while await self._ready(server, servers):
            job = await jobs.get()
            if not server.admitted:  # it failed while this worker waited for a job
                jobs.put_nowait(job)
                continue
            started = now()
            try:
                job.outcome.set_result(await self._outcome(server, job.request))
                server.failures = 0
            except Unavailable as failure:
                if failure.on_sample:
                    self._fail(job, failure, server, len(servers), jobs)
                else:
                    _note_failure(server, servers, failure, started)
                    jobs.put_nowait(job)

    def _fail(
        self, job: VllmJob, failure: Unavailable, server: Server, servers: int, jobs: asyncio.Queue[VllmJob]
    ) -> None:
        """Ask for the sample again after a wait, or reject it; whether the server is to blame, its next probe tells."""
        server.admitted = False
        job.failures += 1
        sample_id = job.request.prompt.sample_id
        log.info("%s, sample %s: %s, %d times so far", server.url, sample_id, failure, job.failures)
        if job.failures > server.retries * servers:
            job.outcome.set_result(Rejected(f"the engine failed on it {job.failures} times ({failure})"))
        else:
            asyncio.get_running_loop().call_later(wait_before(job.failures), jobs.put_nowait, job)

    async def _ready(self, server: Server, servers: list[Server]) -> bool:
        """Wait until `server` may be asked, admitting it where needed; False once it is given up."""
        now = asyncio.get_running_loop().time
        async with server.lock:
            while not (server.admitted or server.given_up):
                await asyncio.sleep(max(0.0, server.ready_at - now()))
                started = now()
                try:
                    await self._admit(server)
                except Unavailable as failure:
                    _note_failure(server, servers, failure, started)
        return server.admitted

    async def _admit(self, server: Server) -> None:
        """Require the same vLLM and model as the other servers', and sound routing of a short text."""
        found, wanted = await _describe(self.client, server.url), self.engine.identity
        for key, value in found.items():
            if value != wanted[key]:
                raise EngineError(f"{server.url}: its {key} is {value}, not {wanted[key]} as of the other servers")
        verdict = await self._outcome(server, PROBE)
        if isinstance(verdict, Rejected):
            raise EngineError(f"{server.url}: {verdict.reason}; {advice(found['version'])}")
        server.admitted = True

    async def _outcome(self, server: Server, request: Request) -> Outcome:
        try:
            outcome = await self._ask(server, request)
            if isinstance(outcome, Rejected):
                log.info("%s, sample %s: %s; asking again", server.url, request.prompt.sample_id, outcome.reason)
                outcome = await self._ask(server, request)
        except Refused as refused:
            return Rejected(str(refused))
        return outcome

    async def _ask(self, server: Server, request: Request) -> Outcome:
        prompt_ids, ids = request.prompt_ids, request.ids
        if request.answer_ids is None and self.engine.sampling.max_new_tokens > 0:
            report = await self._complete(server, generating_body(self.model, request, self.engine.sampling))
            if not self.engine.config.retrace or isinstance(report, Rejected):
                return self._judged(prompt_ids, len(prompt_ids), report)
            fault = prompt_fault(report.read_ids, prompt_ids)
            if fault is not None:
                return Rejected(fault)
            ids = prompt_ids + report.new_ids[:-1]
        return self._judged(ids, len(prompt_ids), await self._complete(server, tracing_body(self.model, ids)))

    def _judged(self, sent_ids: list[int], prompt_len: int, report: Report | Rejected) -> Outcome:
        if isinstance(report, Rejected):
            return report
        return validate(sent_ids, prompt_len, report, self.engine.shape)

    async def _complete(self, server: Server, body: dict) -> Report | Rejected:
        """Raises Unavailable or Refused, and EngineError where the server would fail every sample."""
        status, answer = await _fetch(self.client, "POST", f"{server.url}/v1/completions", body)
        if status != 200:
            raise Refused(refusal(server.url, status, answer))
        report = report_of(answer, body["max_tokens"], self.engine.shape)
        if report is None:
            raise EngineError(
                f"{server.url}: its answers have no routed_experts; {advice(self.engine.identity['version'])}"
            )
        return report


def engine_settings(config: EngineConfig) -> dict:
    """What of an engine's identity is known without asking a server."""
    return {"name": config.kind, "launch": config.launch, "retrace": config.retrace}


def wait_before(failures: int) -> float:
    """Seconds to wait after so many failures in a row: doubling, bounded, spread by half either way."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(failures - 1, 20)) * random.uniform(0.5, 1.5)


async def _collect(
    batches: Iterator[Batch], jobs: asyncio.Queue[VllmJob], workers: set[asyncio.Task], limit: int
) -> AsyncIterator[tuple[Batch, list[Outcome]]]:
    """Batches whose requests are all done; what is done is yielded before a worker's error is raised."""
    open_batches: dict[asyncio.Future, Batch] = {}
    while True:
        while sum(map(len, open_batches.values())) < limit and (batch := next(batches, None)) is not None:
            todo = [VllmJob(request, asyncio.get_running_loop().create_future()) for request in batch]
            open_batches[asyncio.gather(*(job.outcome for job in todo))] = batch
            for job in todo:
                jobs.put_nowait(job)
        if not open_batches:
            return
        done, _ = await asyncio.wait({*open_batches, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for finished in done & open_batches.keys():
            yield open_batches.pop(finished), finished.result()
        for worker in done & workers:
            worker.result()
        workers -= done


def _note_failure(server: Server, servers: list[Server], failure: Unavailable, started: float) -> None:
    """Count a failure, once for all requests that a server drops together. Raises EngineError when none is left."""
    server.admitted = False
    if started < server.ready_at:
        return
    server.failures += 1
    server.ready_at = asyncio.get_running_loop().time() + wait_before(server.failures)
    if server.given_up:
        log.info("%s: given up after %d failures in a row (%s)", server.url, server.failures, failure)
    elif server.failures == 1:
        log.info("%s: %s; what it was doing waits for it, or goes to the other servers", server.url, failure)
    if all(other.given_up for other in servers):
        raise _none_left([other.url for other in servers])


async def _describe(client: httpx2.AsyncClient, url: str) -> dict:
    """The server's `version` of vLLM and `model`. Raises Unavailable, InputError for an old one, or EngineError."""
    answers = []
    for path in ("/version", "/v1/models"):
        status, answer = await _fetch(client, "GET", url + path)
        if status != 200:
            raise EngineError(f"{url}: {refusal(url, status, answer)}")
        answers.append(answer)
    try:
        version, model = str(answers[0]["version"]), str(answers[1]["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise InputError(f"--engine.url {url}: is no vLLM server (it does not say its version and model)") from None
    require_version(url, version)
    return {"version": version, "model": model}


async def _fetch(client: httpx2.AsyncClient, method: str, url: str, body: dict | None = None) -> tuple[int, object]:
    """Status and content, as JSON where it is JSON. Raises Unavailable for what may pass."""
    try:
        response = await client.request(method, url, json=body)
    except httpx2.RequestError as error:
        raise Unavailable(type(error).__name__) from None
    try:
        content = response.json()
    except ValueError:
        content = response.text
    if response.status_code in TRANSIENT or response.status_code >= 500:
        on_sample = response.status_code not in TRANSIENT
        raise Unavailable(f"HTTP {response.status_code}: {message_of(content)}", on_sample)
    return response.status_code, content


def _none_left(urls: list[str]) -> EngineError:
    return EngineError(
        f"no vLLM server answers any more ({first_few(urls)}); what is traced is kept: start them, run again to resume"
    )


async def _next(stream: AsyncIterator) -> object:
    return await anext(stream, None)


def _take_signals(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> dict[int, object]:
    """Let Ctrl-C and a batch system's signal stop `loop`; returns the handlers that they had."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        loop.add_signal_handler(number, _stop, loop, stopped)
    return handlers


def _stop(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    """Taken between two steps of the loop: an exception in the middle of one could get lost in a library."""
    stopped.set()
    for task in asyncio.all_tasks(loop):
        task.cancel()


async def _end(tasks: set[asyncio.Task]) -> None:
    """Cancel `tasks` and see them end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
