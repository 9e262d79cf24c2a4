"""The server behind a proxy that removes a prefix of its paths."""

from __future__ import annotations

from pathlib import Path

from tests.server.live import LiveServer


def test_a_root_path_is_removed_and_redirects_have_it(tiny_model: Path) -> None:
    with LiveServer(tiny_model, started=False, root_path="/segue/v2", api_key="k") as server:
        keyed = {"authorization": "Bearer k"}
        for path in ("/version", "/segue/v2/version"):
            assert server.client.get(path).status_code == 401
            assert server.client.get(path, headers=keyed).status_code == 200
        assert 'src="/segue/v2/page/main.js"' in server.client.get("/segue/v2?x=1").text, "the web page"
        for path in ("/segue/version", "/segue/v2version", "/segue/v2/segue/v2/version"):
            assert server.client.get(path, headers=keyed).status_code == 404
        for path in ("/openapi.json", "/segue/v2/openapi.json"):
            assert server.client.get(path, headers=keyed).json()["servers"] == [{"url": "/segue/v2"}]
        for path in ("/version/", "/segue/v2/version/"):
            moved = server.client.get(path, headers=keyed)
            assert moved.status_code == 307
            assert moved.headers["location"] == f"{server.url}/segue/v2/version"
        assert '"openapi.json"' in server.client.get("/docs", headers=keyed).text, "a path beside the page"
