"""More requests than may wait, while the engine runs long steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import least_measured
from tests.server.conftest import MODEL
from tests.server.live import LiveServer

STEP_S = 1.5
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 100, "ignore_eos": True}
NATIVE = {"text": "abc", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}


@pytest.fixture(scope="module")
def full(tiny_model: Path, wait_until: Any) -> Iterator[LiveServer]:
    """A server with two running and three waiting requests, the maximum of both."""
    with ThreadPoolExecutor(5) as pool, pytest.MonkeyPatch.context() as environment:
        environment.setenv("FAKE_STEP_S", str(STEP_S))
        server = LiveServer(tiny_model, max_queued_requests=3, max_running_requests=2)
        environment.undo()  # the other server of this module takes short steps
        with server:
            hold = partial(pool.submit, httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=60)
            held = [hold(), hold()]
            wait_until(lambda: server.runtime.manager.stats.counters.num_running == 2)
            held += [hold(), hold(), hold()]
            wait_until(lambda: server.runtime.manager.num_requests == 5)
            yield server
            server.client.post("/abort_request", json={"abort_all": True})
            assert [each.result(30).status_code for each in held] == [200] * 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/completions", BODY | {"stream": True}),
        ("/v1/completions", BODY | {"prompt": ["a", "b"]}),
        ("/generate", NATIVE),
        ("/generate", NATIVE | {"stream": True}),
    ],
    ids=["reply", "stream", "batch", "native", "native stream"],
)
def test_refusals_do_not_wait_for_the_step_in_flight(
    full: LiveServer, path: str, body: dict[str, Any]
) -> None:
    def longest() -> float:
        seconds = []
        for _ in range(30):
            began = time.monotonic()
            answer = full.client.post(path, json=body)
            seconds.append(time.monotonic() - began)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "--max-queued-requests" in answer.text
        return max(seconds)

    assert least_measured(STEP_S / 3, longest) < STEP_S / 3
    assert full.runtime.manager.num_requests == 5


def test_a_burst_at_an_idle_engine_is_accepted_completely(tiny_model: Path) -> None:
    with (
        LiveServer(tiny_model, max_queued_requests=20, max_running_requests=4) as server,
        ThreadPoolExecutor(20) as pool,
    ):
        for _ in range(3):
            short = BODY | {"max_tokens": 2}
            calls = [pool.submit(server.client.post, "/v1/completions", json=short) for _ in range(20)]
            assert [call.result(30).status_code for call in calls] == [200] * 20
            batch = short | {"prompt": ["a"] * 20}
            assert server.client.post("/v1/completions", json=batch).status_code == 200
        server.assert_nothing_left()
