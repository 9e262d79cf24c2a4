"""What a web page that a browser shows may make a server do: nothing that changes something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.server.access import Access
from segue.server.app import create_app
from tests.server.live import LiveServer
from tests.server.raw import ask
from tests.server.routes import ROUTES

PAGE = "https://chat.example"
CHANGING = [
    (method, route.path)
    for route in ROUTES
    for method in sorted(route.methods)
    if method not in ("GET", "HEAD") or route.access is Access.ADMIN
]


def paused(server: LiveServer) -> bool:
    found: bool = server.client.get("/is_paused").json()["is_paused"]
    return found


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("content", [b"", b'{"mode": "abort"}'])
def test_a_form_does_not_pause(server: LiveServer, kind: str, content: bytes) -> None:
    answer = server.client.post("/pause_generation", content=content, headers={"content-type": kind})
    assert answer.status_code == 415
    assert kind in answer.json()["message"] and "application/json" in answer.json()["message"]
    assert not paused(server)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/completions", {"error": {"code": "unsupported_media_type"}}),
        ("/generate", {"object": "error", "code": 415}),
        ("/pause_generation", {"object": "error", "code": 415}),
        ("/begin_weight_update", {"success": False}),
        ("/prepare_weights_update", {"success": False, "status": "error"}),
    ],
)
def test_a_wrong_type_is_refused_in_the_form_of_its_routes(
    server: LiveServer, path: str, expected: dict[str, Any]
) -> None:
    answer = server.client.post(path, content=b"{}", headers={"content-type": "text/plain"})
    content = answer.json()
    error = content.get("error", content)
    assert answer.status_code == 415 and "text/plain" in error["message"]
    for name, value in expected.get("error", expected).items():
        assert error[name] == value


@pytest.mark.parametrize(("method", "path"), CHANGING, ids=lambda part: part)
@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"origin": "null"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_another_page_changes_nothing(
    server: LiveServer, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = server.client.request(method, path, headers=headers)
    assert answer.status_code == 403 and "--cors-origin" in answer.text
    assert not paused(server)


def test_only_these_routes_answer_get_without_an_admin_key_so_they_must_not_change_anything() -> None:
    reading = {route.path for route in ROUTES if "GET" in route.methods and route.access is not Access.ADMIN}
    assert reading <= {
        "/",
        "/docs",
        "/get_load",
        "/health",
        "/health_generate",
        "/loads",
        "/metrics",
        "/openapi.json",
        "/page/{name:path}",
        "/ping",
        "/ready",
        "/redoc",
        "/v1/loads",
        "/v1/models",
        "/v1/models/{name:path}",
        "/version",
    }


def test_a_page_may_still_read(server: LiveServer) -> None:
    headers = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    answer = server.client.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers  # the browser keeps it from the page


def test_the_servers_own_page_may_everything(server: LiveServer) -> None:
    headers = {"origin": server.url, "sec-fetch-site": "same-origin"}
    for method, path in (("POST", "/pause_generation"), ("GET", "/is_paused"), ("POST", "/resume")):
        assert server.client.request(method, path, headers=headers).status_code == 200
    assert server.client.get("/flush_cache", headers={"sec-fetch-site": "none"}).status_code == 200


def test_clients_go_on_as_before(server: LiveServer) -> None:
    """Those that send JSON, nothing, or what aiohttp sends where there is no body; all without an origin."""
    for headers in ({}, {"content-type": "application/json; charset=utf-8"}):
        answer = server.client.post("/generate", content=b'{"text": "a"}', headers=headers)
        assert answer.status_code == 200
    for headers in ({}, {"content-type": "application/octet-stream"}, {"content-type": "application/json"}):
        for path in ("/pause_generation", "/continue_generation"):
            assert server.client.post(path, headers=headers).status_code == 200
    assert server.client.post("/flush_cache").status_code == 200
    assert server.client.get("/flush_cache").status_code == 200
    assert server.client.get("/weights_checker").status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/docs", "/openapi.json", "/is_paused", "/nothing"])
def test_a_page_whose_name_points_to_this_machine_reads_nothing(server: LiveServer, path: str) -> None:
    status, text = ask(server, "GET", path, "host: evil.example:30000", "sec-fetch-site: same-origin")
    assert (status, "--allowed-hosts" in text) == (403, True)


def test_health_is_for_any_host(server: LiveServer) -> None:
    assert ask(server, "GET", "/health", "host: pod.example")[0] == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:30000", "segue.localhost"])
def test_this_machines_names_are_served(server: LiveServer, host: str) -> None:
    assert ask(server, "GET", "/version", f"host: {host}")[0] == 200


def test_http_1_0_needs_no_host(server: LiveServer) -> None:
    assert ask(server, "GET", "/version", version="1.0")[0] == 200


def test_hosts_and_origins_can_be_allowed(tiny_model: Path) -> None:
    options: dict[str, Any] = {"allowed_hosts": "gpu-1.lan", "cors_origin": PAGE, "api_key": "key"}
    key = {"authorization": "Bearer key"}
    with LiveServer(tiny_model, **options) as server:
        for name, status in (("gpu-1.lan:1", 200), ("evil.example", 403)):
            assert ask(server, "GET", "/version", f"host: {name}", "authorization: Bearer key")[0] == status
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        for origin, status in ((PAGE, 200), ("https://evil.example", 400)):
            preflight = server.client.options("/generate", headers=asked | {"origin": origin})
            assert preflight.status_code == status
            assert ("access-control-allow-origin" in preflight.headers) == (status == 200)
        page = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        answer = server.client.post("/resume", headers=page | key)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        without_key = server.client.post("/resume", headers=page)
        assert (without_key.status_code, without_key.headers["access-control-allow-origin"]) == (401, PAGE)
        evil = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        assert server.client.post("/resume", headers=evil | key).status_code == 403
        headers = {"sec-fetch-site": "cross-site"} | key
        assert server.client.get("/flush_cache", headers=headers).status_code == 403


def test_every_page_can_be_allowed(tiny_model: Path) -> None:
    with LiveServer(tiny_model, cors_origin="*") as server:
        page = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        answer = server.client.post("/resume", headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_a_preflight_gets_no_consent_by_default(server: LiveServer) -> None:
    asked: dict[str, str] = {"origin": PAGE, "access-control-request-method": "POST"}
    answer: httpx.Response = server.client.options("/generate", headers=asked)
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (405, False)


def test_a_wrong_origin_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"cors_origin='chat\.example'"):
        create_app(EngineConfig(cors_origin="chat.example"))


def test_commands_of_the_docs_declare_their_body_as_json() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines() if "curl " in line]
    sending = [line for line in lines if " -d " in line]
    assert sending and all("-H 'Content-Type: application/json'" in line for line in sending)
