"""A decode worker of ``segue cluster`` is killed while clients read, and no client sees an error."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import WaitUntil
from tests.e2e.clustering import KEY, Clustered, clustered
from tests.e2e.reading_client import ReadingClient, ReplyRead

NUM_CLIENTS = 4  # at the same time
END_S = 60.0  # until a reply has ended
MOST_S = 900.0  # for all of it
MOVED = re.compile(r"^segue:router_(retries|resumes)_total ([0-9.]+)$", re.MULTILINE)
WORDS = ("the", "river", "a", "small", "stone", "house", "when", "evening", "came", "they", "walked", "home")


def bodies(model: str, max_len: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields requests whose prompts and replies have mixed lengths, most of them short; without an end."""
    drawn = random.Random(4)
    for number in count():
        words = " ".join(drawn.choices(WORDS, k=min(max_len, int(drawn.lognormvariate(3, 1.2)) + 1)))
        tokens = drawn.randint(2, 64)
        if number % 3:
            params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            yield "/generate", {"text": words, "sampling_params": params, "stream": number % 4 != 3}
        else:
            messages = [{"role": "user", "content": words}]
            params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
            yield "/v1/chat/completions", {"model": model, "messages": messages, "stream": True} | params


class EndlessLoad:
    """Clients that send one request after the other, until enough have been sent and the test says so."""

    def __init__(self, url: str, max_len: int, num_requests: int) -> None:
        listed = httpx.get(f"{url}/v1/models", headers=KEY, timeout=60).json()["data"]
        self._url = url
        self._requests = bodies(listed[0]["id"], max_len)
        self._lock = threading.Lock()
        self._num_left = num_requests
        self._may_end = False
        self.replies: list[ReplyRead] = []
        self.longest_pause_s = 0.0
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let the clients end, and wait for them."""
        self._may_end = True
        for thread in self._threads:
            thread.join(MOST_S)
            assert not thread.is_alive(), f"{len(self.replies)} replies have ended"

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        with self._lock:
            self._num_left -= 1
            return None if self._may_end and self._num_left < 0 else next(self._requests)

    def _run(self) -> None:
        while (request := self._next()) is not None:
            began = time.monotonic()
            reply = ReadingClient(self._url, *request, END_S, headers=KEY).result(2 * END_S)
            with self._lock:
                self.replies.append(reply)
                self.longest_pause_s = max(self.longest_pause_s, reply.longest_pause(began))


def busy_decode_workers(cluster: Clustered) -> list[int]:
    """Returns the processes of the decode workers that have requests in flight."""
    listed = httpx.get(f"{cluster.url}/workers", headers=KEY, timeout=60).json()["workers"]
    ports = [worker["id"].rpartition(":")[2] for worker in listed if worker["in_flight"]]
    found = cluster.children("--role=decode").items()
    return [pid for pid, words in found if any(port in word for port in ports for word in words)]


def kill_a_busy_one(cluster: Clustered) -> None:
    """Kill a decode worker with requests in flight. It is stopped first: else they might end meanwhile."""
    deadline = time.monotonic() + MOST_S
    while True:
        assert time.monotonic() < deadline, "no decode worker has requests"
        for victim in busy_decode_workers(cluster):
            os.kill(victim, signal.SIGSTOP)
            if all(victim in busy_decode_workers(cluster) for _ in range(2)):
                os.kill(victim, signal.SIGKILL)
                return
            os.kill(victim, signal.SIGCONT)


def serve_while_killed(
    cluster: Clustered, wait_until: WaitUntil, *, num_requests: int, kills: int, max_len: int
) -> None:
    """Send requests, and kill a decode worker again and again while it has some of them."""
    load = EndlessLoad(cluster.url, max_len, num_requests)
    began = time.monotonic()
    try:
        for kill in range(kills):
            part = num_requests * (kill + 1) // (kills + 2)
            wait_until(lambda part=part: len(load.replies) >= part, timeout=MOST_S, what=f"{part} replies")
            with cluster.starting_nothing():
                kill_a_busy_one(cluster)
                wait_until(lambda: cluster.serving() == 2, what="the router notices")
            wait_until(lambda: cluster.serving() == 3, timeout=60, what="the worker is back")
    finally:
        load.end()
    assert len(load.replies) >= num_requests
    assert [reply for reply in load.replies if not reply.has_ended_once] == []
    metrics = httpx.get(f"{cluster.url}/metrics", headers=KEY, timeout=60).text
    moved = {name: float(value) for name, value in MOVED.findall(metrics)}
    assert sum(moved.values()) >= kills, "a request was elsewhere when its worker died"
    print(
        f"{len(load.replies)} requests in {time.monotonic() - began:.1f} s, {kills} kills, no errors, "
        f"longest pause {load.longest_pause_s:.2f} s, {moved}"
    )


def test_no_client_sees_that_a_decode_worker_is_killed(
    tmp_path: Path, tiny_model: Path, wait_until: WaitUntil
) -> None:
    with clustered(tmp_path, tiny_model, wait_until, "--prefill", "1", "--decode", "2") as cluster:
        serve_while_killed(cluster, wait_until, num_requests=40, kills=1, max_len=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_requests_to_the_bundled_model_while_a_decode_worker_is_killed_twice(
    tmp_path: Path, wait_until: WaitUntil
) -> None:
    options = ("--prefill", "1", "--decode", "2", "--num-kv-tokens", "16384")
    with clustered(tmp_path, None, wait_until, *options) as cluster:
        serve_while_killed(cluster, wait_until, num_requests=200, kills=2, max_len=600)
