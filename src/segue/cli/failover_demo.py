"""``segue failover-demo``: a stream that goes on while the engine that generates it is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from segue.checkpoint.bundled import NAME
from segue.cli.backends import RemoteModel, TextQuery
from segue.cli.flags import setting
from segue.cli.remote import Remote
from segue.cluster.pod_process import PodProcess, TakeoverTimes
from segue.config import Device, LoadFormat
from segue.errors import SegueError

QUESTION = "Why does the sky look blue by day, and red at sunset?"
LOOK_S = 0.005  # between two looks at the reply
KILL_AFTER = 24  # pieces of text, each of which shows about one token
QUIET_S = 120.0  # without a further piece; a busy machine may take minutes for a whole reply
MOST_TOKENS = 4096
PANEL = "Demonstration"


@dataclass(slots=True)
class WatchedStream:
    """A reply, read by a thread of its own."""

    pieces: list[tuple[float, str]] = field(default_factory=list)  # when each one came, and its text
    error: SegueError | None = None
    has_ended: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(text for _, text in self.pieces)

    def read(self, reply: Iterator[str]) -> None:
        """Read a reply to its end."""
        try:
            for text in reply:
                if text:
                    self.pieces.append((time.monotonic(), text))
        except SegueError as error:
            self.error = error
        self.has_ended = True

    def num_until(self, moment: float) -> int:
        """Return how many pieces had come by a moment."""
        return sum(at <= moment for at, _ in list(self.pieces))


def failover_demo(
    model: Annotated[
        str | None, setting("model", f"Directory, GGUF file or hub id; default: {NAME}.", group=PANEL)
    ] = None,
    load_format: Annotated[
        LoadFormat, setting("load_format", "Format of the weights.", group=PANEL)
    ] = "auto",
    device: Annotated[Device, setting("device", "Device that runs the model.", group=PANEL)] = "cpu",
    tokens: Annotated[
        int, setting("tokens", "Tokens of the reply.", group=PANEL, min=2 * KILL_AFTER, max=MOST_TOKENS)
    ] = 160,
) -> None:
    """Kill an engine in the middle of its reply, and see another one go on with it.

    This starts `segue serve --shadows 1`, asks a question, and kills the engine that answers with SIGKILL.
    """
    console = Console(highlight=False)
    options = [f"--device={device}", f"--load-format={load_format}", "--deterministic"]
    options += [] if model is None else [f"--model={model}"]
    with console.status("Starting two engines and a router …") as status:
        pod = PodProcess(
            options,
            on_progress=lambda line: status.update(f"Starting two engines and a router: {escape(line)}"),
        )
    with pod:
        show = _Picture(console)
        first = pod.serving()
        assert first is not None
        show.engines[first.engine] = "[green]serves[/green], epoch 1"
        show.engines["engine-b" if first.engine == "engine-a" else "engine-a"] = "stands by"
        with show:
            tokens = _kill_in_the_middle(pod, show, tokens)
        with console.status("Asking once more, and killing nothing …") as status:
            again = _ask(pod, tokens)
            for _ in _progress(again):
                status.update(
                    f"Asking once more, and killing nothing: {len(again.pieces)} of {len(show.stream.pieces)}"
                )
        _report(console, show, again)


def _ask(pod: PodProcess, tokens: int) -> WatchedStream:
    """Send the question; the reply is read by a thread."""
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    stream = WatchedStream()
    question = {"role": "user", "content": QUESTION}
    reply = RemoteModel(Remote(pod.url, None)).stream(TextQuery(messages=[question], sampling=sampling))
    threading.Thread(target=stream.read, args=(reply,), daemon=True).start()
    return stream


def _progress(stream: WatchedStream) -> Iterator[None]:
    """Yield again and again until a reply has ended.

    Raises:
        SegueError: nothing has come for too long.
    """
    num_pieces, since = 0, time.monotonic()
    while not stream.has_ended:
        if len(stream.pieces) > num_pieces:
            num_pieces, since = len(stream.pieces), time.monotonic()
        if time.monotonic() > since + QUIET_S:
            raise SegueError(f"nothing came for {QUIET_S:g} s behind {num_pieces} pieces of the reply")
        yield
        time.sleep(LOOK_S)


def _kill_in_the_middle(pod: PodProcess, show: _Picture, tokens: int) -> int:
    """TextQuery, kill the engine that answers when it has begun, and read the reply to its end.

    A reply that has ended by then, because this process had to wait for a core, is asked for again with twice
    as many tokens. Returns how many they were.
    """
    while True:
        stream, show.times = _ask(pod, tokens), None
        show.stream = stream
        for _ in _progress(stream):
            if show.times is None and len(stream.pieces) >= KILL_AFTER:
                _kill(pod, show)
        if show.goes_on or stream.error is not None or tokens >= MOST_TOKENS:
            return tokens
        tokens = min(2 * tokens, MOST_TOKENS)
        pod.wait_for_standby()


def _kill(pod: PodProcess, show: _Picture) -> None:
    """Kill the engine that serves, and show how another one takes over."""
    show.killed_at = time.monotonic()
    times = show.times = pod.kill_serving()
    show.engines[times.victim.engine] = "[red]killed[/red] with SIGKILL, starts again as a shadow"
    show.engines[times.successor.engine] = f"[green]serves[/green], epoch {times.successor.epoch}"


class _Picture:
    """What is seen while it goes on: a picture that changes in a terminal, nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self.engines: dict[str, str] = {}
        self.stream = WatchedStream()
        self.killed_at: float | None = None
        self.times: TakeoverTimes | None = None
        self._console = console
        self._live = Live(self, console=console, refresh_per_second=20, transient=True)

    def __enter__(self) -> None:
        if self._console.is_terminal:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    @property
    def goes_on(self) -> bool:
        """Whether a part of the reply is the successor's."""
        return self.times is not None and self.stream.num_until(self._record_at(self.times)) < len(
            self.stream.pieces
        )

    def __rich__(self) -> RenderableType:
        engines = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name in sorted(self.engines):
            engines.add_row(f"[bold]{name}[/bold]", self.engines[name])
        parts: list[RenderableType] = [
            engines,
            Panel(self.reply(), title=escape(QUESTION), border_style="dim"),
        ]
        if self.times is not None:
            parts.append(self.timeline(self.times))
        return Group(*parts)

    def reply(self) -> Text:
        """The reply so far; what another engine has generated has another colour."""
        pieces = [text for _, text in list(self.stream.pieces)]
        if self.killed_at is None:
            return Text("".join(pieces))
        by_victim = len(pieces) if self.times is None else self.stream.num_until(self._record_at(self.times))
        return Text.assemble(
            "".join(pieces[:by_victim]), (" ⚡ ", "bold red"), ("".join(pieces[by_victim:]), "green")
        )

    def _record_at(self, times: TakeoverTimes) -> float:
        """When the successor could be found: what came before was under way from the dead engine."""
        return times.killed_at + times.record_s

    def timeline(self, times: TakeoverTimes) -> Table:
        """The steps of the takeover, in milliseconds from the kill."""
        steps = {
            "killed": 0.0,
            "dead: its process has ended": times.dead_s,
            "lock: the shadow has it": times.lock_s,
            "awake: it has generated a test token": times.awake_s,
            "record: the router can find it": times.record_s,
        }
        by_victim = self.stream.num_until(self._record_at(times))
        if by_victim < len(self.stream.pieces):
            token_at, _ = self.stream.pieces[by_victim]
            steps["next token of the stream"] = token_at - times.killed_at
        longest = max(steps.values())
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, seconds in steps.items():
            bar = "━" * max(1, round(40 * seconds / longest)) if longest else ""
            table.add_row(f"{seconds * 1e3:7.0f} ms", f"[red]{bar}[/red]", name)
        return table


def _report(console: Console, show: _Picture, again: WatchedStream) -> None:
    """Print what has happened.

    Raises:
        SegueError: the reply was cut, or is not the one without a kill.
    """
    if not console.is_terminal:
        for name in sorted(show.engines):
            console.print(f"{name}: {show.engines[name]}", soft_wrap=True)
        console.print(show.reply(), soft_wrap=True)
        if show.times is not None:
            console.print(show.timeline(show.times), soft_wrap=True)
    else:
        console.print(show)
    if show.stream.error is not None:
        raise show.stream.error
    if not show.goes_on:
        raise SegueError("the reply ended before the engine was killed; give more --tokens")
    if again.error is not None:
        raise again.error
    if show.stream.text != again.text:
        raise SegueError("the reply differs from the one of a run without a kill")
    count = len(show.stream.pieces)
    console.print(
        f"[bold green]The stream went on:[/bold green] {count} pieces of text, no error, and the same text "
        "as without a kill.",
        soft_wrap=True,
    )
