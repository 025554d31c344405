"""Through vLLM servers no sample is lost, doubled or wrong, whatever they do; a fault is named, never recorded."""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ecospec.configs.schema import TargetConfig
from ecospec.data.prompts import Prompt
from ecospec.data.traces import read_traces
from ecospec.errors import InputError
from ecospec.tracing.cli import main
from ecospec.tracing.config import EngineConfig
from ecospec.tracing.job import vllm
from ecospec.tracing.job.engine import Batch, Outcome, Sampling
from ecospec.tracing.job.validation import EngineError, Rejected, Routed
from ecospec.tracing.job.vllm import VllmEngine, engine_settings, wait_before
from ecospec.tracing.store.check import check_folder
from ecospec.tracing.target.loading import MoeShape, load_target_config, shape_of
from ecospec.tracing.target.requests import Request
from tests.vllm_stub import END_ID, FAULTS, StubServer, hashed_experts, hashed_text

SHAPE = MoeShape("stub", (1, 2, 3), 16, 4, 500, 32, 4)  # layer 0 dense
SHAPES = {
    "512 experts": MoeShape("stub", (0, 1), 512, 22, 500, 32, 2),
    "K of 1": MoeShape("stub", tuple(range(12)), 64, 1, 500, 32, 12),
    "three dense layers": MoeShape("stub", tuple(range(3, 9)), 256, 8, 500, 32, 9),
}
RETRIED = ("HTTP 500", "HTTP 429", "dropped")
NEVER_REFUSED = ("no field", *RETRIED)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "FIRST_WAIT", 0.005)
    monkeypatch.setattr(vllm, "LONGEST_WAIT", 0.05)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer(SHAPE) as server:
        yield server


def requests_of(count: int, seed: int = 0, answers: bool = True) -> list[Request]:
    generator = np.random.default_rng(seed)
    draw = lambda most: generator.integers(1, 500, generator.integers(1, most)).tolist()  # noqa: E731
    return [
        Request(Prompt(f"d/{row}/0", "d", row, 0, ""), draw(30), draw(9) if answers else None) for row in range(count)
    ]


def engine_of(*servers: StubServer, sampling: Sampling = Sampling(6), **settings: object) -> VllmEngine:  # noqa: B008
    config = EngineConfig(**{"kind": "vllm", "url": [s.url for s in servers], "in_flight": 4, "retries": 6} | settings)
    return VllmEngine(config, servers[0].shape, sampling)


def batched(requests: list[Request], size: int = 3) -> list[Batch]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def traced(engine: VllmEngine, requests: list[Request], size: int = 3) -> dict[str, Outcome]:
    """Outcomes by sample id; no sample twice."""
    pairs = [
        pair for batch, outcomes in engine.trace(batched(requests, size)) for pair in zip(batch, outcomes, strict=True)
    ]
    outcomes = {request.prompt.sample_id: outcome for request, outcome in pairs}
    assert len(outcomes) == len(pairs)
    return outcomes


def text_of(request: Request, sampling: Sampling = Sampling(6), seed: int | None = None) -> list[int]:  # noqa: B008
    """The reference: what goes through the stub's model."""
    if request.answer_ids is not None:
        return request.ids
    return request.prompt_ids + hashed_text(request.prompt_ids, sampling.max_new_tokens, seed, 500)[:-1]


def assert_true(outcome: Outcome, request: Request, ids: list[int], shape: MoeShape = SHAPE) -> None:
    assert isinstance(outcome, Routed), outcome
    assert outcome.input_ids.tolist() == ids
    assert outcome.prompt_len == len(request.prompt_ids)
    assert np.array_equal(outcome.experts, hashed_experts(ids, shape))


def assert_all_true(outcomes: dict[str, Outcome], requests: list[Request]) -> None:
    assert set(outcomes) == {request.prompt.sample_id for request in requests}
    for request in requests:
        assert_true(outcomes[request.prompt.sample_id], request, text_of(request))


def once(name: str) -> Callable[[dict], str | None]:
    """A fault that hits each text the first time it is asked for."""
    seen: set[str] = set()

    def fault(body: dict) -> str | None:
        text = json.dumps(body["prompt"])
        return None if text in seen else seen.add(text) or name

    return fault


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


# Sound servers


@pytest.mark.parametrize("seed", range(3))
def test_forced_texts_cost_one_request_each_and_come_back_true(stub: StubServer, seed: int) -> None:
    requests = requests_of(20, seed)
    assert_all_true(traced(engine_of(stub), requests), requests)
    assert sorted(body["prompt"] for body in stub.requests) == sorted(request.ids for request in requests)
    assert {body["max_tokens"] for body in stub.requests} == {1}


