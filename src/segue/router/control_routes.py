"""Control routes of the router: each goes to all workers, and is answered as one engine would answer it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from segue.api.control import AbortRequest, FlushQuery, PauseQuery, PauseRequest
from segue.api.profile import ProfileRequest
from segue.api.schema import body_schema, query_schema
from segue.api.validation import parse
from segue.api.vllm import AbortRequests, ResetPrefixCache
from segue.errors import FailedOverError, SegueError, WorkersFailedError
from segue.router.choice import Refuse
from segue.router.entry import WorkerEntry
from segue.router.fan_out import (
    Replies,
    WorkerRequest,
    ask_all,
    failure,
    failures,
    results,
)
from segue.router.router import Router, for_workers, router_of
from segue.server.access import Access, Routes
from segue.server.responses import HEADERS, json_response, native_body

READ_S = 10.0  # for a worker to answer what changes nothing
Answer = dict[str, Any]  # the fields of a worker's answer, or of the router's

routes = Routes(Access.ADMIN, "Control")


async def replies_of(request: Request, timeout_s: float, path: bytes | None = None) -> Replies:
    """Send a client's request to all workers at once; returns their answers.

    ``path``, with the query, is where the workers get it; None: where the client has sent it.

    Raises:
        NoWorkerError: there are no workers.
        RequestTooLargeError: the body is larger than ``--max-body-mib``.
    """
    sent = await for_workers(request)
    return await _send(request, sent if path is None else replace(sent, path=path), timeout_s)


async def _send(request: Request, sent: WorkerRequest, timeout_s: float) -> Replies:
    """Send all workers what a client's request comes to; raises NoWorkerError if there are none."""
    router = router_of(request)
    workers = addressed_by(router, request.scope["path"])
    replies = await ask_all(workers, sent, timeout_s)
    router.registry.counters.count_control(request.scope["path"], not failures(replies))
    return replies


def addressed_by(router: Router, path: str) -> list[WorkerEntry]:
    """Returns the workers that an operation goes to.

    Raises:
        FailedOverError: there are none, because the only one was lost, and another one takes its place.
        NoWorkerError: there are none.
    """
    if workers := router.registry.addressed:
        return workers
    vacancies = router.registry.vacancies(lambda view: False, time.monotonic())
    if cohorts := [each for each, s in vacancies.items() if s < router.config.resume_timeout_s]:
        text = f"{path}: no engine of cohort {' or '.join(cohorts)} is active now"
        raise FailedOverError(f"{text}; another one is about to take its place: send this again")
    raise Refuse(problem="no worker is registered", reasons=[]).error()


async def _pause(request: Request) -> Replies:
    """Pause all workers, and those that join later."""
    router, sent = router_of(request), await for_workers(request)
    return await router.pause.begin(sent, _send(request, sent, router.config.control_timeout_s))


async def _resume(request: Request) -> Replies:
    """Let all workers generate."""
    router_of(request).pause.end()
    return await replies_of(request, router_of(request).config.control_timeout_s)


def combined(path: str, replies: Replies, combine: Callable[[list[Answer]], Answer]) -> Response:
    """Returns the answer to a client: as one engine's, with each worker's in ``workers``.

    ``combine`` makes it of what the workers said, in their order. If a worker did not do what was asked, the
    answer is an error that names it.
    """
    return made_of(path, replies, lambda answers: combine(answers) | {"workers": results(replies)})


def made_of(path: str, replies: Replies, make: Callable[[list[Any]], Any]) -> Response:
    """Returns what ``make`` makes of the workers' answers, in their order; an error as :func:`combined`."""
    if failures(replies):
        return _refused(failure(path, replies), replies)
    try:
        return json_response(make([reply.content for reply in replies.values()]))
    except (KeyError, TypeError, AttributeError):
        text = f"{path}: a worker answered without the fields of an engine; use one version of Segue for all"
        return _refused(WorkersFailedError(text), replies)


def _refused(error: SegueError, replies: Replies) -> Response:
    """Returns the answer for an operation that failed, with what each worker said."""
    body = native_body(error) | {"workers": results(replies)}
    return json_response(body, error.status, HEADERS.get(error.status))


# --- pauses ---


@routes.post("/pause_generation", schema=body_schema(PauseRequest, required=False))
async def pause_generation(request: Request) -> Response:
    """Stop generating on all workers; answers once nothing runs, with what became of the requests."""
    replies = await _pause(request)
    return combined(request.scope["path"], replies, _paused)


def _paused(answers: list[Answer]) -> Answer:
    """Returns the answer to a pause: counts are added up, and the drain took as long as the slowest one."""
    counts = [name for name in answers[0] if name.startswith("num_")]
    return answers[0] | {
        "drained_ms": max(answer["drained_ms"] for answer in answers),
        **{name: sum(answer[name] for answer in answers) for name in counts},
    }


