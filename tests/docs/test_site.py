"""The site of the documentation: it builds without a warning, and its readers load nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.docs.blocks import ROOT, pages
from tests.support import chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the command of `make docs`, where no connection can be made."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody listens at: a build that asked for something would fail.
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *values: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_each_page_of_the_repository_is_there(site: Path) -> None:
    names = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
    for page in pages():
        html = (site / f"{names.get(page.stem, page.stem)}.html").read_text()
        assert "<!-- not run" not in html and "<!-- run with" not in html
        assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//', html), page


def test_a_browser_loads_everything_from_the_site_alone(site: Path, url: str) -> None:
    asked: list[str] = []
    failed: list[str] = []
    if chromium.find() is None:
        pytest.skip(chromium.MISSING)
    with chromium.chromium() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda reply: failed.append(reply.url) if reply.status >= 400 else None)
        for name in ("index", "pausing", "rl", "failover"):
            page.goto(f"{url}/{name}.html", wait_until="networkidle")
        page.goto(f"{url}/index.html", wait_until="networkidle")
        page.fill("input[name=query]", "retract")
        page.wait_for_selector(".md-search-result__link", timeout=20_000)
    assert len(asked) > 10 and failed == []
    # What a script makes itself, such as its worker for the search, has an address of the site too.
    assert [each for each in asked if not each.startswith((url, f"blob:{url}", "data:"))] == []
