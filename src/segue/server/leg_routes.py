"""``POST /leg``: a router's way to send a client's request, or a part of it, to this engine.

:mod:`segue.messages.leg` describes the body and the frames of the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.types import ASGIApp

from segue.api.legs import check_role, leg_requests, pack_end, parse_leg
from segue.api.native import NativeCall
from segue.api.openai.requests import Wanted
from segue.config import MIB
from segue.errors import DrainingError, RequestTooLargeError, SegueError, StaleEpochError, invalid_value
from segue.frontend.call_trace import CallTrace, failing
from segue.frontend.request import GenerateRequest, Generation, Output
from segue.frontend.thread_pool import ThreadPool
from segue.launch.runtime import SHUTDOWN_MESSAGE, Runtime
from segue.messages.leg import (
    LEG_CONTENT,
    LEG_PATH,
    RETRYABLE,
    Data,
    End,
    Leg,
    LegFailed,
    LegOutput,
    pack_frame,
    pack_logprobs,
)
from segue.messages.requests import Finished, pack_ids
from segue.server.access import Access, Routes
from segue.server.body import INLINE_BYTES
from segue.server.calls import CALL_KINDS, CallKind, Reply
from segue.server.raw_body import read_bytes
from segue.server.request_ids import id_of
from segue.server.responses import EventStream, encode, error_response, reply_bytes, unless_gone
from segue.server.running import call_trace, runtime_of

OUTPUTS_MIB = 64  # that a leg may have besides the client's body: the output so far
# Between two frames that name tokens of a reply that is not a stream. If this engine dies, the next one
# generates what was not named yet.
NAME_EVERY_S = 0.5
SIGN_OF_LIFE = pack_frame(Data(b"", []))
HEADERS = ((b"content-type", LEG_CONTENT.encode()), (b"cache-control", b"no-cache"))

routes = Routes(Access.USER, "Fleet")


@routes.post(LEG_PATH, hidden=True)
async def leg(request: Request) -> ASGIApp:
    """Do a router's leg, and answer with frames."""
    runtime = runtime_of(request)
    data = await read_bytes(request, runtime.config.max_body_mib + OUTPUTS_MIB)
    pool = runtime.manager.thread_pool
    leg = parse_leg(data) if len(data) <= INLINE_BYTES else await pool.run(lambda: parse_leg(data))
    if (kind := CALL_KINDS.get(leg.path)) is None:
        raise invalid_value("path", leg.path, f"must be one of {', '.join(CALL_KINDS)}")
    trace = call_trace(runtime, request, leg.path, leg.kind)
    try:
        with failing(trace):
            return await _answer(request, runtime, leg, kind, trace)
    except SegueError as error:
        return error_response(error, leg.path)


async def _answer(
    request: Request, runtime: Runtime, leg: Leg, kind: CallKind, trace: CallTrace | None
) -> ASGIApp:
    """Begin a leg's requests; returns the frames, or raises the error that the client's own route would."""
    if leg.epoch != runtime.epoch:
        text = f"the leg is for epoch {leg.epoch}, and this engine has epoch {runtime.epoch}"
        raise StaleEpochError(f"{text}; look at /watch for the engine that serves now")
    if len(leg.body) > runtime.config.max_body_mib * MIB:
        text = f"the body is larger than {runtime.config.max_body_mib} MiB"
        raise RequestTooLargeError(f"{text}; send less, or raise --max-body-mib")
    check_role(leg, runtime.manager.role)
    call = await kind.parse(runtime, leg.body, leg.id)
    is_trusted = request.app.state.gate.has_key(dict(request.scope["headers"]), Access.ADMIN)
    requests = await leg_requests(leg, call.requests, runtime.manager.encoder, is_trusted=is_trusted)
    call = _with(call, leg, requests)
    alias = id_of(request.scope)  # the router passes its client's on
    start = runtime.manager.submit(requests, call.batch_id, is_streamed=True, alias=alias, trace=trace)
    generation = await unless_gone(request, start)
    reply = kind.reply(runtime, call, generation)
    if leg.kind == "prefill":
        frames = _prefill(generation)
    elif call.stream:
        frames = _stream(generation, reply)
    else:
        frames = _whole(generation, reply, runtime.manager.thread_pool)

    def failure(error: SegueError) -> bytes:
        payload = reply.failure(error) if call.stream else encode(kind.error_body(error))
        return pack_frame(LegFailed(error.status, error.code or "", error.code in RETRYABLE, payload))

    return EventStream(frames, failure, generation.close, HEADERS, SIGN_OF_LIFE)


