"""Keys: which route needs which, and that no spelling of a path is a way around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from segue.config import EngineConfig
from segue.server import control_routes
from segue.server.access import Access, GuardedRoute
from segue.server.app import create_app
from tests.server.live import LiveServer
from tests.server.raw import ask
from tests.server.routes import ROUTES

CLIENT, ADMIN = "client-key", "admin-key"


IDS = [f"{'/'.join(sorted(route.methods))} {route.path}" for route in ROUTES]


@pytest.fixture(scope="module")
def guarded(tiny_model: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, api_key=CLIENT, admin_api_key=ADMIN, compat="sglang") as server:
        yield server


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def get(server: LiveServer, path: str, key: str | None, scheme: str = "Bearer") -> int:
    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    return server.client.get(path, headers=headers).status_code


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/metrics", "/docs", "/redoc", "/openapi.json", "/nothing"]
)
def test_every_route_but_the_health_routes_needs_the_key(guarded: LiveServer, path: str) -> None:
    assert get(guarded, path, None) == 401
    assert get(guarded, path, "wrong") == 401
    assert get(guarded, path, "client-ke") == 401
    assert get(guarded, path, CLIENT, scheme="Basic") == 401
    assert get(guarded, path, CLIENT) == (404 if path == "/nothing" else 200)


def test_probes_need_no_key(guarded: LiveServer) -> None:
    assert get(guarded, "/health", None) == get(guarded, "/health_generate", None) == 200
    open_paths = {route.path for route in ROUTES if route.access is Access.OPEN}
    page = {"/", "/page/{name:path}"}  # which have nothing of the server in them
    assert open_paths == {"/health", "/health_generate", "/ready", "/ping"} | page


def test_the_owner_of_the_model_is_the_engine_that_compat_names(
    guarded: LiveServer, server: LiveServer
) -> None:
    (card,) = guarded.client.get("/v1/models", headers=bearer(CLIENT)).json()["data"]
    assert card["owned_by"] == "sglang"
    assert server.client.get("/v1/models").json()["data"][0]["owned_by"] == "segue"


def test_metrics_are_open_on_request(tiny_model: Path) -> None:
    with LiveServer(tiny_model, api_key=CLIENT, open_metrics=True) as server:
        assert get(server, "/metrics", None) == 200
        assert get(server, "/version", None) == 401


def test_control_routes_need_the_admin_key(guarded: LiveServer) -> None:
    assert get(guarded, "/server_info", CLIENT) == 401
    assert get(guarded, "/server_info", ADMIN) == 200
    assert get(guarded, "/v1/models", ADMIN) == 200
    assert get(guarded, "/v1/loads", CLIENT) == 401
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
    for key, allowed in ((None, False), (CLIENT, False), (ADMIN, True)):
        response = guarded.client.request(method, path, headers=bearer(key))
        assert response.status_code == (200 if allowed else 401)
    assert guarded.client.post("/resume", headers=bearer(ADMIN)).is_success


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": CLIENT}, 200),
        ({"x-api-key": ADMIN}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "", **bearer(CLIENT)}, 200),
        ({"x-api-key": "", **bearer("wrong")}, 401),
        ({"x-api-key": CLIENT, "authorization": "Bearer"}, 200),
        ({"x-api-key": CLIENT, **bearer(CLIENT)}, 200),
        ({"x-api-key": CLIENT, **bearer(ADMIN)}, 401),
        ({"x-api-key": CLIENT, **bearer("wrong")}, 401),
        ({"x-api-key": "wrong", **bearer(CLIENT)}, 401),
        ({"x-api-key": CLIENT, "authorization": "Basic x"}, 200),
    ],
)
def test_the_key_may_come_as_anthropics_header(
    guarded: LiveServer, headers: dict[str, str], status: int
) -> None:
    answer = guarded.client.get("/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert "x-api-key" in answer.json()["error"]["message"]
    is_admin = headers == {"x-api-key": ADMIN}
    assert guarded.client.get("/server_info", headers=headers).status_code == (200 if is_admin else 401)


def test_the_error_has_the_form_of_its_routes(guarded: LiveServer) -> None:
    response = guarded.client.post("/v1/completions", json={})
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.client.post("/generate", json={}).json()["object"] == "error"
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nothing"):
        answer = guarded.client.post(path, json={}).json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")
    assert "type" not in guarded.client.post("/v1/messagesx", json={}).json()
    assert guarded.client.post("/begin_weight_update", json={}).json()["success"] is False
    assert guarded.client.post("/prepare_weights_update", json={}).json()["status"] == "error"


def test_an_admin_key_alone_guards_control_routes_only(tiny_model: Path) -> None:
    with LiveServer(tiny_model, admin_api_key=ADMIN) as server:
        assert get(server, "/v1/models", None) == 200
        assert get(server, "/nothing", None) == 404
        assert get(server, "/server_info", None) == 401
        odd = {"authorization": "Bearer ädmin-key".encode()}
        assert server.client.get("/server_info", headers=odd).status_code == 401
        assert get(server, "/server_info", ADMIN) == 200


def test_a_key_may_have_any_characters(tiny_model: Path) -> None:
    with LiveServer(tiny_model, api_key="schlüssel") as server:
        for sent, status in (("schlüssel", 200), ("schlossel", 401)):
            header = {"authorization": f"Bearer {sent}".encode()}
            assert server.client.get("/version", headers=header).status_code == status


def test_a_wrong_method_needs_the_key_first(guarded: LiveServer) -> None:
    for key, status in ((None, 401), (CLIENT, 401), (ADMIN, 405)):
        assert guarded.client.put("/pause_generation", headers=bearer(key)).status_code == status
    assert guarded.client.options("/v1/models").status_code == 401
    assert guarded.client.options("/v1/models", headers=bearer(CLIENT)).status_code == 405


def test_a_path_that_lacks_or_has_a_slash_is_redirected_behind_the_key(guarded: LiveServer) -> None:
    assert guarded.client.get("/version/").status_code == 401
    answer = guarded.client.get("/version/", headers=bearer(CLIENT))
    assert (answer.status_code, answer.headers["location"]) == (307, f"{guarded.url}/version")


@pytest.mark.parametrize("key", [None, CLIENT])
@pytest.mark.parametrize("end", ["%0A", "%0a", "%0D", "%00", "%7F", "%0A%0A"])
def test_a_control_character_is_no_way_around_the_admin_key(
    guarded: LiveServer, key: str | None, end: str
) -> None:
    for target in (f"/pause_generation{end}", f"http://localhost/pause_generation{end}"):
        status, text = ask(guarded, "POST", target, "host: localhost", *lines(key))
        assert (status, "control character" in text) == (400, True)
    assert guarded.client.get("/is_paused", headers=bearer(ADMIN)).json() == {"is_paused": False}


@pytest.mark.parametrize("character", ["\0", "\x01", "\t", "\v", "\x7f"])
def test_a_control_character_as_it_is_is_refused(guarded: LiveServer, character: str) -> None:
    status, _ = ask(guarded, "POST", f"/pause_generation{character}", "host: localhost", *lines(ADMIN))
    assert status == 400
    assert guarded.client.get("/is_paused", headers=bearer(ADMIN)).json() == {"is_paused": False}


def lines(key: str | None) -> list[str]:
    return [f"{name}: {value}" for name, value in bearer(key).items()]


def spellings(path: str) -> dict[str, str]:
    """Targets by what is odd about them, for a path that a route has."""
    path = path.replace("{name:path}", "tiny-model")
    return {
        "plain": path,
        "absolute form": f"http://localhost{path}",
        "another host": f"http://example.com:1{path}",
        "newline": f"{path}%0A",
        "carriage return": f"{path}%0D",
        "null": f"{path}%00",
        "newline in front": f"/%0A{path[1:]}",
        "newline, absolute form": f"http://localhost{path}%0A",
        "two slashes": f"/{path}",
        "two slashes at the end": f"{path}//",
        "dot": f"/.{path}",
        "dots": f"/x/..{path}",
        "slash at the end": f"{path}/",
        "parameter": f"{path};x",
        "query": f"{path}?x",
        "case": path.upper(),
        "percent-encoded": path if path == "/" else f"/%{ord(path[1]):x}{path[2:]}",
        "percent-encoded twice": f"{path}%250A",
    }


SERVED = {"plain", "absolute form", "another host", "query", "percent-encoded"}  # that are the same path


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[GuardedRoute]:
    """The routes whose endpoint was reached; it answers 200 and does nothing."""
    reached: list[GuardedRoute] = []

    def record(route: GuardedRoute) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            reached.append(route)
            await PlainTextResponse("entered")(scope, receive, send)

        return app

    for route in ROUTES:
        monkeypatch.setattr(route, "app", record(route))
    return reached


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
@pytest.mark.parametrize("key", [None, CLIENT, ADMIN])
def test_no_spelling_of_a_path_is_a_way_around_the_key(
    guarded: LiveServer, entered: list[GuardedRoute], route: GuardedRoute, key: str | None
) -> None:
    levels = {
        None: {Access.OPEN},
        CLIENT: {Access.OPEN, Access.USER, Access.METRICS},
        ADMIN: set(Access),
    }[key]
    for what, target in spellings(route.path).items():
        for method in sorted(route.methods):
            entered.clear()
            status, text = ask(guarded, method, target, "host: localhost", *lines(key))
            said = f"{what}: {method} {target} -> {status} {text}"
            assert {each.access for each in entered} <= levels, said
            if what in SERVED and route.access in levels:  # the key opens what it should
                assert (status, entered) == (200, [route]), said
            elif "newline" in what or what in ("carriage return", "null"):
                assert (status, entered) == (400, []), said
            elif not entered:
                assert status == 401 if key is None else status in (307, 401, 404), said


def test_the_sweep_covers_every_route(guarded: LiveServer) -> None:
    assert len(guarded.app.routes) == len(ROUTES) > 40
    assert {route.access for route in ROUTES} == set(Access)


def test_a_route_without_a_level_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = Route("/forgotten", lambda request: None)
    monkeypatch.setattr(control_routes, "routes", [*control_routes.routes, forgotten])
    with pytest.raises(TypeError, match="/forgotten: it declares no level of access"):
        create_app(EngineConfig())


def test_a_pattern_matches_whole_paths_only() -> None:
    for route in ROUTES:
        path = route.path.replace("{name:path}", "tiny-model")
        assert route.path_regex.match(path) and not route.path_regex.match(f"{path}\n")
