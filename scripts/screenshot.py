"""Takes the picture of the web page that the README shows: docs/images/page.png.

    python -m scripts.screenshot [--dark] [--file docs/images/page.png]

It serves the bundled model, has several clients ask it, pauses it, names other weights, chats, and looks.
It needs Chromium, which `tests/support/chromium.py` finds.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.support.chromium import chromium

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "What is photosynthesis?",
    "Name three rivers in Europe.",
    "Write a sentence about the sea.",
    "How do I boil an egg?",
)
SERVE = ("-m", "segue", "serve", "--port", "0", "--num-kv-tokens", "4096", "--max-model-len", "1024")


def ask_on(http: httpx.Client, ends: threading.Event, seed: int) -> None:
    """One client: question after question, with pauses of its own, until ``ends``."""
    draw = random.Random(seed)
    while not ends.is_set():
        messages = [{"role": "user", "content": draw.choice(QUESTIONS)}]
        body = {"messages": messages, "max_tokens": draw.randrange(10, 60), "seed": seed}
        http.post("/v1/chat/completions", json=body)
        ends.wait(draw.uniform(0.5, 6.0))


def take(url: str, file: Path, *, is_dark: bool) -> None:
    """Load the server at ``url`` for a minute, and take the picture."""
    ends = threading.Event()
    with (
        httpx.Client(base_url=url, timeout=120) as http,
        chromium() as browser,
    ):
        scheme = "dark" if is_dark else "light"
        page = browser.new_page(viewport={"width": 1360, "height": 860}, color_scheme=scheme)
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_selector("#state[data-tone=good]")
        clients = [threading.Thread(target=ask_on, args=(http, ends, seed)) for seed in range(5)]
        for number, client in enumerate(clients):
            client.start()
            page.wait_for_timeout(4_000 if number else 8_000)
        http.post("/pause_generation", json={"mode": "retract"})
        page.wait_for_timeout(8_000)
        http.post("/update_weight_version", json={"new_version": "step-120", "abort_all_requests": True})
        http.post("/continue_generation")
        page.wait_for_timeout(20_000)
        page.evaluate("document.querySelector('[name=max_tokens]').value = 70")
        page.evaluate("document.querySelector('[name=temperature]').value = 0")
        page.fill("#message", "Why is the sky blue?")
        page.press("#message", "Enter")
        page.wait_for_selector("#send:not([hidden])")
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=file)
        ends.set()
        for client in clients:
            client.join()


def main() -> None:
    """Serve, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dark", action="store_true", help="take the dark form")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "images" / "page.png")
    options = parser.parse_args()
    options.file.parent.mkdir(exist_ok=True)
    server = subprocess.Popen([sys.executable, *SERVE], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        words = next(line for line in server.stdout if line.startswith("Ready at")).split()
        take(words[2], options.file, is_dark=options.dark)
    finally:
        server.terminate()
        server.wait()
    print(f"{options.file}: {options.file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