def _with(call: Wanted | NativeCall, leg: Leg, requests: list[GenerateRequest]) -> Wanted | NativeCall:
    """Returns the client's call with a leg's requests; on OpenAI's routes, also with its time."""
    if isinstance(call, Wanted):
        return replace(call, requests=requests, created=leg.created)
    return replace(call, requests=requests)


# --- frames ---


async def _prefill(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yields the only frame of a prefill leg, once the first token of each prompt is known."""
    await generation.outputs()
    _check_ends(generation.ends)
    yield pack_frame(End(b""))


async def _stream(generation: Generation, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Yields a frame for each event of a stream; the frame names the tokens that the event shows.

    A token may give no text yet: it may be a part of a character, or the text may begin a stop string. It is
    named all the same, since whoever goes on behind it holds back the same text (`RequestState.prime`). What
    a stream ends with is in the last frame only, so that a client gets it exactly once.

    The token that completes a stop string waits for the end, a step later: whoever went on behind it without
    the end could not compute the logprobs of the prompt any more, which are in the last event of `/generate`.
    """
    stopped: dict[int, Output] = {}
    async for index, output in generation.updates():
        if generation.states[index].cut >= 0 and output.end is None:
            stopped[index] = output
            continue
        if (before := stopped.pop(index, None)) is not None:
            output = before.joined(output)
        named = _named(index, output)
        if (work := reply.preparation(index)) is not None:
            await work
        yield pack_frame(Data(reply.event(index, output), [named]))
    yield pack_frame(End(reply.last_event()))


async def _whole(generation: Generation, reply: Reply, pool: ThreadPool) -> AsyncGenerator[bytes, None]:
    """Yields frames that name the tokens as they come, now and then, and at last the whole reply.

    Tokens of a prompt whose logprobs are wanted, too, are not named: behind their end nothing could compute
    the logprobs of the prompt. The client has nothing of the reply yet, so the next leg generates all of it.
    """
    done = asyncio.ensure_future(reply.whole())
    running = {
        index: state
        for index, state in enumerate(generation.states)
        if not state.ended_before and state.params.prompt_logprobs_start < 0
    }
    try:
        while not (await asyncio.wait({done}, timeout=NAME_EVERY_S))[0]:
            named = []
            for index, state in list(running.items()):
                if state.has_unread or state.end is not None:
                    named.append(_named(index, state.take()))
                if state.end is not None:
                    del running[index]
            if named:
                yield pack_frame(Data(b"", named))
        content, num_entries = done.result()
    finally:
        if not done.cancel() and not done.cancelled():
            done.exception()  # mark it as retrieved: asyncio would log it
    _check_ends(generation.ends)
    yield pack_frame(End(await reply_bytes(content, num_entries, pool)))


def _named(index: int, output: Output) -> LegOutput:
    """Returns new output of a prompt as a frame names it."""
    if output.end is None:
        return LegOutput(index, pack_ids(output.token_ids), pack_logprobs(output.logprobs))
    _check_ends([output.end])
    return LegOutput(index, pack_ids(output.token_ids), pack_logprobs(output.logprobs), pack_end(output.end))


def _check_ends(ends: Sequence[Finished]) -> None:
    """Raise DrainingError if the shutdown of this engine has ended a request: another engine can go on."""
    if any(end.reason == "abort" and end.message == SHUTDOWN_MESSAGE for end in ends):
        raise DrainingError(f"{SHUTDOWN_MESSAGE}; send the request to another one")
