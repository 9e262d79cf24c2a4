"""What is seen on a terminal while a model is loaded."""

from __future__ import annotations

import io
import re
import signal
import sys
from pathlib import Path

import pytest

from segue.cli.start_view import start_view
from segue.messages.control import StartStep
from tests.support.terminal import Terminal


@pytest.mark.parametrize("form", ["text", "json"])
def test_there_is_no_view_without_a_terminal(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with start_view(form) as on_start:  # type: ignore[arg-type]
        assert on_start is None
    assert capsys.readouterr() == ("", "")


class Screen(io.StringIO):
    """Stands in for a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_names_the_step_and_its_bytes_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with start_view("text") as on_start:
        assert on_start is not None
        for step in (
            StartStep(0, "device", 1, 11),
            StartStep(0, "weights", 4, 11),
            StartStep(0, "weights", 4, 11, 1 << 20, 4 << 20),
            StartStep(0, "weights", 4, 11, 3 << 20, 4 << 20),
            StartStep(0, "page count", 5, 11),
            StartStep(0, "kernels", 11, 12),
            StartStep(0, "kernels", 11, 12, detail="7 of 77"),
        ):
            on_start(step)
        on_start(None)
        shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", screen.getvalue())
        for text in (
            "start 1/11: device 0:00:00",
            "start 4/11: weights",
            "3.0/4.0 MiB",
            "start 5/11: page count",
            "start 11/12: kernels, 7 of 77",
        ):
            assert text in shown
        assert screen.getvalue().endswith("\x1b[2K")  # the line is empty
        screen.truncate(0)
    assert screen.getvalue() == ""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_terminal_shows_the_steps_or_has_lines_of_json(form: str, tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--num-kv-tokens", "2048", "--port", "0"]
    terminal = Terminal("serve", *flags, "--device", "cpu", "--log-format", form)
    try:
        if form == "json":
            terminal.expect(r'"message": "start +4/12 weights: ')
        else:
            terminal.expect(r"start \d+/12: [a-zA-Z ]+ \d:\d\d:\d\d")
            terminal.expect(r"[\d.]+/[\d.]+ (bytes|KiB|MiB)")
        terminal.expect(r"Ready at http://127\.0\.0\.1:\d+")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0
    finally:
        terminal.close()
