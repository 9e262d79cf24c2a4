"""A prefill engine, a decode engine or the router is killed or stopped at each stage of a request.

Whatever happens, each client gets one complete reply, byte for byte that of a run without faults; only the
connections of clients of a router that dies are lost. Afterwards all pages are free again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from segue.launch.run_dir import remove_orphans
from tests.e2e.fleet import NAMES, FiveServers
from tests.e2e.reading_client import ReadingClient, ReplyRead
from tests.support.tiny_model import write_model

CONTEXT = 4096
PROMPT = 3800  # tokens of the long prompt, which is computed in 238 steps
NUM_REQUESTS = 20  # per fault, in the long form: 104 faults and 2,080 requests

# Bounds, in seconds.
# Without a token, besides the time to notice and what is computed again.
PAUSE_S = {"p0": 0.1, "d0": 0.5, "router": 0.0}
HANGS_S = (
    4.1  # until a hang is noticed: 3 s without a report, 4 s without a word to the partner or a heartbeat
)
# To compute the prompts again, on two slow cores that are shared with the tests beside this one: how much
# longer it takes than the one prompt did a moment before, without other requests; and at least how long.
PREFILL_TIMES = 4.0
PREFILL_S = 4.0
ROUTER_STOPPED_S = 4.0  # longer than it takes an engine to count as hung
ABORT_S = 3.0  # until engines have aborted the requests of a router that died; 1 s where cores are idle
OFFERED_S = 40.0  # until all pages are free: offers wait for 10 s, and the machine may be busy
END_S = 25.0  # until a reply has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to a server. One that is stopped only goes on when the clients have their replies."""

    stops: bool = False
    of: Literal["server", "scheduler"] = "server"  # which processes: all of the server, or only that one
    kills: bool = True  # it is killed; if it was stopped, then once the clients have their replies


# The scheduler's process is an engine's second one; the first one is the server of its HTTP.
FAULTS = {
    "SIGKILL": Fault(),
    "SIGKILL of the scheduler": Fault(of="scheduler"),
    "SIGSTOP": Fault(stops=True, kills=False),
    "SIGSTOP of the scheduler": Fault(stops=True, kills=False, of="scheduler"),
    "SIGSTOP, at last SIGKILL": Fault(stops=True),
}
SERVERS = ("p0", "d0", "router")


@dataclass(frozen=True, slots=True)
class FaultStage:
    """How a request gets to a stage at p0 and d0, and stays there until the fault."""

    prompt: int  # tokens
    outputs: int
    reach: Callable[[FiveServers, Callable[[], ReadingClient]], ReadingClient]