@routes.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Generate again on all workers; not paused: nothing happens."""
    replies = await _resume(request)
    return combined(request.scope["path"], replies, _first)


@routes.post("/pause", schema=query_schema(PauseQuery))
async def pause(request: Request) -> Response:
    """As ``/pause_generation``, by vLLM's name and modes; then the prefix caches are emptied."""
    replies = await _pause(request)
    return combined(request.scope["path"], replies, _paused_as_vllm)


def _paused_as_vllm(answers: list[Answer]) -> Answer:
    """Returns the first answer that says that a cache was not emptied; else that of the first worker."""
    return next((dict(each) for each in answers if not each.get("cache_cleared", True)), dict(answers[0]))


@routes.post("/resume")
async def resume(request: Request) -> Response:
    """As ``/continue_generation``, by vLLM's name."""
    replies = await _resume(request)
    return combined(request.scope["path"], replies, _first)


def _first(answers: list[Answer]) -> Answer:
    """Returns the answer that all workers gave."""
    return dict(answers[0])


@routes.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether generation is paused on all workers."""
    replies = await replies_of(request, READ_S)
    return combined(
        request.scope["path"],
        replies,
        lambda answers: {"is_paused": all(answer["is_paused"] for answer in answers)},
    )


# --- requests and caches ---


@routes.post("/abort_request", schema=body_schema(AbortRequest, required=False))
async def abort_request(request: Request) -> Response:
    """End a request, a batch, or all, on whichever workers they are; an unknown rid does nothing."""
    replies = await replies_of(request, router_of(request).config.control_timeout_s)
    path = request.scope["path"]
    return _refused(failure(path, replies), replies) if failures(replies) else Response()


@routes.post("/abort_requests", schema=body_schema(AbortRequests, required=False))
async def abort_requests(request: Request) -> Response:
    """As ``/abort_request``, by vLLM's name; ``aborted`` counts those of all workers."""
    replies = await replies_of(request, router_of(request).config.control_timeout_s)

    def combine(answers: list[Answer]) -> Answer:
        return answers[0] | {"aborted": sum(answer["aborted"] for answer in answers)}

    return combined(request.scope["path"], replies, combine)


@routes.post("/reset_prefix_cache", schema=query_schema(ResetPrefixCache))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV of all workers, by vLLM's name; ``success`` is false if one has not."""
    replies = await replies_of(request, router_of(request).config.control_timeout_s)
    return combined(request.scope["path"], replies, _reset)


def _reset(answers: list[Answer]) -> Answer:
    """Returns the first answer that says that a cache was not reset; else that of the first worker."""
    return next((dict(answer) for answer in answers if not answer["success"]), dict(answers[0]))


@routes.get("/flush_cache", schema=query_schema(FlushQuery))
@routes.post("/flush_cache", schema=query_schema(FlushQuery))
async def flush_cache(request: Request) -> Response:
    """Forget all cached KV of all workers; refused where a live request owns some."""
    wait_s = parse(FlushQuery, dict(request.query_params), coerces=True).timeout
    replies = await replies_of(request, router_of(request).config.control_timeout_s + wait_s)
    if failed := failures(replies):
        # A worker's own reason stands behind the same words as the router's.
        reasons = [f"{worker}: {text.rpartition('Reason: ')[2]}" for worker, text in failed.items()]
        flushed = (
            f"Flushed: {', '.join(each for each in replies if each not in failed)}\n"
            if len(failed) < len(replies)
            else ""
        )
        text = f"Cache not flushed.\nReason: {'; '.join(reasons)}\n{flushed}"
        status = failure(request.scope["path"], replies).status
        return Response(text, status, HEADERS.get(status), media_type="text/plain")
    items = {worker: _flushed_items(str(reply.content)) for worker, reply in replies.items()}
    lines = [f"Flushed items: {sum(items.values())}", *(f"{each}: {items[each]}" for each in items)]
    return Response("\n".join(["Cache flushed.", *lines, ""]), media_type="text/plain")


def _flushed_items(text: str) -> int:
    """Returns the number in a worker's answer; 0 if it has none."""
    number = text.rpartition("Flushed items: ")[2].strip()
    return int(number) if number.isdecimal() else 0


# --- profiles ---


@routes.post("/start_profile", schema=body_schema(ProfileRequest, required=False))
async def start_profile(request: Request) -> Response:
    """Trace the steps of all workers, each in its own ``--profile-dir``."""
    replies = await replies_of(request, router_of(request).config.control_timeout_s)
    return combined(request.scope["path"], replies, _first)


@routes.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Trace no more, and write a trace per rank of each worker."""
    replies = await replies_of(request, router_of(request).config.control_timeout_s)

    def combine(answers: list[Answer]) -> Answer:
        return answers[0] | {"files": [file for answer in answers for file in answer["files"]]}

    return combined(request.scope["path"], replies, combine)