@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_comes_back_true(name: str) -> None:
    shape, requests = SHAPES[name], requests_of(8)
    with StubServer(shape) as server:
        outcomes = traced(engine_of(server), requests)
    for request in requests:
        assert_true(outcomes[request.prompt.sample_id], request, request.ids, shape)


@pytest.mark.parametrize("retrace", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generated_texts_have_n_plus_m_minus_1_rows(stub: StubServer, retrace: bool, temperature: float) -> None:
    requests, sampling = requests_of(9, 1, answers=False), Sampling(6, temperature, 0.9, seed=5)
    outcomes = traced(engine_of(stub, sampling=sampling, retrace=retrace), requests)
    seeds = {json.dumps(body["prompt"]): body.get("seed") for body in stub.requests if body["max_tokens"] == 6}
    assert len(seeds) == 9 and len(set(seeds.values())) == (9 if temperature else 1)
    for request in requests:
        seed = seeds[json.dumps(request.prompt_ids)]
        assert_true(outcomes[request.prompt.sample_id], request, text_of(request, sampling, seed))
    assert len(stub.requests) == 9 * (1 + retrace)


def test_draws_depend_on_seed_and_sample_id_alone(stub: StubServer) -> None:
    (request,), texts = requests_of(1, answers=False), []
    other = Request(Prompt("d/7/0", "d", 7, 0, ""), request.prompt_ids, None)
    for seed, one in ((1, request), (1, request), (2, request), (1, other)):
        outcome = traced(engine_of(stub, sampling=Sampling(6, 1.0, 1.0, seed)), [one])[one.prompt.sample_id]
        texts.append(outcome.input_ids.tolist())
    assert texts[0] == texts[1] and texts[0] != texts[2] != texts[3] != texts[0]


@pytest.mark.parametrize("retrace", [False, True])
def test_an_empty_answer_leaves_the_prompt_alone(stub: StubServer, retrace: bool) -> None:
    texts = ([1 + number % 499, 1 + number // 499] for number in range(10**5))
    ids = next(ids for ids in texts if hashed_text(ids, 1, None, 500) == [END_ID])
    request = Request(Prompt("d/0/0", "d", 0, 0, ""), ids, None)
    assert_true(traced(engine_of(stub, retrace=retrace), [request])["d/0/0"], request, ids)


def test_nothing_is_left_to_the_checkpoints_own_sampling_settings(stub: StubServer) -> None:
    traced(engine_of(stub, sampling=Sampling(3, 0.7, 0.8)), requests_of(1, answers=False))
    (body,) = stub.requests
    wanted = {"temperature": 0.7, "top_p": 0.8, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "model": "stub"}
    assert {key: body[key] for key in wanted} == wanted


def test_the_manifest_can_say_which_engine_it_was(stub: StubServer) -> None:
    engine = engine_of(stub, launch="vllm serve X --tensor-parallel-size 8")
    known = {"name": "vllm", "launch": "vllm serve X --tensor-parallel-size 8", "retrace": False}
    assert engine_settings(engine.config) == known
    assert engine.identity == {**known, "version": "0.30.0", "model": "stub"}
    assert stub.requests == []


def test_requests_in_flight_are_bounded_and_batches_are_taken_as_needed(stub: StubServer) -> None:
    taken = Counter()

    def batches() -> Iterator[Batch]:
        for batch in batched(requests_of(90), 3):
            taken["samples"] += len(batch)
            yield batch

    stub.fault = lambda _: time.sleep(0.002)
    for finished, _ in enumerate(engine_of(stub, in_flight=2).trace(batches())):
        assert taken["samples"] <= 3 * finished + 2 * 2 + 3 + 3
    assert finished == 29
    assert stub.most_at_once == 2


def test_several_servers_share_the_work_and_a_fast_one_does_more() -> None:
    requests = requests_of(60)
    with StubServer(SHAPE) as fast, StubServer(SHAPE) as slow:
        slow.fault = lambda _: time.sleep(0.05)
        assert_all_true(traced(engine_of(fast, slow, in_flight=2), requests), requests)
        assert len(fast.requests) + len(slow.requests) == 60
        assert len(fast.requests) > 2 * len(slow.requests) > 0


def test_a_run_that_is_broken_off_leaves_no_request_behind(stub: StubServer) -> None:
    stub.fault = lambda _: time.sleep(0.002)
    stream = engine_of(stub).trace(batched(requests_of(60)))
    next(stream)
    stream.close()
    asked = len(stub.requests)
    time.sleep(0.05)
    assert len(stub.requests) <= asked + 4 < 60


# Servers with faults: each is a fault that a public tool has shown


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in NEVER_REFUSED])
def test_a_sample_is_asked_for_once_more_and_then_rejected_with_the_reason(stub: StubServer, fault: str) -> None:
    """Zeros vllm#44116 and #54730, lost rows sglang#20964, shifted layers verl#5037 and slime#810, physical ids
    vllm#33013, minus one vllm#39917, another's answer speculators#279, rows of zeros tpu-inference#2965 and #3583,
    a start that is ignored strands-sglang#72.
    """
    bad, good = requests_of(6)[2], requests_of(6)
    stub.fault = lambda body: fault if body["prompt"] == bad.ids else None
    outcomes = traced(engine_of(stub), good)
    refused = outcomes.pop(bad.prompt.sample_id)
    assert isinstance(refused, Rejected) and refused.reason
    assert sum(body["prompt"] == bad.ids for body in stub.requests) == 2
    assert_all_true(outcomes, [request for request in good if request is not good[2]])


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "no field"])
def test_a_fault_that_passes_loses_nothing(stub: StubServer, fault: str) -> None:
    """A server that refuses work when it is crowded, ray#59194 and #59522, and every fault above, once."""
    requests = requests_of(5)
    stub.fault = once(fault)
    assert_all_true(traced(engine_of(stub, in_flight=2), requests), requests)


