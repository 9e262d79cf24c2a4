"""Two prefill engines, two decode engines and a router, each a process that a test can kill or stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from segue.listener import bind
from tests.e2e.served import Served, serve
from tests.support.child import start_child
from tests.support.held_steps import StepGate
from tests.support.polling import rest

NAMES = ("p0", "p1", "d0", "d1")
NUM_KV_TOKENS = 16384
OPTIONS = {
    "load-format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "page-size": "16",
    "num-kv-tokens": str(NUM_KV_TOKENS),
    "max-running-requests": "64",
    "chunked-prefill-size": "16",
    "exit-grace": "0.5",  # of an engine whose scheduler was killed
}
TRACEBACK = "Traceback (most recent call last)"
COUNTERS = re.compile(r"^segue:router_(\w+)_total ([0-9.]+)$", re.MULTILINE)


class FiveServers:
    """The servers. Each keeps its port when it is started again; `gate` holds the steps of p0."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._logs = logs
        self.gate = StepGate(logs.with_name(f"{logs.name}-steps"))
        self._stack = ExitStack()
        self._options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        self._options += [f"--model={model}", "--deterministic"]
        self._ports = {name: self._stack.enter_context(bind("127.0.0.1", 0)) for name in (*NAMES, "router")}
        self.http = self._stack.enter_context(httpx.Client(timeout=60))
        self.engines: dict[str, Served] = {}
        self._stopped: set[int] = set()  # processes
        self._killed: set[str] = set()
        self._seen: set[int] = set()  # processes of all engines and routers so far
        with ThreadPoolExecutor(len(NAMES)) as threads:
            self.engines.update(zip(NAMES, threads.map(self._serve, NAMES), strict=True))
        self.router = self._route()
        self.until("the router has all engines", self.is_complete)

    def url(self, name: str) -> str:
        return f"http://{self.id(name)}"

    def id(self, name: str) -> str:
        """The id of an engine in the router."""
        return f"127.0.0.1:{self._ports[name].getsockname()[1]}"

    # --- processes ---

    def _log(self, name: str) -> IO[str]:
        return self._stack.enter_context((self._logs / f"{name}.log").open("a"))

    def _serve(self, name: str) -> Served:
        role = "prefill" if name.startswith("p") else "decode"
        port = self._ports[name].getsockname()[1]
        words = ["--role", role, f"--port={port}", *self._options]
        if role == "prefill":
            words.append("--disaggregation-bootstrap-port=0")
        gate = self.gate if name == "p0" else None
        served = self._stack.enter_context(serve(*words, log=self._log(name), gate=gate))
        self._seen.update((served.process.pid, *served.workers()))
        return served

    def _route(self) -> subprocess.Popen[str]:
        words = [f"--port={self._ports['router'].getsockname()[1]}", "--log-level", "warning", "--drain-s=0"]
        words += ["--worker", *map(self.url, NAMES)]
        command = [sys.executable, "-m", "segue", "router", *words]
        process = start_child(command, stdout=subprocess.PIPE, stderr=self._log("router"), text=True)
        self._seen.add(process.pid)
        assert process.stdout is not None and "http://" in process.stdout.readline()
        return process

    def pids(self, name: str) -> list[int]:
        """The processes of a server that runs."""
        if name == "router":
            return [self.router.pid]
        return [self.engines[name].process.pid, *self.engines[name].workers()]

    def kill(self, name: str, pids: Sequence[int]) -> None:
        """Kill processes of a server; its other ones must end by themselves."""
        self._killed.add(name)
        for pid in pids:
            self._stopped.discard(pid)
            with suppress(ProcessLookupError):  # a worker also ends by itself behind its server's end
                os.kill(pid, signal.SIGKILL)

    def stop(self, pids: Sequence[int]) -> None:
        """Stop processes of a server, until they go on or are killed."""
        for pid in pids:
            self._stopped.add(pid)
            os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let stopped processes go on."""
        while self._stopped:
            with suppress(ProcessLookupError):  # its parent was killed
                os.kill(self._stopped.pop(), signal.SIGCONT)

    def mend(self) -> None:
        """Let stopped processes go on, and start servers that were killed again."""
        self.wake()
        for name in sorted(self._killed):
            if name == "router":
                self._close_router()
                self.router = self._route()
            else:
                self.engines[name].process.wait(60)
                self.engines[name] = self._serve(name)
        self._killed.clear()
        for name in NAMES:
            self.until(f"{name} is well", lambda name=name: self.is_well(name))
            self.go_on(name)
            self.until(f"the router knows {name}", lambda name=name: self.is_known(name))
            self.drain(name, False)

    def close(self) -> None:
        """End all servers, and assert that no process is left."""
        self.wake()
        self.router.terminate()
        self._close_router()
        self._stack.close()
        self.until("no process is left", lambda: not any(Path(f"/proc/{pid}").exists() for pid in self._seen))

    def _close_router(self) -> None:
        self.router.wait(60)
        assert self.router.stdout is not None
        self.router.stdout.close()

    # --- what the servers say and do ---

    def until(self, what: str, condition: Callable[[], object], timeout: float = 60.0) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + timeout, f"within {timeout:g} s this did not come: {what}"
            rest(began)

    def state(self, name: str) -> dict[str, Any]:
        """The state of an engine's scheduler."""
        answer = self.http.get(self.url(name) + "/server_info").json()
        state: dict[str, Any] = answer["internal_states"][0]
        return state

    def post(self, name: str, path: str, **body: Any) -> None:
        response = self.http.post(self.url(name) + path, json=body)
        assert response.status_code == 200, response.text

    def pause(self, name: str) -> None:
        self.post(name, "/pause_generation", mode="in_place")

    def go_on(self, name: str) -> None:
        self.post(name, "/continue_generation")

    def drain(self, name: str, drain: bool) -> None:
        """Let the router send an engine no new requests, or send it some again."""
        self.post("router", f"/workers/{self.id(name)}/drain", drain=drain)

    def is_well(self, name: str) -> bool:
        """Whether an engine answers; one whose scheduler was stopped does so with its next heartbeat."""
        return self.http.get(self.url(name) + "/health").status_code == 200

    def workers(self) -> list[dict[str, Any]]:
        """The engines as the router sees them; none if it is not there."""
        with suppress(httpx.HTTPError):
            found: list[dict[str, Any]] = self.http.get(self.url("router") + "/workers").json()["workers"]
            return found
        return []

    def is_known(self, name: str) -> bool:
        return self.id(name) in [worker["id"] for worker in self.workers()]

    def serves(self, name: str) -> bool:
        """Whether the router may send requests to an engine."""
        return any(worker["serves"] for worker in self.workers() if worker["id"] == self.id(name))

    def is_complete(self) -> bool:
        """Whether the router may send requests to each engine."""
        return [worker["serves"] for worker in self.workers()] == [True] * len(NAMES)

    def counters(self) -> dict[str, int]:
        """The router's counters."""
        text = self.http.get(self.url("router") + "/metrics").text
        return {name: int(float(value)) for name, value in COUNTERS.findall(text)}

    def tracebacks(self) -> str:
        """Returns what the servers have logged of errors in their own code."""
        logs = {file.stem: file.read_text() for file in self._logs.iterdir()}
        found = [f"{name}: {log[log.index(TRACEBACK) :]}" for name, log in logs.items() if TRACEBACK in log]
        return "\n".join(found)[:8000]

    def holds_nothing(self) -> bool:
        """Whether the router counts no request in flight."""
        return not any(worker["in_flight"] for worker in self.workers())

    def is_at_home(self, name: str) -> bool:
        """Whether an engine has no request, offer or lease."""
        state = self.state(name)
        handover = state["handover"]
        busy = (
            state["running_batch_size"],
            state["waiting_queue_size"],
            handover["offers"],
            handover["leases"],
        )
        return not any(busy)

    def check_home(self, names: Sequence[str] = NAMES, timeout: float = 40.0) -> None:
        """Assert that all pages and slots of these engines are free, and that the router holds nothing."""
        for name in names:
            self.until(f"{name} has nothing left", lambda name=name: self.is_at_home(name), timeout)
            response = self.http.post(self.url(name) + "/flush_cache", params={"timeout": 10})
            assert response.status_code == 200, response.text
            state = self.state(name)
            assert (state["available_kv_tokens"], state["req_to_token_pool_used"]) == (NUM_KV_TOKENS, 0), name
        self.until("the router holds nothing", self.holds_nothing, timeout)
