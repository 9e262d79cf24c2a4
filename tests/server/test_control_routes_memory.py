"""The routes that release and resume memory, by SGLang's names and by vLLM's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import LiveServer

ALL = ["kv_cache", "weights"]


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, enable_memory_saver=True) as server:
        yield server


@pytest.fixture
def saver(shared: LiveServer) -> Iterator[LiveServer]:
    yield shared
    shared.client.post("/resume_memory_occupation")
    update(shared)
    assert shared.client.get("/health").json()["status"] == "ok"
    shared.assert_nothing_left()


def update(server: LiveServer) -> None:
    """Send the weights; the fake ranks accept any."""
    body = {"model_path": "/anywhere"}
    assert server.client.post("/update_weights_from_disk", json=body).status_code == 200


def is_sleeping(server: LiveServer) -> bool:
    found: bool = server.client.get("/is_sleeping").json()["is_sleeping"]
    return found


@pytest.mark.parametrize("body", [None, {}, {"tags": None}, {"tags": []}, {"tags": ["weights", "kv_cache"]}])
def test_without_tags_all_memory_is_meant(saver: LiveServer, body: Any) -> None:
    assert not is_sleeping(saver)
    released = saver.client.post("/release_memory_occupation", json=body)
    assert (released.status_code, released.json()["success"]) == (200, True)
    assert (released.json()["tags"], released.json()["num_bytes"]) == (ALL, 20)
    assert is_sleeping(saver)
    resumed = saver.client.post("/resume_memory_occupation", json=body)
    assert (resumed.json()["tags"], is_sleeping(saver)) == (ALL, False)
    assert "send all of them" in resumed.json()["message"]


def test_health_names_weights_that_are_missing(saver: LiveServer) -> None:
    saver.client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    assert saver.client.get("/health").json() == {
        "status": "paused",
        "mode": "retract",
        "released": ["kv_cache"],
    }
    saver.client.post("/release_memory_occupation", json={"tags": ["weights"]})
    for path in ("/health", "/health_generate"):
        response = saver.client.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "released")
        assert "/update_weights_from_disk" in response.text
    assert saver.client.get("/server_info").json()["enable_memory_saver"] is True
    (state,) = saver.client.get("/server_info").json()["internal_states"]
    assert state["released_memory"] == ALL
    saver.client.post("/resume_memory_occupation")
    assert saver.client.get("/health").status_code == 503
    update(saver)
    assert saver.client.get("/health").json() == {"status": "ok"}


def test_a_request_waits_for_memory(saver: LiveServer, wait_until: Any) -> None:
    saver.client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
    replies: list[httpx.Response] = []
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 5}}
    thread = threading.Thread(target=lambda: replies.append(saver.client.post("/generate", json=body)))
    thread.start()
    wait_until(lambda: saver.runtime.manager.stats.counters.num_waiting == 1)
    saver.client.post("/continue_generation")
    assert saver.client.get("/is_paused").json() == {"is_paused": True}
    saver.client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    thread.join(60)
    assert replies[0].json()["meta_info"]["completion_tokens"] == 5


def test_sleep_and_wake_up_as_vllm_names_them(saver: LiveServer) -> None:
    assert saver.client.post("/sleep").json()["tags"] == ["kv_cache"]  # level 1, on a CPU
    assert saver.client.post("/sleep?level=2").json()["tags"] == ["weights"]
    assert saver.client.post("/wake_up?tags=weights").json()["tags"] == ["weights"]
    assert is_sleeping(saver)
    assert saver.client.post("/wake_up?tags=weights&tags=kv_cache").json()["tags"] == ["kv_cache"]
    assert not is_sleeping(saver)


def test_sleep_and_wake_up_take_their_fields_in_the_body_too(saver: LiveServer) -> None:
    assert saver.client.post("/sleep", json={"level": 2, "tags": None}).json()["tags"] == ALL
    assert saver.client.post("/wake_up", json={"tags": ["weights"]}).json()["tags"] == ["weights"]
    assert saver.client.post("/wake_up", json={}).json()["tags"] == ["kv_cache"]
    assert not is_sleeping(saver)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/release_memory_occupation", {"tags": ["nope"]}, "tags[0]='nope'"),
        ("/resume_memory_occupation", {"tags": "weights"}, "tags='weights'"),
        ("/sleep?level=7", None, "level"),
        ("/wake_up?tags=nope", None, "tags[0]='nope'"),
    ],
)
def test_a_wrong_field_is_named(saver: LiveServer, path: str, body: Any, named: str) -> None:
    response = saver.client.post(path, json=body)
    assert response.status_code == 400 and named in response.json()["message"]


def test_without_the_option_the_answer_names_it(server: LiveServer) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation", "/sleep", "/wake_up"):
        response = server.client.post(path)
        assert response.status_code == 400 and "--enable-memory-saver" in response.json()["message"]
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