@pytest.mark.parametrize("fault", ["zeros first", "last row lost", "another's answer", "one expert twice"])
@pytest.mark.parametrize("retrace", [False, True])
def test_generation_is_judged_as_strictly(stub: StubServer, fault: str, retrace: bool) -> None:
    requests = requests_of(4, answers=False)
    stub.fault = lambda body: fault if body["max_tokens"] == (1 if retrace else 6) else None
    outcomes = traced(engine_of(stub, retrace=retrace), requests)
    assert [type(outcome) for outcome in outcomes.values()] == [Rejected] * 4


def test_text_that_grew_from_another_prompt_is_not_traced_again(stub: StubServer) -> None:
    stub.fault = lambda body: "another's answer" if body["max_tokens"] == 6 else None
    outcomes = traced(engine_of(stub, retrace=True), requests_of(2, answers=False))
    assert all("the engine read" in outcome.reason for outcome in outcomes.values())
    assert {body["max_tokens"] for body in stub.requests} == {6}


@pytest.mark.parametrize("seed", range(3))
def test_equal_prefixes_and_repeats_in_any_order_give_each_its_own_rows(stub: StubServer, seed: int) -> None:
    """speculators#279, and prefix-cache hits as in tpu-inference#3583: alone, again, and after a longer text."""
    long = requests_of(1, seed)[0].ids * 3
    texts = [long[:length] for length in (1, 2, 5, len(long))] * 3
    requests = [Request(Prompt(f"d/{row}/0", "d", row, 0, ""), ids, []) for row, ids in enumerate(texts)]
    np.random.default_rng(seed).shuffle(requests)
    assert_all_true(traced(engine_of(stub), requests, size=5), requests)


def test_a_sample_that_breaks_the_server_each_time_is_rejected_and_the_others_are_not(stub: StubServer) -> None:
    requests = requests_of(8)
    stub.fault = lambda body: "HTTP 500" if body["prompt"] == requests[3].ids else None
    outcomes = traced(engine_of(stub, retries=2), requests)
    refused = outcomes.pop("d/3/0")
    assert refused == Rejected("the engine failed on it 3 times (HTTP 500: as the test asked)")
    assert_all_true(outcomes, requests[:3] + requests[4:])


def test_samples_that_break_the_server_one_after_the_other_do_not_end_the_run(stub: StubServer) -> None:
    requests = requests_of(4)
    stub.fault = lambda body: "HTTP 500" if body["prompt"] != requests[0].ids else None
    outcomes = traced(engine_of(stub, retries=2, in_flight=1), requests)
    assert_true(outcomes.pop("d/0/0"), requests[0], text_of(requests[0]))
    assert len(outcomes) == 3 and all(isinstance(outcome, Rejected) for outcome in outcomes.values())


def test_a_sample_longer_than_the_context_is_rejected_with_the_reason() -> None:
    requests = requests_of(6)
    requests.append(Request(Prompt("d/6/0", "d", 6, 0, ""), list(range(1, 60)), [5]))
    with StubServer(SHAPE, context=50) as server:
        outcomes = traced(engine_of(server), requests)
    refused = outcomes.pop("d/6/0")
    assert "maximum context length is 50 tokens" in refused.reason
    assert sum(body["prompt"] == requests[6].ids for body in server.requests) == 1
    assert_all_true(outcomes, requests[:6])


