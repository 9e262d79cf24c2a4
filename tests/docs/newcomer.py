"""Does what the section "Start" of the README says, in a fresh clone, and times each step.

`python -m tests.docs.newcomer` installs everything into an environment of the clone. The commands are the
blocks of the README, run as they stand. The chat is held in a browser, where there is one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT, blocks
from tests.support import chromium
from tests.support.child import start_child

LIMIT_S = 300.0
URL = "http://127.0.0.1:30000"
QUESTION = "What is photosynthesis?"
STEPS = ("A chat in the browser", "New weights while it serves", "An engine that is killed")


def clone(folder: Path) -> Path:
    """Clone this repository as it is committed."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def commands(checkout: Path) -> list[list[str]]:
    """The command blocks of each step, in the order of the README."""
    readme = checkout / "README.md"
    lines = readme.read_text(encoding="utf-8").splitlines()
    starts = [lines.index(f"### {step}") + 1 for step in STEPS]
    ends = [*starts[1:], lines.index("## Install")]
    found = [each for each in blocks(readme) if each.language == "bash"]
    return [
        [each.text for each in found if start < each.line < end]
        for start, end in zip(starts, ends, strict=True)
    ]


def follow(checkout: Path) -> dict[str, float]:
    """Follow the README in a checkout; returns the seconds of each step.

    Raises:
        RuntimeError: a command failed, or something is not as the README says.
    """
    (setup, serve), (update,), (failover,) = commands(checkout)
    began = time.monotonic()
    seconds: dict[str, float] = {}
    _run(setup, checkout)
    server = start_child(["bash", "-c", f"exec {serve}"], cwd=checkout, stdout=subprocess.PIPE, text=True)
    try:
        _wait_until_ready(server)
        answer = _chat()
        seconds[STEPS[0]] = time.monotonic() - began
        print(f"{STEPS[0]}: {seconds[STEPS[0]]:.0f} s; the answer begins {answer[:40]!r}", flush=True)

        began = time.monotonic()
        print(_run(update, checkout), end="")
        with urllib.request.urlopen(f"{URL}/weight_version", timeout=10) as reply:
            version = json.load(reply)["weight_version"]
        if version != "step-3":
            raise RuntimeError(f"the server has the weights {version!r}, and not step-3")
        _chat()
        seconds[STEPS[1]] = time.monotonic() - began
        print(f"{STEPS[1]}: {seconds[STEPS[1]]:.0f} s", flush=True)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()

    began = time.monotonic()
    _run(failover, checkout)
    seconds[STEPS[2]] = time.monotonic() - began
    print(f"{STEPS[2]}: {seconds[STEPS[2]]:.0f} s", flush=True)
    return seconds


def _run(script: str, checkout: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=checkout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{script}failed: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def _wait_until_ready(server: subprocess.Popen[Any]) -> None:
    assert server.stdout is not None
    for line in server.stdout:
        if "Ready" in line:
            return
    raise RuntimeError(f"the server ended with exit code {server.wait()} before it was ready")


def _chat() -> str:
    """Asks one question in the page's chat, or without a browser by the same route; returns the answer."""
    if chromium.find() is None:
        body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32}).encode()
        request = urllib.request.Request(f"{URL}/v1/chat/completions", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
    else:
        with chromium.chromium() as browser:
            page = browser.new_page()
            page.goto(URL)
            page.fill("#message", QUESTION)
            page.keyboard.press("Enter")
            page.locator(".turn.model .note").filter(has_text="· first token").wait_for(timeout=120_000)
            text = page.inner_text(".turn.model .text")
    if not text:
        raise RuntimeError("the model answered nothing")
    return str(text)


def main() -> int:
    """Follow the README in a clone, with a new environment; a slow step is an error."""
    with tempfile.TemporaryDirectory(prefix="segue-newcomer-") as folder:
        environment = [name for name in os.environ if name.startswith("SEGUE_")]
        for name in ("PYTHONPATH", "VIRTUAL_ENV", *environment):
            os.environ.pop(name, None)
        seconds = follow(clone(Path(folder) / "segue"))
    return int(max(seconds.values()) > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