def queued(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    fleet.pause("p0")
    client = send()
    fleet.until("the prompt waits", lambda: "probe" in fleet.state("p0")["waiting_queue_rids"])
    return client


def step_until(fleet: FiveServers, what: str, condition: Callable[[], object]) -> None:
    """Let p0 go on for some steps again and again until it computes the prompt and a condition holds."""

    def holds() -> bool:
        fleet.gate.close_after(2)  # however late the pause comes
        fleet.go_on("p0")
        fleet.pause("p0")
        return "probe" in fleet.state("p0")["chunked_req_rids"] and bool(condition())

    fleet.until(what, holds)
    fleet.gate.open()


def prefilled_without_grant(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    fleet.pause("d0")
    client = queued(fleet, send)
    step_until(fleet, "a claim", lambda: fleet.state("p0")["handover"]["offers"].get("claimed"))
    return client


def first_token_known(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    fleet.pause("d0")
    client = send()
    client.wait(1)
    assert fleet.state("d0")["handover"]["leases"].get("queued")
    return client


def granted(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    client = queued(fleet, send)
    step_until(fleet, "pages are granted", lambda: fleet.state("d0")["handover"]["leases"].get("granted"))
    return client


def pushing(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    client = queued(fleet, send)
    step_until(fleet, "pages are pushed", lambda: fleet.state("p0")["handover"]["offers"].get("sending"))
    fleet.go_on("p0")
    return client


def behind_sent(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    client = granted(fleet, send)
    fleet.pause("d0")
    fleet.go_on("p0")
    fleet.until("all pages are sent", lambda: fleet.state("d0")["handover"]["leases"].get("landed"))
    return client


def decoding(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    client = send()
    client.wait(4)
    return client


def ending(fleet: FiveServers, send: Callable[[], ReadingClient]) -> ReadingClient:
    client = send()
    client.wait(59)
    return client


STAGES = {
    "queued": FaultStage(20, 40, queued),
    "prefilling": FaultStage(PROMPT, 40, prefilled_without_grant),
    "first token known": FaultStage(20, 40, first_token_known),
    "granted": FaultStage(PROMPT, 40, granted),
    "pushing": FaultStage(PROMPT, 40, pushing),
    "behind Sent": FaultStage(PROMPT, 40, behind_sent),
    "decoding": FaultStage(20, 200, decoding),
    "ending": FaultStage(20, 60, ending),
}


# Here the client has nothing yet. When d0 is lost, d1 claims the KV.
CLAIMED_AGAIN = ("queued", "prefilling", "granted", "pushing")


def prompt(length: int, seed: int) -> list[int]:
    return [(11 + 17 * seed + 29 * index * (seed + 1)) % 300 + 3 for index in range(length)]


def generate(length: int, outputs: int, seed: int, stream: bool = True) -> tuple[str, dict[str, Any]]:
    params = {"temperature": 0, "max_new_tokens": outputs, "ignore_eos": True}
    return "/generate", {"input_ids": prompt(length, seed), "sampling_params": params, "stream": stream}


def chat(words: int, outputs: int) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "Hello world " * words}], "model": "tiny-model"}
    params = {"temperature": 0, "max_tokens": outputs, "ignore_eos": True, "stream": True}
    return "/v1/chat/completions", body | params


def respond(words: int, outputs: int) -> tuple[str, dict[str, Any]]:
    params = {"temperature": 0, "max_output_tokens": outputs, "ignore_eos": True, "stream": True}
    return "/v1/responses", {"input": "Hello world " * words, "model": "tiny-model"} | params


# The other requests of a scenario.
OTHERS = [
    generate(7, 30, 1),
    generate(33, 60, 2, stream=False),
    chat(3, 200),
    generate(90, 24, 3),
    generate(150, 90, 4),
    respond(20, 150),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """What clients saw of one fault."""

    server: str
    fault: str
    num_requests: int
    num_lost: int  # replies that broke off
    pause_s: float  # the longest time that one of them got nothing new
    end_s: float  # from the fault to the end of the last reply
    home_s: float  # from then on, or from the end of a server that hung, until all pages were free
    moved: dict[str, int]  # what the router counted


class FaultRuns:
    """The servers, what each request gets without faults, and what came of each fault so far."""

    def __init__(self, fleet: FiveServers) -> None:
        self.fleet = fleet
        self.results: list[FaultResult] = []
        self._num_probes = 0
        self._alone_s = 0.0  # what the last request that was new took
        self._expected: dict[str, ReplyRead] = {}

    def expected(self, path: str, body: dict[str, Any]) -> ReplyRead:
        key = json.dumps([path, body])
        if key not in self._expected:
            # Not by the router, which would remember where the KV of the prompt is.
            began = time.monotonic()
            found = ReadingClient(self.fleet.url("d1"), path, body, END_S).result(END_S)
            assert found.has_ended_once, found
            self._expected[key] = found
            self._alone_s = found.ended_at - began
            self.fleet.post("d1", "/flush_cache?timeout=10")
        return self._expected[key]

    def send(self, path: str, body: dict[str, Any], **fields: Any) -> ReadingClient:
        return ReadingClient(self.fleet.url("router"), path, body | fields, END_S)

    def run(self, stage: str, server: str, fault: str, num_requests: int) -> None:
        """Bring requests to a stage, do the fault, and check every reply and what is left."""
        try:
            self._run(stage, server, fault, num_requests)
        finally:
            self.fleet.mend()
            assert not self.fleet.tracebacks(), self.fleet.tracebacks()
        self.fleet.check_home()
        self.check_serving()

    def _run(self, stage: str, server: str, name: str, num_requests: int) -> None:
        fleet, fault = self.fleet, FAULTS[name]
        # A prompt of its own: no engine has its KV, and the router does not believe that one has.
        self._num_probes += 1
        probe = generate(STAGES[stage].prompt, STAGES[stage].outputs, 100 + self._num_probes)
        bodies = [probe, *(OTHERS[index % len(OTHERS)] for index in range(num_requests - 1))]
        expected = [self.expected(*body) for body in reversed(bodies)][::-1]
        before = fleet.counters()
        clients = self._reach(stage, bodies)
        pids = fleet.pids(server)[1:] if fault.of == "scheduler" else fleet.pids(server)
        began = time.monotonic()
        if fault.stops:
            fleet.stop(pids)
        else:
            fleet.kill(server, pids[:1])
        for other in {"p0", "d0"} - {server}:
            fleet.go_on(other)
        if server == "router":
            self._end_router_fault(fault, pids)
        if server == "router" and fault.kills:
            self._check_cut(clients, expected)
        else:
            self._check_whole(clients, expected)
        replies = [client.got for client in clients]
        pause_s = max(reply.longest_pause(began) for reply in replies)
        prefill_s = max(PREFILL_S, PREFILL_TIMES * self._alone_s)
        assert pause_s < PAUSE_S[server] + HANGS_S * fault.stops + prefill_s
        ended = time.monotonic()
        moved: dict[str, int] = {}
        if server != "router":
            after = fleet.counters()
            moved = {key: value - before[key] for key, value in after.items() if value > before[key]}
            self._end_fault(server, fault, pids)
        if server == "d0" and stage in CLAIMED_AGAIN:
            assert moved.get("second_claims"), "no prompt is computed twice, but d1 claims the KV"
        fleet.check_home([each for each in NAMES if each != server or not fault.kills], OFFERED_S)
        result = FaultResult(
            server=server,
            fault=name,
            num_requests=num_requests,
            num_lost=sum(not reply.has_ended_once for reply in replies),
            pause_s=pause_s,
            end_s=max(reply.ended_at for reply in replies) - began,
            home_s=time.monotonic() - ended,
            moved=moved,
        )
        self.results.append(result)
        print(stage, result)

    def _end_fault(self, server: str, fault: Fault, pids: list[int]) -> None:
        """Let what was stopped go on, or kill it."""
        if fault.stops and fault.kills:
            self.fleet.kill(server, pids[:1])
        self.fleet.wake()
        if server != "router" and not fault.kills:
            self.fleet.until(f"{server} is well", lambda: self.fleet.is_well(server))

    def _end_router_fault(self, fault: Fault, pids: list[int]) -> None:
        """Do so with a router: its clients get nothing before that."""
        if fault.stops:
            time.sleep(ROUTER_STOPPED_S)  # the fault itself
            self._end_fault("router", fault, pids)

    def _reach(self, stage: str, bodies: list[tuple[str, dict[str, Any]]]) -> list[ReadingClient]:
        """Send the requests to p0 and d0, and bring the first one to a stage."""
        fleet, clients = self.fleet, list[ReadingClient]()
        for other in ("p1", "d1"):
            fleet.drain(other, True)

        def send() -> ReadingClient:
            clients.append(self.send(*bodies[0], rid="probe"))
            clients.extend(self.send(*body) for body in bodies[1:])
            return clients[0]

        try:
            STAGES[stage].reach(fleet, send)
        except AssertionError as error:
            got = [client.got for client in clients[:1]]
            raise AssertionError(
                f"{error}; the client has {got}, the engines are {fleet.workers()}"
            ) from error
        for other in ("p1", "d1"):
            fleet.drain(other, False)
        return clients

    def _check_whole(self, clients: list[ReadingClient], expected: list[ReplyRead]) -> None:
        """Check that each client gets all of its reply, and once."""
        for client, reply in zip(clients, expected, strict=True):
            got = client.result(END_S)
            assert got.has_ended_once, got
            assert got.content == reply.content

    def _check_cut(self, clients: list[ReadingClient], expected: list[ReplyRead]) -> None:
        """Check what a router leaves that was killed: replies that end, and engines that abort."""
        for client, reply in zip(clients, expected, strict=True):
            got = client.result(60)
            assert got.error or (got.has_ended_once and got.content == reply.content), got
            assert got.num_ends <= 1 and reply.text.startswith(got.text)

        def no_requests() -> bool:
            states = [self.fleet.state(each) for each in NAMES]
            return not any(s["running_batch_size"] or s["waiting_queue_size"] for s in states)

        self.fleet.until("the engines abort the requests", no_requests, ABORT_S)

    def check_serving(self) -> None:
        """Assert that every engine gets requests again, and answers them."""
        fleet = self.fleet
        for name in NAMES:
            fleet.until(f"the router sends requests to {name}", lambda name=name: fleet.serves(name))
        for name in NAMES:
            others = [other for other in NAMES if other != name and other[0] == name[0]]
            for other in others:
                fleet.drain(other, True)
            got = self.send(*OTHERS[0]).result(END_S)
            assert (got.error, got.content) == ("", self.expected(*OTHERS[0]).content)
            for other in others:
                fleet.drain(other, False)
        assert all(worker["breaker"] == "closed" for worker in fleet.workers())

    def summary(self) -> Iterator[str]:
        """Yield a line per kind of fault and server, and one for all."""
        if not self.results:
            return
        kinds = sorted({(result.server, result.fault) for result in self.results})
        for kind in [*kinds, ("all", "faults")]:
            found = [r for r in self.results if (r.server, r.fault) == kind or kind[0] == "all"]
            figures = {
                "faults": len(found),
                "requests": sum(r.num_requests for r in found),
                "lost": sum(r.num_lost for r in found),
                "longest pause": f"{max(r.pause_s for r in found):.2f} s",
                "last end": f"{max(r.end_s for r in found):.2f} s",
                "pages home": f"{max(r.home_s for r in found):.2f} s",
            }
            yield f"{kind[0]}, {kind[1]}: " + ", ".join(f"{name} {value}" for name, value in figures.items())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRuns]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny-model", max_position_embeddings=CONTEXT)
    files = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(files))
        patch.setenv("OMP_NUM_THREADS", "1")
        fleet = FiveServers(model, tmp_path_factory.mktemp("logs"))
        runs = FaultRuns(fleet)
        yield runs
        fleet.close()
    print(*runs.summary(), sep="\n")
    remove_orphans(files)  # of engines that were killed, as the next engine does
    assert os.listdir(files) == []


@pytest.mark.parametrize(
    ("stage", "server", "fault"),
    [
        pytest.param("granted", "d0", "SIGSTOP, at last SIGKILL", marks=pytest.mark.slow),
        ("pushing", "p0", "SIGKILL"),
        pytest.param("decoding", "router", "SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_fault(runs: FaultRuns, stage: str, server: str, fault: str) -> None:
    runs.run(stage, server, fault, num_requests=8)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_fault_at_every_stage(runs: FaultRuns, stage: str, server: str, fault: str) -> None:
    if server == "router" and FAULTS[fault].of == "scheduler":
        pytest.skip("a router is one process")
    runs.run(stage, server, fault, NUM_REQUESTS)
