"""Runs `segue serve` as a process, with a client that can wait for the server's state."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import openai
import pytest

from tests.support.child import start_child
from tests.support.held_steps import StepGate
from tests.support.polling import rest
from tests.support.shared_client import shared_client

T = TypeVar("T")
MODEL = "SmolLM2-135M-Instruct"
STORY = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Served:
    """A running server process."""

    process: subprocess.Popen[str]
    url: str

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.get("/server_info").json()["internal_states"][0]
        return state

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@contextmanager
def serve(
    *options: str,
    log: IO[str] | None = None,
    gate: StepGate | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Runs a server for the block. Its log goes to ``log``, by default to this process's stderr.

    With a ``gate``, the test can hold the steps of its workers. ``environment``: more variables.
    """
    command = [sys.executable, "-m", "segue" if gate is None else "tests.support.held_steps", "serve"]
    command += ["--port", "0", "--log-level", "warning"]
    command += ["--drain-s", "0", *options]  # a failed test leaves requests, which need not be drained
    variables = {**os.environ, **({} if gate is None else gate.environment), **(environment or {})}
    process = start_child(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                url = next(word for word in line.split() if word.startswith("http://"))
                break
        else:
            pytest.fail(f"the server ended with exit code {process.wait()} before it was ready")
        yield Served(process, url)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def greedy(count: int, **params: Any) -> dict[str, Any]:
    """Returns sampling parameters of a request that ends after exactly ``count`` tokens."""
    return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} | params


class Client:
    """A client with short calls for a server's routes; requests run in threads.

    The ``gate`` is that of the server's steps. What closes it are the test, and `begin`.
    """

    def __init__(self, served: Served, gate: StepGate | None = None) -> None:
        self.served = served
        self.gate = gate
        self.http = shared_client(base_url=served.url, timeout=60)
        self._threads = ThreadPoolExecutor(64)

    def close(self) -> None:
        self._threads.shutdown()
        self.http.close()

    def generate(self, text: Any, params: Any, **fields: Any) -> Any:
        """Returns the reply of the native API."""
        body = {"text": text, "sampling_params": params} | fields
        response = self.http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def start(self, text: Any, params: Any, **fields: Any) -> Future[Any]:
        """Sends a request in a thread, and returns the future of its reply."""
        return self._threads.submit(self.generate, text, params, **fields)

    def begin(self, text: Any, params: Any, rid: str) -> Future[Any]:
        """Sends a request, waits until it runs, and returns the future of its reply.

        With a gate, it cannot end before a pause.
        """
        if self.gate is not None:
            self.gate.close_after(params["max_new_tokens"] - 1)
        future = self.start(text, params, rid=rid)
        self.until(running_batch_rids=[rid])
        return future

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in a thread."""
        return self._threads.submit(work)

    def stream(self, text: Any, params: Any, **fields: Any) -> Streaming:
        """Starts a streamed reply, which a thread reads."""
        return Streaming(self.http, {"text": text, "sampling_params": params, "stream": True} | fields)

    def pause(self, mode: str | None = None, **fields: Any) -> dict[str, Any]:
        """Pauses; from then on the gate is open, since the pause holds the steps."""
        body = fields if mode is None else {"mode": mode} | fields
        call = self._threads.submit(self.http.post, "/pause_generation", json=body)
        if self.gate is not None:
            if mode == "wait":  # it waits for steps
                self.until(pause_mode=mode)
            else:
                call.result()
            self.gate.open()
        response = call.result()
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        assert (reply["message"], reply["status"]) == ("Generation paused successfully.", "ok")
        return reply

    def proceed(self) -> None:
        response = self.http.post("/continue_generation", json={})
        assert response.status_code == 200
        assert response.json()["message"] == "Generation continued successfully."

    def flush(self, timeout: float = 0) -> httpx.Response:
        return self.http.post("/flush_cache", params={"timeout": timeout} if timeout else {})

    def abort(self, rid: str = "", **fields: Any) -> None:
        response = self.http.post("/abort_request", json={"rid": rid} | fields)
        assert (response.status_code, response.content) == (200, b"")

    def state(self) -> dict[str, Any]:
        response = self.http.get("/server_info")
        assert response.status_code == 200, response.text
        state: dict[str, Any] = response.json()["internal_states"][0]
        return state

    def until(self, timeout: float = 60.0, **facts: Any) -> dict[str, Any]:
        """Waits until the state agrees with ``facts``, and returns the state."""
        began = time.monotonic()
        while True:
            state = self.state()
            differs = {name: state[name] for name, value in facts.items() if state[name] != value}
            if not differs:
                return state
            if time.monotonic() > began + timeout:
                pytest.fail(f"the state did not become {facts} within {timeout:g} s; it is {differs}")
            rest(began)

    def until_more(self, tokens: int) -> None:
        """Waits until the engine has generated more than ``tokens`` tokens."""
        deadline = time.monotonic() + 60
        while self.state()["num_generated_tokens"] <= tokens:
            assert time.monotonic() < deadline, f"no token came after {tokens}"
            time.sleep(0.005)

    def waiting(self, *rids: str) -> dict[str, Any]:
        """Waits until exactly these requests wait, in this order, and returns the state."""
        return self.until(waiting_queue_rids=list(rids))


class Streaming:
    """A streamed native reply, which a thread reads as it arrives."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.comments: list[str] = []
        self.ended = False  # with [DONE]
        self._changed = threading.Condition()
        self._response: httpx.Response | None = None
        self._left = False
        self._thread = threading.Thread(target=self._read, args=(http, body))
        self._thread.start()

    def wait(self, tokens: int = 1) -> None:
        """Waits until ``tokens`` tokens have arrived, or the stream has ended."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.ended or len(self.ids) >= tokens, 60)
        assert arrived, f"{len(self.ids)} of {tokens} tokens arrived"

    @property
    def ids(self) -> list[int]:
        return self.events[-1]["output_ids"] if self.events else []

    def result(self) -> dict[str, Any]:
        """Waits for the end and returns the last event; each event must extend the one before."""
        self._thread.join(60)
        assert not self._thread.is_alive() and self.ended, "the stream did not end"
        for earlier, later in zip(self.events, self.events[1:], strict=False):
            assert later["text"].startswith(earlier["text"]), "text was taken back"
            assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
        return self.events[-1]

    def leave(self) -> None:
        """Closes the connection before the server has finished."""
        assert self._response is not None
        self._left = True
        stream = self._response.extensions["network_stream"]
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._thread.join(60)

    def _read(self, http: httpx.Client, body: dict[str, Any]) -> None:
        try:
            with http.stream("POST", "/generate", json=body) as self._response:
                assert self._response.status_code == 200, self._response.read()
                for line in self._response.iter_lines():
                    with self._changed:
                        self._take(line)
                        self._changed.notify_all()
        except httpx.HTTPError:
            assert self._left

    def _take(self, line: str) -> None:
        if line.startswith(":"):
            self.comments.append(line)
        elif line == "data: [DONE]":
            self.ended = True
        elif line:
            self.events.append(json.loads(line.removeprefix("data: ")))
