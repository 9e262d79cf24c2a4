"""``segue top``: a live view of a server, or of a router and its workers."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from segue.cli.flags import setting
from segue.cli.meter import PREFIX, ROUTER, EngineReading, Meter, samples_of, total_of
from segue.cli.remote import DEFAULT_URL, ApiKey, Remote, RemoteError

VIEW = "View"
ANSWER_S = 3.0  # for the server to answer
WINDOW_S = 10.0  # of rates and percentiles
KEYS = "q: quit, r: begin rates and percentiles anew"
COLUMNS = (
    "state",
    "run",
    "wait",
    "tok/s",
    "prompt tok/s",
    "KV",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "weights",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLook:
    """What a server says at one time."""

    facts: str = ""  # its model and device; of a router, those of its first worker
    engines: dict[str, EngineReading] = field(default_factory=dict)  # by worker; "" for a server by itself
    error: str = ""  # why it says nothing


class ServerWatch:
    """Looks at a server again and again; a server that is away may come back."""

    def __init__(self, server: Remote) -> None:
        self._server = server
        self._meter = Meter(WINDOW_S)
        self._names: list[str] = []  # of the engines that were seen, in their order

    def look(self) -> ServerLook:
        """Return what the server says now."""
        try:
            text = self._text("/metrics")
            is_router = f"{PREFIX}{ROUTER}" in text
            samples = samples_of(self._text("/engine_metrics") if is_router else text)
        except RemoteError as error:
            return ServerLook(error=error.message, engines=self._missing(error.message))
        except ValueError:
            return ServerLook(error=f"{self._server.url}/metrics has no metrics; is it a server of Segue?")
        engines = self._meter.add(time.monotonic(), samples)
        facts, refusal = self._facts()
        if not engines:  # an engine that starts has no metrics yet
            reason = refusal or "it has no metrics of Segue; see its --metric-names"
            return ServerLook(error=reason, engines=self._missing(reason))
        self._names += [name for name in engines if name not in self._names]
        away = EngineReading(state="no answer")
        return ServerLook(facts=facts, engines={name: engines.get(name, away) for name in self._names})

    def forget(self) -> None:
        """Begin rates and percentiles anew."""
        self._meter.forget()

    def _missing(self, reason: str) -> dict[str, EngineReading]:
        """Return the lines of engines that were seen before and of which nothing is known now."""
        state = "starting" if "503" in reason else "no answer"
        return {name: EngineReading(state=state) for name in self._names}

    def _text(self, path: str) -> str:
        with self._server.open(path, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    def _facts(self) -> tuple[str, str]:
        """Return what ``/server_info`` says of the model, and why it says nothing."""
        try:
            with self._server.open("/server_info", timeout=ANSWER_S) as answer:
                info: Any = json.load(answer)
                decided = info.get("decided") or {}
                facts = (info.get("served_model_name"), decided.get("device"), info.get("dtype"))
                ranks = f"{info['num_gpus']} ranks" if info.get("num_gpus", 1) > 1 else None
                return ", ".join(str(each) for each in (*facts, ranks) if each), ""
        except RemoteError as error:
            return "", error.message


def top(
    url: Annotated[str, typer.Argument(help="A server, or a router.")] = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[
        float, setting("interval", "Seconds between two looks.", group=VIEW, min=0.05, max=60)
    ] = 1.0,
    once: Annotated[
        bool,
        setting("once", "Print one frame; so it is where the output is no terminal.", group=VIEW),
    ] = False,
) -> None:
    """Watch a server: requests, tokens per second, KV, latencies, weights, state; behind a router per worker.

    "prompt tok/s" counts prompt tokens. TTFT is the time to the first token, and ITL that between tokens: the
    median and the 99th percentile. Rates and percentiles are those of the last 10 seconds; percentiles of all
    requests, if there was none.
    """
    watch, console = ServerWatch(Remote(url, api_key)), Console(highlight=False)
    if once or not console.is_terminal:
        look = watch.look()
        if not look.error:
            time.sleep(interval)
            look = watch.look()
        console.print(frame(url, look))
        raise typer.Exit(1 if look.error else 0)
    with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Group(frame(url, watch.look()), Text(KEYS, style="dim")), refresh=True)
                key = wait(interval)
                if key == "q":
                    return
                if key == "r":
                    watch.forget()
        except KeyboardInterrupt:
            return


def frame(url: str, look: ServerLook) -> RenderableType:
    """Return the view of a server at one time."""
    head = f"[bold]{escape(url)}[/bold]  {escape(look.facts)}  [dim]{time.strftime('%H:%M:%S')}[/dim]"
    parts: list[RenderableType] = [Text.from_markup(head)]
    if look.error:
        parts.append(Text(f"{look.error}; trying again", style="red"))
    table = Table(box=None, pad_edge=False)
    is_fleet = any(look.engines)
    for name in (*(("worker",) if is_fleet else ()), *COLUMNS):
        table.add_column(
            name, justify="left" if name in ("worker", "state", "weights") else "right", no_wrap=True
        )
    for name, each in look.engines.items():
        table.add_row(*((escape(name),) if is_fleet else ()), *_cells(each))
    if len(look.engines) > 1:
        names = ("running", "waiting", "tokens_per_s", "prompt_tokens_per_s")
        table.add_row(
            "all", "", *(f"{value:.0f}" for value in total_of(look.engines.values(), names).values())
        )
    if look.engines:
        parts.append(table)
    return Group(*parts)


def _cells(reading: EngineReading) -> tuple[str, ...]:
    """Return the cells of an engine's line; "-" for what is not known."""
    style = "green" if reading.state == "active" else "yellow" if "paused" in reading.state else "red"
    numbers = (reading.running, reading.waiting, reading.tokens_per_s, reading.prompt_tokens_per_s)
    return (
        f"[{style}]{escape(reading.state)}[/{style}]",
        *("-" if each is None else f"{each:.0f}" for each in numbers),
        "-" if reading.kv_use is None else f"{100 * reading.kv_use:.0f}%",
        *(_milliseconds(each) for each in (*reading.ttft_s, *reading.between_s)),
        escape(reading.weights) or "-",
    )


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    return f"{1e3 * seconds:.{1 if seconds < 0.01 else 0}f}ms"


@contextmanager
def _keys() -> Iterator[Any]:
    """Return a function that waits some seconds for a key, and returns it or ""; keys are not shown."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
