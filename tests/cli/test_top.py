"""``segue top``: one frame of a real server, and the live view of a router whose answers are made up here."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from segue.cli import main
from tests.cli.test_meter import TEXT
from tests.server.live import LiveServer
from tests.support.terminal import Terminal

ROUTER = '# TYPE segue:router_in_flight gauge\nsegue:router_in_flight{worker="a:1"} 0\n'


@contextmanager
def serving(pages: dict[str, str], port: int = 0) -> Iterator[str]:
    """Yields the URL of a server of these texts."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_one_frame_shows_what_a_server_does(tiny_model: Path) -> None:
    words = ["--once", "--interval", "0.05"]
    with LiveServer(tiny_model, admin_api_key="secret") as server:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 5}}
        assert server.client.post("/generate", json=body).status_code == 200
        server.client.post(
            "/pause_generation", json={"mode": "retract"}, headers={"authorization": "Bearer secret"}
        )
        result = CliRunner().invoke(
            main.app, ["top", server.url, *words, "--api-key", "secret"], env={"COLUMNS": "200"}
        )
        server.assert_nothing_left()
    assert result.exit_code == 0
    head, names, line = result.output.splitlines()
    assert head.startswith(f"{server.url}  tiny-model, cpu")
    assert names.split()[:3] == ["state", "run", "wait"]
    assert re.fullmatch(r"paused \(retract\) +0 +0 +0 +0 +\d+% .*ms .* 0 *", line), line

    gone = CliRunner().invoke(main.app, ["top", server.url, *words])
    assert gone.exit_code == 1 and "cannot reach" in gone.output


def test_the_live_view_shows_workers_and_survives_the_end_of_the_server() -> None:
    values = {"steps": 1, "tokens": 1, "fast": 1, "all": 1, "paused": 0}
    pages = {"/metrics": ROUTER, "/engine_metrics": TEXT % values, "/server_info": "{}"}
    with serving(pages) as url:
        terminal = Terminal("top", url, "--interval", "0.05")
        try:
            terminal.expect(r"a:1 +active +2 ")
            terminal.expect(r"b:2 +no answer")
            pages["/engine_metrics"] = TEXT % (values | {"paused": 1})
            terminal.expect(r"a:1 +paused \(wait\)")
        except BaseException:
            terminal.close()
            raise
    try:
        terminal.expect("cannot reach")
        terminal.expect(r"a:1 +no answer")
        with serving(pages, int(url.rpartition(":")[2])):
            terminal.expect(r"a:1 +paused \(wait\)")
            terminal.type("q")
            assert terminal.end() == 0
    finally:
        terminal.close()
