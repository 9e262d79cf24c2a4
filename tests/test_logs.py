"""What a line of the log looks like, and whose lines there are."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from segue.logs import RequestMark, configure, current_request, logger


def lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


@pytest.fixture
def mark() -> Any:
    token = current_request.set(found := RequestMark("r-1"))
    yield found
    current_request.reset(token)


def test_a_line_is_one_json_object(capfd: pytest.CaptureFixture[str], mark: RequestMark) -> None:
    configure("info", "json", rank=1)
    logger.info("%d requests\nin two lines", 3)
    mark.is_over = True
    try:
        raise ValueError("of a test")
    except ValueError:
        logger.exception("it failed")
    logger.debug("is not shown")
    first, second = lines(capfd)
    at = datetime.fromisoformat(first.pop("time"))
    assert at.utcoffset() == timedelta(0)
    assert first == {
        "level": "info",
        "logger": "segue",
        "message": "3 requests\nin two lines",
        "rank": 1,
        "request_id": "r-1",
    }
    assert (second["level"], second["message"]) == ("error", "it failed")
    assert second["exception"].endswith("ValueError: of a test")
    assert "request_id" not in second, "the request is over"


def test_a_line_of_text_names_the_request(capfd: pytest.CaptureFixture[str], mark: RequestMark) -> None:
    configure("info", rank=0)
    logger.info("it goes on")
    mark.is_over = True
    logger.info("it goes on")
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith(" INFO segue rank 0: it goes on [request r-1]")
    assert second.endswith(" INFO segue rank 0: it goes on")


@pytest.mark.parametrize("form", ["text", "json"])
def test_warnings_of_other_libraries_are_lines_too(capfd: pytest.CaptureFixture[str], form: Any) -> None:
    configure("debug", form)
    configure("debug", form)  # replaces what the first call set up
    other = logging.getLogger("another.library")
    other.warning("watch out")
    other.info("is not shown")
    (line,) = capfd.readouterr().err.splitlines()
    assert "watch out" in line and "another.library" in line and line.startswith("{") == (form == "json")


def test_an_error_that_ends_a_process_is_a_line() -> None:
    program = "import warnings; from segue.logs import configure; configure('info', 'json')"
    program += "; warnings.warn('x'); 1/0"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    warning, last = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1 and warning["logger"] == "py.warnings"
    assert last["level"] == "critical" and last["exception"].endswith("ZeroDivisionError: division by zero")
