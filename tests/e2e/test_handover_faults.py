"""A prefill and a decode engine in processes of their own: one is killed, stopped, cut off or paused.

Whatever happens, every client gets one answer within bounded time: the right ids, or an error with a name.
Afterwards all KV pages are free again.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import IO, Any

import httpx
import pytest

from tests.e2e.served import Served, greedy, serve
from tests.support.ports import free_port
from tests.support.shared_client import shared_client
from tests.support.tcp_proxy import TcpProxy

NUM_KV_TOKENS = 512
ROOMS = itertools.count(1)
NAMED = {"kv_peer_lost", "kv_capacity_lost"}  # errors that a request may end with
Answer = dict[str, Any]


def prompt(length: int, seed: int) -> list[int]:
    return [(11 + 17 * seed + 29 * index * (seed + 1)) % 300 + 3 for index in range(length)]


class TwoEngines:
    """A prefill engine and a decode engine, a proxy between them, and clients."""

    def __init__(self, model: Path, logs: Path, **changes: Any) -> None:
        options = {
            "load-format": "dummy",
            "dtype": "float32",
            "device": "cpu",
            "page-size": 4,
            "num-kv-tokens": NUM_KV_TOKENS,
            "max-running-requests": 8,
            "chunked-prefill-size": 16,
            "ping-s": 60,  # an engine that is stopped is not reported as hung
        } | changes
        self.options = [f"--{name}={value}" for name, value in options.items()]
        self.options += [f"--model={model}", "--deterministic"]
        self.num_kv_tokens = int(options["num-kv-tokens"])
        self.model = str(model)
        self._logs = logs
        self._stack = ExitStack()
        self._files: dict[str, IO[str]] = {}
        self.http = shared_client(timeout=90)
        self.threads = ThreadPoolExecutor(256)
        self.kv_port = free_port()  # nobody gets it while the engine is started again
        self.prefill = self.start("prefill", f"--disaggregation-bootstrap-port={self.kv_port}")
        self.decode = self.start("decode")
        self.proxy = TcpProxy(self.kv_port)
        self._expected: dict[tuple[int, int, int], list[int]] = {}

    def start(self, role: str, *options: str) -> Served:
        """Start an engine."""
        log = self._stack.enter_context((self._logs / f"{role}{len(self._files)}.log").open("w+"))
        self._files[log.name] = log
        return self._stack.enter_context(serve("--role", role, *options, *self.options, log=log))

    def log(self) -> str:
        return "".join(Path(name).read_text() for name in self._files)

    def close(self) -> None:
        self.proxy.close()
        for served in (self.prefill, self.decode):
            self.resume(served)
        self._stack.close()
        self.threads.shutdown()
        self.http.close()

    # --- requests ---

    def expected(self, length: int, seed: int, count: int) -> list[int]:
        """Returns the ids that the decode engine gives alone."""
        key = length, seed, count
        if key not in self._expected:
            answer = self.ask(
                self.decode, {"input_ids": prompt(length, seed), "sampling_params": greedy(count)}
            )
            self._expected[key] = answer["output_ids"]
        return self._expected[key]

    def ask(self, served: Served, body: dict[str, Any], timeout: float = 60.0) -> Answer:
        """Returns the reply or the error of one engine, or what broke its connection."""
        try:
            response = self.http.post(served.url + "/generate", json=body, timeout=timeout)
        except httpx.TimeoutException:
            return {"timeout": True}
        except httpx.HTTPError as error:
            return {"broken": repr(error)}
        answer: Answer = response.json()
        return answer

    def split(
        self,
        length: int,
        seed: int,
        count: int = 6,
        *,
        rid: str | None = None,
        room: int | None = None,
        proxied: bool = True,
    ) -> tuple[Future[Answer], Future[Answer]]:
        """Sends a request to both engines; returns their answers."""
        body = {
            "input_ids": prompt(length, seed),
            "sampling_params": greedy(count),
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.proxy.port if proxied else self.kv_port,
            "bootstrap_room": next(ROOMS) if room is None else room,
        } | ({} if rid is None else {"rid": rid})
        return (
            self.threads.submit(self.ask, self.prefill, body),
            self.threads.submit(self.ask, self.decode, body),
        )

    def check(self, answer: Answer, expected: list[int]) -> str:
        """Asserts that an answer is right, or an error with a name; returns what it was."""
        assert "timeout" not in answer, "the client waits for ever"
        if answer.get("object") == "error":
            assert answer["type"] in NAMED and answer["message"], answer
            return str(answer["type"])
        if "broken" in answer:
            return "broken"
        kind = answer["meta_info"]["finish_reason"]["type"]
        ids = answer["output_ids"]
        assert ids == (expected[: len(ids)] if kind == "abort" else expected), (kind, ids, expected)
        return str(kind)

    # --- engines ---

    def info(self, served: Served) -> Answer:
        answer: Answer = self.http.get(served.url + "/server_info").json()
        return answer

    def state(self, served: Served) -> Answer:
        answer: Answer = self.info(served)["internal_states"][0]
        return answer

    def call(self, served: Served, path: str, **body: Any) -> httpx.Response:
        response = self.http.post(served.url + path, json=body)
        assert response.status_code == 200, response.text
        return response

    def until(self, what: str, condition: Any, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)

    def processes(self, served: Served) -> list[int]:
        return [served.process.pid, *served.workers()]

    def num_descriptors(self, pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def stop(self, served: Served) -> None:
        """Stop an engine's worker, which does not answer until :meth:`resume`."""
        for pid in served.workers():
            os.kill(pid, signal.SIGSTOP)

    def resume(self, served: Served) -> None:
        if served.process.poll() is None:
            for pid in served.workers():
                os.kill(pid, signal.SIGCONT)

    def kill(self, served: Served) -> None:
        """Kill an engine with its worker, which also ends by itself behind the engine's end."""
        for pid in self.processes(served):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        served.process.wait(60)

    def check_all_home(self) -> None:
        """Asserts that nothing is left of all requests: no page, slot, offer or lease."""
        for served in (self.prefill, self.decode):
            self.until(
                f"requests, offers or leases are left: {self.state(served)}",
                lambda served=served: self.is_idle(served),
                timeout=40.0,
            )
            response = self.http.post(served.url + "/flush_cache", params={"timeout": 20})
            assert response.status_code == 200, response.text
            state = self.state(served)
            assert state["available_kv_tokens"] == self.num_kv_tokens, state
            assert state["req_to_token_pool_used"] == 0

    def is_idle(self, served: Served) -> bool:
        state = self.state(served)
        handover = state["handover"]
        return not (
            state["running_batch_size"]
            or state["waiting_queue_size"]
            or handover["offers"]
            or handover["leases"]
        )

    def check_alive(self) -> None:
        """Asserts that a new request is handed over."""
        before = self.state(self.decode)["handover"]["num_adopted"]
        expected = self.expected(19, 5, 6)
        first, second = self.split(19, 5)
        assert self.check(first.result(), expected[:1]) == "length"
        assert self.check(second.result(), expected) == "length"
        assert self.state(self.decode)["handover"]["num_adopted"] == before + 1


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    engines = TwoEngines(tiny_model, tmp_path_factory.mktemp("logs"))
    yield engines
    engines.close()