@pytest.mark.parametrize(
    ("fault", "named"), [("HTTP 404", "give the server's root"), ("HTTP 401", "asks for a key .*without --api-key")]
)
def test_what_no_sample_can_pass_ends_the_run(stub: StubServer, fault: str, named: str) -> None:
    stub.fault = lambda _: fault
    with pytest.raises(EngineError, match=named):
        traced(engine_of(stub), requests_of(2))


def test_a_server_without_the_flag_ends_the_run_and_the_flag_is_named(stub: StubServer) -> None:
    stub.probe_fault = "no field"
    with pytest.raises(EngineError, match="no routed_experts; start it with --enable-return-routed-experts"):
        traced(engine_of(stub), requests_of(2))
    assert stub.requests == []


@pytest.mark.parametrize(("version", "keyed"), [("0.30.0", False), ("0.31.0", True), ("0.33.0rc1+cu130", True)])
def test_kernels_that_route_by_themselves_end_the_run_with_advice(version: str, keyed: bool) -> None:
    """vllm#44116 and #54730."""
    with StubServer(SHAPE, version) as server:
        server.probe_fault = "zeros"
        with pytest.raises(EngineError, match=r"rows of zeros.*--moe-backend marlin") as caught:
            traced(engine_of(server), requests_of(2))
    assert ("prefix caching on and Model Runner V2" in str(caught.value)) == keyed
    assert "pipeline" in str(caught.value)


@pytest.mark.parametrize("version", ["0.21.3", "0.13.0", "0.9.1", "dev"])
def test_a_vllm_that_loses_routing_is_refused(version: str) -> None:
    """vllm#39917: before 0.22, rows of cached or preempted tokens are missing."""
    with StubServer(SHAPE, version) as server, pytest.raises(InputError, match=f"vLLM {version} .* use 0.22"):
        _ = engine_of(server).identity


def test_servers_that_differ_are_refused(stub: StubServer) -> None:
    with StubServer(SHAPE, "0.31.0") as newer, pytest.raises(EngineError, match=r"version is 0\.31\.0, not 0\.30\.0"):
        traced(engine_of(stub, newer), requests_of(30))


def test_an_address_that_is_no_server_root_is_named(stub: StubServer) -> None:
    with pytest.raises(EngineError, match=r"not found there .*server's root"):
        _ = engine_of(stub, url=[stub.url + "/v1"]).identity


# Outages


def test_a_server_that_dies_and_returns_loses_nothing(stub: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    requests = requests_of(40)
    back = threading.Timer(0.1, stub.start)

    def die_once(body: dict) -> str | None:
        if len(stub.requests) == 15:
            threading.Thread(target=lambda: (stub.stop(), back.start())).start()
        return "dropped" if 15 <= len(stub.requests) < 19 else None

    stub.fault = die_once
    assert_all_true(traced(engine_of(stub, retries=30), requests), requests)
    back.join()
    assert "what it was doing waits for it" in caplog.text


def test_the_work_of_a_dead_server_goes_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    requests = requests_of(40)
    with StubServer(SHAPE) as alive, StubServer(SHAPE) as dying:
        dying.fault = lambda _: "dropped"
        alive.fault = lambda _: wait_until(lambda: "given up" in caplog.text)
        outcomes = traced(engine_of(alive, dying, retries=2), requests)
        assert len(dying.requests) > 0
    assert_all_true(outcomes, requests)
    assert sum("given up after 3 failures in a row" in line for line in caplog.messages) == 1


def test_when_all_servers_are_gone_the_run_ends_and_what_was_traced_stays() -> None:
    requests, finished = requests_of(30), []
    with StubServer(SHAPE) as first, StubServer(SHAPE) as second:
        for server in (first, second):
            server.fault = lambda _, server=server: "dropped" if len(server.requests) > 6 else None
        with pytest.raises(EngineError, match=f"no vLLM server answers any more .{first.url}, {second.url}"):
            for batch, outcomes in engine_of(first, second, retries=2).trace(batched(requests, 1)):
                finished.append((batch, outcomes))
    assert 4 <= len(finished) <= 12
    for (request,), (outcome,) in finished:
        assert_true(outcome, request, request.ids)


def test_servers_that_never_answer_are_named(stub: StubServer) -> None:
    engine = engine_of(stub, retries=2)
    stub.stop()
    try:
        with pytest.raises(EngineError, match=f"no vLLM server answers any more .{stub.url}"):
            _ = engine.identity
    finally:
        stub.start()


def test_a_server_that_comes_back_another_is_not_mixed_in(stub: StubServer) -> None:
    def restart(_: dict) -> str | None:
        if len(stub.requests) < 9:
            return None
        stub.version = "0.32.0"
        return "dropped"

    stub.fault = restart
    with pytest.raises(EngineError, match=r"its version is 0\.32\.0, not 0\.30\.0"):
        traced(engine_of(stub), requests_of(30))


def test_waits_double_up_to_a_minute_and_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "FIRST_WAIT", 0.5)
    monkeypatch.setattr(vllm, "LONGEST_WAIT", 60.0)
    for failures in (1, 2, 3, 8, 50):
        waits = {wait_before(failures) for _ in range(50)}
        middle = min(60.0, 0.5 * 2 ** (failures - 1))
        assert len(waits) == 50 and middle / 2 <= min(waits) and max(waits) <= middle * 1.5


