"""One request to several workers at once, and what each of them answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.errors import FailedOverError, SegueError, WorkersFailedError
from segue.router.answers import read_whole
from segue.router.entry import WorkerEntry
from segue.router.upstream_connection import Headers, UpstreamError

PASSED_ON = (400, 503)  # statuses that mean the same to the router's client as to the worker's
MOST_TEXT = 500  # characters of a worker's answer in an error message


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """An HTTP request as workers get it."""

    method: bytes
    path: bytes  # with the query
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """One worker's answer to a request; or why there is none."""

    status: int | None = None  # HTTP's; None: there is no answer
    kind: bytes = b""  # the content type
    body: bytes = b""
    problem: str = ""  # why there is no answer
    is_failed_over: bool = False  # the worker was lost, and another engine of its cohort takes its place

    @property
    def is_ok(self) -> bool:
        """Whether the worker did what was asked."""
        return self.status is not None and self.status < 300

    @property
    def content(self) -> Any:
        """The body: decoded if it is JSON, else as text; None: it is empty."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(self.body)
        return self.body.decode("utf-8", "replace").strip() or None

    @property
    def reason(self) -> str:
        """Why the worker did not do it: the message of its error, else the beginning of its body."""
        content = self.content
        found = content.get("message") if isinstance(content, dict) else content
        return self.problem or str(found or f"HTTP {self.status}")[:MOST_TEXT]


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a client sees of one worker's answer."""

    status: int | None  # HTTP's; None: there was no answer
    reply: Any  # the body, decoded if it is JSON; None: it is empty
    error: str  # why there was no answer; "": there was one


Replies = Mapping[str, WorkerReply]  # by worker


async def ask(worker: WorkerEntry, request: WorkerRequest, timeout_s: float | None) -> WorkerReply:
    """Returns a worker's answer within a time, None: any; what goes wrong is in the answer too."""
    try:
        async with asyncio.timeout(timeout_s):
            connection = await worker.upstream.request(
                request.method, request.path, request.headers, request.body
            )
            try:
                body = await read_whole(connection)
            finally:
                worker.upstream.done(connection)
    except TimeoutError:
        return WorkerReply(
            problem=f"it did not answer within {timeout_s:g} s, so it is not known whether it has done it"
        )
    except UpstreamError as error:
        has_cohort = worker.view is not None and bool(worker.view.record.cohort)
        return WorkerReply(problem=str(error), is_failed_over=has_cohort)
    kind = dict(connection.headers).get(b"content-type", b"")
    return WorkerReply(status=connection.status, kind=kind, body=body)


async def ask_all(workers: Iterable[WorkerEntry], request: WorkerRequest, timeout_s: float) -> Replies:
    """Returns every worker's answer to a request that all get at the same time."""
    asked = list(workers)
    replies = await asyncio.gather(*(ask(worker, request, timeout_s) for worker in asked))
    return {worker.id: reply for worker, reply in zip(asked, replies, strict=True)}


def results(replies: Replies) -> dict[str, WorkerResult]:
    """Returns what a client sees of the answers, by worker."""
    return {
        worker: WorkerResult(status=reply.status, reply=reply.content, error=reply.problem)
        for worker, reply in replies.items()
    }


def failures(replies: Replies) -> dict[str, str]:
    """Returns the workers that did not do what was asked, and why."""
    return {worker: reply.reason for worker, reply in replies.items() if not reply.is_ok}


def failure(path: str, replies: Replies) -> SegueError:
    """Returns the error for an operation that some of the workers did not do.

    If those workers were lost, and other engines take their places, the error says that it may be sent again.
    If all workers refused it with the same words, these are the error's, as those of a single engine would
    be. Otherwise the message names each worker that failed.
    """
    failed = failures(replies)
    statuses = {replies[worker].status for worker in failed}
    if len(failed) == len(replies) and len(set(failed.values())) == 1 and None not in statuses:
        message = next(iter(failed.values()))
    else:
        named = "; ".join(f"{worker}: {reason}" for worker, reason in failed.items())
        num_done = len(replies) - len(failed)
        done = f". Done at {num_done} of them" if num_done else ""
        message = f"{path} failed at {len(failed)} of {len(replies)} workers: {named}{done}"
    if all(replies[worker].is_failed_over for worker in failed):
        return failed_over(message)
    error = WorkersFailedError(message)
    if len(statuses) == 1 and (status := statuses.pop()) in PASSED_ON:
        error.status = status
        error.type = "invalid_request_error" if status == 400 else error.type
    return error


def failed_over(problem: str) -> FailedOverError:
    """Returns the error for an operation whose engine was lost before it had answered."""
    return FailedOverError(
        f"{problem}; it is not known whether the engine has done it. Another engine takes its place: look at "
        "its state, and send this again"
    )
