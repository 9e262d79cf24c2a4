"""Serves the bundled model, asks it one question through the official openai client, and stops the server.

`make demo` runs this. The exit code is 0 only if the model answered and the server stopped cleanly.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

QUESTION = "What is photosynthesis?"
START_TIMEOUT = 180.0
STOP_TIMEOUT = 15.0

console = Console(highlight=False)


class DemoError(Exception):
    """The demo failed; the message names the step, and the server's log has the cause."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(port: int, options: list[str]) -> Iterator[str]:
    """Start `segue serve`, yield its base URL when it is ready, and always stop it."""
    with tempfile.NamedTemporaryFile(prefix="segue-demo-", suffix=".log") as log:
        command = [sys.executable, "-m", "segue", "serve", "--port", str(port), *options]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", Path(log.name))
            yield f"http://127.0.0.1:{port}"
        except DemoError:
            console.print(
                Panel(escape(tail(Path(log.name), 20)), title="the server's log", border_style="red")
            )
            raise
        finally:
            stop(process)
        if process.returncode not in (0, -signal.SIGTERM):
            raise DemoError(
                f"the server ended with exit code {process.returncode}\n{tail(Path(log.name), 20)}"
            )


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    began = time.monotonic()
    with console.status("starting the server") as status:
        while True:
            seconds = time.monotonic() - began
            if process.poll() is not None:
                raise DemoError(f"the server ended with exit code {process.returncode} while starting")
            if seconds > START_TIMEOUT:
                raise DemoError(f"the server was not ready after {START_TIMEOUT:.0f} s")
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            status.update(f"starting the server  [dim]{seconds:3.0f} s  {escape(tail(log, 1)[-80:])}[/dim]")
            time.sleep(0.1)
    console.print(f"[green]ready[/green] at {url} after {seconds:.1f} s")


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tail(log: Path, lines: int) -> str:
    content = log.read_text(errors="replace").replace("\r", "\n")
    return "\n".join([line for line in content.splitlines() if line.strip()][-lines:])


def ask(url: str, question: str) -> dict[str, Any]:
    """Stream one answer to the terminal, and return its figures."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    model = client.models.list().data[0].id
    console.print(f"\n[bold cyan]you[/bold cyan]    {question}")
    console.print(f"[bold magenta]{model}[/bold magenta]  ", end="")
    arrivals: list[float] = []
    text, tokens = "", 0
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=256,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                arrivals.append(time.perf_counter())
                text += choice.delta.content
                console.print(choice.delta.content, end="", markup=False)
    console.print("\n")
    if not text.strip() or tokens == 0:
        raise DemoError("the answer is empty")
    decode = arrivals[-1] - arrivals[0]
    return {
        "tokens": tokens,
        "first token": f"{(arrivals[0] - began) * 1000:.0f} ms",
        "speed": f"{(tokens - 1) / decode:.1f} tokens/s" if tokens > 1 and decode > 0 else "-",
        "in all": f"{arrivals[-1] - began:.1f} s",
    }


def run(question: str, options: list[str]) -> None:
    with server(free_port(), options) as url:
        figures = ask(url, question)
        table = Table.grid(padding=(0, 3))
        table.add_row(*(f"[dim]{name}[/dim]" for name in figures))
        table.add_row(*(f"[bold]{value}[/bold]" for value in figures.values()))
        console.print(table)
    console.print("\n[green]stopped[/green]. Your own: [bold].venv/bin/segue serve[/bold]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    arguments, options = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"  # bypass any proxy
    try:
        run(arguments.question, options)
    except (DemoError, openai.OpenAIError) as error:
        console.print(f"[bold red]demo failed:[/bold red] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted; the server is stopped")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