def test_prompts_alone_have_a_row_a_token(stub: StubServer) -> None:
    requests = requests_of(9, answers=False)
    for retrace in (False, True):
        outcomes = traced(engine_of(stub, sampling=Sampling(0), retrace=retrace), requests)
        for request in requests:
            assert_true(outcomes[request.prompt.sample_id], request, request.prompt_ids)
    assert {body["max_tokens"] for body in stub.requests} == {1}


# The command


def test_the_command_writes_true_traces_and_asks_for_nothing_the_second_time(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"prompt": "why? " * n, "answer": "é"}) + "\n" for n in range(1, 9))
    )
    shape = shape_of(load_target_config(TargetConfig(name=str(tiny_target))))
    words = ["run", "--target", str(tiny_target), "--prompts", str(tmp_path / "mine.jsonl"), "--teacher_force"]
    with StubServer(shape) as server:
        words += ["--engine", "vllm", "--url", server.url, "--output", str(tmp_path / "traces")]
        assert main(words) == 0
        asked = len(server.requests), server.probes
        assert asked == (8, 1)
        assert main(words) == 0
        assert (len(server.requests), server.probes) == asked
    manifest = check_folder(tmp_path / "traces")
    assert manifest.engine == {
        "name": "vllm",
        "version": "0.30.0",
        "model": "stub",
        "launch": None,
        "retrace": False,
    }
    traces = list(read_traces(tmp_path / "traces"))
    assert len(traces) == 8
    for trace in traces:
        assert np.array_equal(trace.experts, np.sort(hashed_experts(trace.input_ids.tolist(), shape), -1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_at_once_and_the_next_run_loses_nothing(
    tiny_target: Path, tmp_path: Path, number: int
) -> None:
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"prompt": "why? " * n}) + "\n" for n in range(1, 41)))
    shape = shape_of(load_target_config(TargetConfig(name=str(tiny_target))))
    words = ["run", "--target", str(tiny_target), "--prompts", str(tmp_path / "mine.jsonl"), "--max_new_tokens", "4"]
    with StubServer(shape) as server:
        server.fault = lambda _: time.sleep(5 if len(server.requests) > 12 else 0)
        words += ["--engine", "vllm", "--url", server.url, "--batch_size", "2", "--output", str(tmp_path / "traces")]
        code = f"import sys; from ecospec.tracing.cli import main; sys.exit(main({words!r}))"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        wait_until(lambda: len(server.requests) > 12, 60)
        process.send_signal(number)
        stderr = process.communicate(timeout=4)[1]
        assert (process.returncode, "Traceback" in stderr) == (130, False), stderr
        server.fault = lambda _: None
        assert main(words) == 0
    assert {trace.sample_id for trace in read_traces(tmp_path / "traces")} == {f"mine/{row}/0" for row in range(40)}


# Sizes


@pytest.mark.slow
def test_ten_thousand_tiny_samples_are_all_there(stub: StubServer) -> None:
    requests = [
        Request(Prompt(f"d/{row}/0", "d", row, 0, ""), [1 + row % 499, 1 + row // 499], [7]) for row in range(10_000)
    ]
    assert_all_true(traced(engine_of(stub, in_flight=16), requests, size=64), requests)


@pytest.mark.slow
def test_one_sample_of_a_hundred_thousand_tokens(stub: StubServer) -> None:
    ids = np.random.default_rng(0).integers(1, 500, 100_000).tolist()
    request = Request(Prompt("d/0/0", "d", 0, 0, ""), ids, [])
    assert_true(traced(engine_of(stub), [request])["d/0/0"], request, ids)
