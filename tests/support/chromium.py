"""A real browser without a screen, for the tests of the web page and for its picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MISSING = "needs Chromium; on Debian: apt-get install chromium"


def find() -> str | None:
    """Returns the path of the browser; None: there is none here."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Runs a browser with an empty profile for the block; it is playwright's `Browser`.

    Raises:
        LookupError: there is no Chromium here.
    """
    from playwright.sync_api import sync_playwright

    if (path := find()) is None:
        raise LookupError(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
