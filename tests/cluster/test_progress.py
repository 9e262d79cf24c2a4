"""What a person sees while a cluster starts."""

from __future__ import annotations

import io
import json
import logging

import pytest

from segue.cluster.progress import StartProgress, count_roles

CLEAR = "\r\x1b[K"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_per_child() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = StartProgress(["decode-0", "router"], stream, clock)
    progress.redraw()
    clock.now += 12.4
    progress.ready("decode-0")
    progress.line("router", "hello")
    progress.ready("router")
    progress.finish()
    assert stream.getvalue() == (
        "decode-0 is ready, 1 of 2 after 12 s\nrouter   | hello\nrouter is ready, 2 of 2 after 12 s\n"
    )


def test_a_terminal_has_one_line_that_is_redrawn_below_the_log() -> None:
    stream, clock = FakeTerminal(), Clock()
    progress = StartProgress(["a", "b"], stream, clock)
    progress.redraw()
    clock.now += 3
    progress.ready("a")
    progress.line("b", "hello")
    progress.finish()
    progress.redraw()
    assert stream.getvalue() == (
        f"{CLEAR}Starting a, b: 0 of 2 after 0 s"
        f"{CLEAR}Starting b: 1 of 2 after 3 s"
        f"{CLEAR}b | hello\n{CLEAR}Starting b: 1 of 2 after 3 s"
        f"{CLEAR}"
    )


def test_as_json_each_line_names_the_child(caplog: pytest.LogCaptureFixture) -> None:
    stream = FakeTerminal()
    progress = StartProgress(["a", "b"], stream, Clock(), as_json=True)
    progress.redraw()
    with caplog.at_level(logging.INFO, logger="segue"):
        progress.ready("a")
    progress.line("a", '{"time": "now", "message": "hello"}')
    progress.line("b", "Traceback: 1")
    progress.finish()
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first == {"time": "now", "message": "hello", "process": "a"}
    assert (second["message"], second["process"], second["level"]) == ("Traceback: 1", "b", "info")
    assert caplog.messages == ["a is ready, 1 of 2 after 0 s"]


@pytest.mark.parametrize("stream", [io.StringIO(), FakeTerminal()])
def test_after_the_start_only_the_log_is_written(stream: io.StringIO) -> None:
    progress = StartProgress(["a"], stream, Clock())
    progress.finish()
    begin = len(stream.getvalue())
    progress.ready("a")
    progress.line("a", "hello")
    assert stream.getvalue()[begin:] == "a | hello\n"


def test_a_child_that_is_ready_again_is_no_progress() -> None:
    stream = io.StringIO()
    progress = StartProgress(["a", "b"], stream, Clock())
    progress.ready("a")
    progress.ready("a")
    assert stream.getvalue().count("ready") == 1


def test_nobody_has_to_read_it() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    StartProgress(["a"], Closed(), Clock()).line("a", "hello")


def test_roles_are_counted_in_words() -> None:
    roles = ["worker", "prefill worker", "decode worker", "decode worker"]
    assert count_roles(roles) == "1 worker, 1 prefill worker, 2 decode workers"
