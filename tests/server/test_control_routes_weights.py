"""The weight routes over a worker whose ranks do at once what they are told."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.server import control_routes, info_routes, vllm_routes
from segue.server.access import Access, GuardedRoute
from tests.server.live import LiveServer

BUCKET = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
GROUP = {
    "master_address": "localhost",
    "master_port": "29600",
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}


@pytest.fixture
def post(server: LiveServer) -> Iterator[Any]:
    def post(path: str, **body: Any) -> httpx.Response:
        return server.client.post(path, json=body)

    post("/init_weights_update_group", **GROUP)
    yield post
    post("/abort_weights_update")
    post("/destroy_weights_update_group", group_name="g")
    post("/update_weight_version", new_version="0")


def test_the_documented_sequence(post: Any, server: LiveServer, wait_until: Any) -> None:
    ready = post("/prepare_weights_update", num_buckets=1, buckets=[BUCKET], group_name="g")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    wait_until(lambda: server.client.get("/health").json() == {"status": "ok", "weight_update": "received"})
    assert server.client.get("/weights_update_status").json()["state"] == "received"
    done = post("/complete_weights_update", group_name="g", flush_cache=False)
    assert done.status_code == 200
    assert {"success": True, "num_buckets_received": 1, "weight_version": "1"}.items() <= done.json().items()
    assert set(done.json()["timings"]) == {"prepare_s", "receive_s", "commit_s", "write_s", "total_s"}
    for path in ("/weight_version", "/get_weight_version"):
        assert server.client.get(path).json() == {"weight_version": "1"}
    assert server.client.get("/model_info").json()["weight_version"] == "1"
    assert server.client.get("/health").json() == {"status": "ok"}


def test_vllms_update_of_several_calls(post: Any, server: LiveServer) -> None:
    assert post("/start_weight_update").json()["success"]
    many = {"names": [f"{i:04}" * 8 for i in range(900)], "dtype_names": ["float32"] * 900}
    info = many | {"shapes": [[2]] * 900, "group_name": "g"}
    for each in (info, {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "group_name": "g"}):
        updated = post("/update_weights", update_info=each)
        assert (updated.status_code, updated.json()["status"]) == (200, "ok"), updated.text
    assert server.client.get("/weight_info").json() == {"weight_version": "0"}
    assert post("/finish_weight_update", weight_version="9").json()["success"]
    assert server.client.get("/weight_info").json() == {"weight_version": "9"}
    for path, body, word in (
        ("/finish_weight_update", {}, "no update was begun"),
        ("/update_weights", {}, "weight_dir"),
        ("/update_weights", {"update_info": info | {"ipc_handles": ["x" * 20_000]}}, "CUDA IPC"),
        ("/update_weights", {"update_info": {"names": "a"}}, "names"),
    ):
        refused = post(path, **body)
        assert (refused.status_code, refused.json()["success"]) == (400, False), path
        assert word in refused.json()["message"]


def test_weights_that_are_reset_must_be_sent_again(post: Any, server: LiveServer) -> None:
    reset = post("/weights_checker", action="reset_tensors")
    assert (reset.status_code, reset.json()["success"]) == (200, True)
    health = server.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "released")
    assert "overwritten by /weights_checker" in health.json()["message"]
    assert post("/update_weights_from_distributed", **BUCKET, group_name="g").json()["success"]
    assert server.client.get("/health").json() == {"status": "ok"}


def test_failures_are_answered_where_the_client_looks(post: Any) -> None:
    refused = post("/prepare_weights_update", num_buckets=2, buckets=[BUCKET], group_name="g")
    assert (refused.status_code, refused.json()["status"]) == (200, "error")
    assert "num_buckets=2" in refused.json()["message"]
    refused = post("/complete_weights_update", group_name="g")
    assert (refused.status_code, refused.json()["success"]) == (200, False)
    for path, body in (
        ("/destroy_weights_update_group", {"group_name": "h"}),
        ("/commit_weights_update", {}),
        ("/abort_weights_update", {}),
        ("/end_weight_update", {}),
        ("/update_weights_from_distributed", {**{k: v for k, v in BUCKET.items()}, "group_name": "h"}),
    ):
        refused = post(path, **body)
        assert (refused.status_code, refused.json()["success"]) == (400, False), path
        assert refused.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%"]}, "base64"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["ab=c"]}, "base64"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["a==="]}, "base64"),
        ("/prepare_weights_update", {"num_buckets": 1, "buckets": {}, "group_name": "g"}, "buckets"),
        (
            "/prepare_weights_update",
            {"num_buckets": 1, "buckets": [{"names": ["a"]}], "group_name": "g"},
            "dtypes",
        ),
        (
            "/prepare_weights_update",
            {"num_buckets": 0, "buckets": [], "group_name": "g", "timeout_s": 0},
            "timeout_s",
        ),
        ("/init_weights_update_group", {**GROUP, "backend": "mpi"}, "backend"),
        ("/init_weights_update_group", {**GROUP, "master_port": "http"}, "master_port"),
        ("/init_weights_update_group", {**GROUP, "master_port": "70000"}, "master_port"),
        ("/init_weights_update_group", {**GROUP, "master_port": 70_000}, "master_port"),
        ("/init_weights_update_group", {**GROUP, "world_size": 4_000_000}, "world_size"),
        ("/update_weights_from_disk", {}, "model_path"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]},
            "shapes",
        ),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "serialized_named_tensors"),
        ("/update_weight_version", {"new_version": 3}, "new_version"),
        ("/weights_checker", {"action": "burn"}, "action"),
        ("/get_weights_by_name", {}, "name"),
    ],
)
def test_wrong_bodies(post: Any, path: str, body: dict[str, Any], word: str) -> None:
    answer = post(path, **body)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert word in answer.json()["message"]


def test_malformed_json(server: LiveServer) -> None:
    answer = server.client.post("/prepare_weights_update", content=b"{")
    assert (answer.status_code, answer.json()["status"]) == (400, "error")


def test_a_body_that_is_too_large_is_answered_after_it_was_sent(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with closing(connection):
        headers = {"connection": "close"}  # as urllib sends it
        connection.request("POST", "/update_weights_from_tensor", b"x" * 20_000_000, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert (response.status, answer["success"]) == (413, False)
    assert "--max-body-mib" in answer["message"]


def test_a_server_that_starts_says_when_to_retry(tiny_model: Path) -> None:
    with LiveServer(tiny_model, started=False) as server:
        answer = server.client.post("/begin_weight_update")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["success"] is False


def test_unknown_fields_are_ignored(post: Any) -> None:
    assert post("/update_weight_version", new_version="5", extra=1).json()["new_version"] == "5"


def test_three_phases_and_groups_of_calls(post: Any, server: LiveServer) -> None:
    post("/prepare_weights_update", num_buckets=1, buckets=[BUCKET], group_name="g", session_id="s")
    received = post("/complete_weights_update", session_id="s", commit=False).json()
    assert received["success"] and received["weight_version"] == "0"
    assert post("/commit_weights_update", session_id="s").json()["weight_version"] == "1"
    post("/begin_weight_update")
    for version in ("8", "9"):
        assert post(
            "/update_weights_from_distributed", **BUCKET, group_name="g", weight_version=version
        ).json()["success"]
    assert server.client.get("/weight_version").json() == {"weight_version": "1"}
    assert post("/end_weight_update").json()["success"]
    assert server.client.get("/weight_version").json() == {"weight_version": "9"}


def test_metrics_tell_of_updates(post: Any, server: LiveServer) -> None:
    post("/prepare_weights_update", num_buckets=1, buckets=[BUCKET], group_name="g")
    post("/complete_weights_update", group_name="g")
    text = server.client.get("/metrics").text
    for name in (
        "segue:weight_updates_total",
        "segue:weight_update_failures_total",
        'segue:weight_update_seconds{model_name="tiny-model",phase="commit"}',
        "segue:weight_update_bytes",
        "segue:weight_update_gb_per_second",
        "segue:weight_staging_bytes",
        'segue:weight_version_info{model_name="tiny-model",version="1"} 1.0',
    ):
        assert name in text, name


def test_a_paused_engine_stays_paused(post: Any, server: LiveServer) -> None:
    post("/pause_generation", mode="in_place")
    post("/prepare_weights_update", num_buckets=1, buckets=[BUCKET], group_name="g")
    post("/complete_weights_update", group_name="g")
    assert server.client.get("/health").json() == {"status": "paused", "mode": "in_place"}
    post("/continue_generation")


def test_the_admin_key_guards_every_weight_route() -> None:
    every = (*control_routes.weights, *info_routes.weights, *vllm_routes.weights)
    routes = [route for route in every if isinstance(route, GuardedRoute)]
    assert {route.access for route in routes} == {Access.ADMIN}
    assert len({route.path for route in routes}) == 23