CASES = [(length, seed) for seed, length in enumerate([3, 17, 40, 64, 90, 9, 33, 120])]


def load(engines: TwoEngines, count: int) -> list[tuple[tuple[Future[Answer], Future[Answer]], list[int]]]:
    """Sends `count` requests at once; returns their answers with what is expected."""
    expected = [engines.expected(length, seed, 6) for length, seed in CASES]
    return [
        (
            engines.split(*CASES[index % len(CASES)], rid=f"load-{time.monotonic_ns()}-{index}"),
            expected[index % len(CASES)],
        )
        for index in range(count)
    ]


def results(engines: TwoEngines, requests: Any) -> tuple[list[str], list[str]]:
    """Waits for all answers; returns what those of the prefill and of the decode engine were."""
    firsts = [engines.check(first.result(), expected[:1]) for (first, _), expected in requests]
    seconds = [engines.check(second.result(), expected) for (_, second), expected in requests]
    return firsts, seconds


def test_many_more_requests_than_fit(engines: TwoEngines) -> None:
    firsts, seconds = results(engines, load(engines, 200))
    assert set(firsts) == set(seconds) == {"length"}


def test_the_link_is_cut_again_and_again(engines: TwoEngines) -> None:
    requests, random = load(engines, 30), Random(1)
    while not all(second.done() for (_, second), _ in requests):
        time.sleep(random.uniform(0, 0.1))
        engines.proxy.cut()
    firsts, seconds = results(engines, requests)
    assert set(firsts) == set(seconds) == {"length"}
    engines.check_alive()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_requests_are_aborted_at_any_moment(engines: TwoEngines, side: str) -> None:
    requests, random = load(engines, 60), Random(2)
    served = getattr(engines, side)
    while not all(future.done() for futures, _ in requests for future in futures):
        engines.call(served, "/abort_request", abort_all=True)
        time.sleep(random.uniform(0, 0.15))
    firsts, seconds = results(engines, requests)
    assert set(firsts) | set(seconds) <= {"length", "abort"}
    if side == "prefill":
        assert set(seconds) == {"length"}, "the decode engine computes the prompt itself"
    engines.check_alive()


