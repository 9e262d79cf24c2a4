from __future__ import annotations

from pathlib import Path

import pytest

import segue
from tests.server.live import LiveServer


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_a_serving_engine_is_healthy(server: LiveServer, path: str) -> None:
    response = server.client.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_everything_is_503_while_the_engine_starts(tiny_model: Path) -> None:
    with LiveServer(tiny_model, started=False) as server:
        for path in ("/health", "/v1/models", "/server_info"):
            response = server.client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        response = server.client.post("/v1/completions", json={})
        assert response.json()["error"]["code"] == "engine_not_ready"
        assert server.client.get("/metrics").status_code == 200


def test_version_and_openapi(server: LiveServer) -> None:
    assert server.client.get("/version").json() == {"version": segue.__version__}
    page = server.client.get("/openapi.json").json()
    schema = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert "temperature" in schema["properties"]
    assert "$ref" not in str(page["paths"]["/v1/chat/completions"])
    body = page["paths"]["/pause_generation"]["post"]["requestBody"]
    modes = body["content"]["application/json"]["schema"]["properties"]["mode"]
    assert (set(modes["enum"]), body["required"]) == ({"wait", "in_place", "retract", "abort"}, False)
    for path, method, name in (
        ("/flush_cache", "get", "timeout"),
        ("/flush_cache", "post", "timeout"),
        ("/pause", "post", "mode"),
    ):
        (parameter,) = page["paths"][path][method]["parameters"]
        assert (parameter["name"], parameter["in"]) == (name, "query")
