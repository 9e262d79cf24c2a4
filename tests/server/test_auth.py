from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, api_key="client-key", admin_api_key="admin-key") as server:
        yield server


def get(server: LiveServer, path: str, key: str | None, scheme: str = "Bearer") -> int:
    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    return server.client.get(path, headers=headers).status_code


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/nothing"])
def test_every_route_needs_the_key(guarded: LiveServer, path: str) -> None:
    assert get(guarded, path, None) == 401
    assert get(guarded, path, "wrong") == 401
    assert get(guarded, path, "client-ke") == 401
    assert get(guarded, path, "client-key", scheme="Basic") == 401
    assert get(guarded, path, "client-key") == (404 if path == "/nothing" else 200)


def test_control_routes_need_the_admin_key(guarded: LiveServer) -> None:
    assert get(guarded, "/server_info", "client-key") == 401
    assert get(guarded, "/server_info", "admin-key") == 200
    assert get(guarded, "/v1/models", "admin-key") == 200
    assert guarded.client.post("/abort_request", json={"abort_all": True}).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pause_generation"),
        ("POST", "/continue_generation"),
        ("POST", "/abort_request"),
        ("GET", "/flush_cache"),
        ("POST", "/flush_cache"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("GET", "/get_server_info"),
    ],
)
def test_every_control_route_needs_the_admin_key(guarded: LiveServer, method: str, path: str) -> None:
    for key, allowed in ((None, False), ("client-key", False), ("admin-key", True)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = guarded.client.request(method, path, headers=headers)
        assert response.status_code == (200 if allowed else 401)
    assert guarded.client.post("/resume", headers={"authorization": "Bearer admin-key"}).is_success


def test_the_error_is_openais(guarded: LiveServer) -> None:
    response = guarded.client.post("/v1/completions", json={})
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_an_admin_key_alone_guards_control_routes_only(tiny_model: Path) -> None:
    with LiveServer(tiny_model, admin_api_key="admin-key") as server:
        assert get(server, "/v1/models", None) == 200
        assert get(server, "/server_info", None) == 401
        odd = {"authorization": "Bearer ädmin-key".encode()}
        assert server.client.get("/server_info", headers=odd).status_code == 401
        assert get(server, "/server_info", "admin-key") == 200


def test_a_key_may_have_any_characters(tiny_model: Path) -> None:
    with LiveServer(tiny_model, api_key="schlüssel") as server:
        for sent, status in (("schlüssel", 200), ("schlossel", 401)):
            header = {"authorization": f"Bearer {sent}".encode()}
            assert server.client.get("/health", headers=header).status_code == status