@pytest.mark.parametrize("mode", ["in_place", "wait", "retract", "abort"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_is_paused_while_requests_are_under_way(engines: TwoEngines, side: str, mode: str) -> None:
    requests, random = load(engines, 40), Random(3)
    served = getattr(engines, side)
    for _ in range(4):
        time.sleep(random.uniform(0, 0.1))
        engines.call(served, "/pause_generation", mode=mode)
        engines.call(served, "/continue_generation")
    firsts, seconds = results(engines, requests)
    assert set(firsts) | set(seconds) <= {"length", "abort"}
    if mode != "abort":
        assert set(firsts) == set(seconds) == {"length"}
    engines.check_alive()


@pytest.mark.parametrize("room", [0, (1 << 63) - 1])
def test_rooms_of_any_size(engines: TwoEngines, room: int) -> None:
    expected = engines.expected(17, 1, 6)
    first, second = engines.split(17, 1, room=room)
    assert engines.check(first.result(), expected[:1]) == engines.check(second.result(), expected) == "length"


def test_a_room_is_for_one_prompt(engines: TwoEngines) -> None:
    room, expected = next(ROOMS), engines.expected(40, 2, 6)
    first, second = engines.split(40, 2, room=room)
    other_first, other_second = engines.split(33, 9, room=room)
    expected_other = engines.expected(33, 9, 6)
    for answers, right in (
        ([first.result(), other_first.result()], [expected[:1], expected_other[:1]]),
        ([second.result(), other_second.result()], [expected, expected_other]),
    ):
        refused = [answer for answer in answers if answer.get("object") == "error"]
        assert len(refused) == 1 and "draw another id" in refused[0]["message"], answers
        served = 1 - answers.index(refused[0])
        assert answers[served]["output_ids"] == right[served], answers
    for again in engines.split(17, 1, room=room):
        assert "draw another id" in again.result()["message"], "the room is remembered"


def test_two_names_of_one_prefill_engine(engines: TwoEngines) -> None:
    engines.check_alive()
    before = engines.proxy.num_accepted
    for proxied in (False, True, False, True):
        first, second = engines.split(17, 1, proxied=proxied)
        first.result()
        assert second.result()["output_ids"] == engines.expected(17, 1, 6)
    assert engines.proxy.num_accepted - before <= 1, "the names do not take the connection from each other"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_is_stopped_for_a_while(engines: TwoEngines, side: str) -> None:
    requests = load(engines, 40)
    served = getattr(engines, side)
    time.sleep(0.1)
    engines.stop(served)
    time.sleep(6.0)  # longer than a connection may be silent
    engines.resume(served)
    firsts, seconds = results(engines, requests)
    assert set(firsts) == set(seconds) == {"length"}
    engines.check_alive()


def test_a_killed_decode_engine_leaves_nothing_behind(engines: TwoEngines) -> None:
    requests = load(engines, 40)
    engines.until("a lease is granted", lambda: engines.state(engines.prefill)["handover"]["num_sent"] > 0)
    engines.kill(engines.decode)
    firsts, _ = results(engines, requests)
    assert set(firsts) == {"length"}
    engines.decode = engines.start("decode")
    engines.check_alive()


def test_a_killed_prefill_engine_costs_no_answer(engines: TwoEngines) -> None:
    requests = load(engines, 40)
    time.sleep(0.2)
    engines.kill(engines.prefill)
    _, seconds = results(engines, requests)
    assert set(seconds) == {"length"}, "the decode engine computes the prompts itself"
    engines.prefill = engines.start("prefill", f"--disaggregation-bootstrap-port={engines.kv_port}")
    engines.check_alive()


@pytest.mark.parametrize("sides", [("prefill",), ("decode",), ("prefill", "decode")], ids="+".join)
def test_weights_are_updated_meanwhile(engines: TwoEngines, sides: tuple[str, ...]) -> None:
    requests = load(engines, 40)
    for index in range(2):
        for side in sides:
            body = {"model_path": engines.model, "load_format": "dummy", "flush_cache": index == 0}
            engines.call(getattr(engines, side), "/update_weights_from_disk", **body)
    firsts, seconds = results(engines, requests)
    assert set(firsts) == set(seconds) == {"length"}
    if len(sides) == 2:
        engines.check_alive()


def test_nothing_is_left_behind(engines: TwoEngines) -> None:
    engines.check_all_home()
    for served in (engines.prefill, engines.decode):
        assert all(engines.num_descriptors(pid) < 100 for pid in engines.processes(served))


def test_the_log_is_not_flooded(engines: TwoEngines) -> None:
    lines = engines.log().splitlines()
    assert "Traceback" not in engines.log()
    assert len(lines) < 500, lines[:20]
