"""The logger of all of Segue, named ``segue``, and how lines look. They are written to standard error."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

logger = logging.getLogger("segue")
LogFormat = Literal["text", "json"]


@dataclass(slots=True)
class RequestMark:
    """The request of a client that a task works for."""

    id: str
    is_over: bool = False  # what the task has started, and goes on, is not about the request any more


# Of the running task; lines that are logged meanwhile name the request.
current_request: ContextVar[RequestMark | None] = ContextVar("current_request", default=None)


def request_id() -> str:
    """Return the id of the request that the running task works for; "": for none."""
    mark = current_request.get()
    return "" if mark is None or mark.is_over else mark.id


def configure(level: str, form: LogFormat = "text", *, rank: int | None = None) -> None:
    """Set up this process's logging, in place of what an earlier call set up.

    Lines of other libraries are shown too, from the level "warning" on. Those of Segue do not reach the root
    logger, which would write them twice in a program that has its own logging.

    Args:
        level: as ``--log-level`` has it, in lower case.
        form: "json": each line is a JSON object; errors that end the process are lines, too.
        rank: that every line names, of a worker; None: the process is no worker.
    """
    own, others = _handler(form, rank), _handler(form, rank)
    logger.handlers[:] = [own]
    logger.setLevel(level.upper())
    logger.propagate = False
    others.setLevel(logging.WARNING)
    root = logging.getLogger()
    root.handlers[:] = [each for each in root.handlers if not isinstance(each, _StderrHandler)] + [others]
    logging.captureWarnings(form == "json")
    if form == "json":
        sys.excepthook = _log_uncaught
    elif sys.excepthook is _log_uncaught:
        sys.excepthook = sys.__excepthook__


def writes_json() -> bool:
    """Whether each line of the log is a JSON object."""
    return any(isinstance(each.formatter, _JsonFormatter) for each in logger.handlers)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error; another class than those of a program in which Segue is embedded."""


class _TextFormatter(logging.Formatter):
    """One line for a person, and the traceback of an error below it."""

    def __init__(self, rank: int | None) -> None:
        label = "" if rank is None else f" rank {rank}"
        super().__init__(f"%(asctime)s %(levelname)s %(name)s{label}: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, with the id of the request that it is about."""
        line, about = super().formatMessage(record), request_id()
        return f"{line} [request {about}]" if about else line


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the line: time, level, logger, message; rank, request and traceback where there are any."""
        fields: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._rank is not None:
            fields["rank"] = self._rank
        if about := request_id():
            fields["request_id"] = about
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _handler(form: LogFormat, rank: int | None) -> logging.Handler:
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(rank) if form == "json" else _TextFormatter(rank))
    return handler


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an error that ends the process; Ctrl-C is none."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logger.critical("the process ends by an error", exc_info=(kind, error, trace))
