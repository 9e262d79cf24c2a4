"""One client's request: the legs that answer it, and the further ones when a worker is lost.

Until the client has something, the request is tried again from its beginning. Afterwards it is resumed: the
next leg gets every token that the frames have named, and goes on behind them. The client sees a pause.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from segue.disagg.offer import UNCLAIMED_S
from segue.errors import DrainingError, HandoverError, NoWorkerError
from segue.logs import logger
from segue.messages.leg import Data, Frame, Leg, LegFailed
from segue.router.attempts import Attempts, FailureKind
from segue.router.choice import Local, Pair, Refuse, Whole
from segue.router.client_request import ClientRequest
from segue.router.fleet import Assignment, WorkerView
from segue.router.foreign import ForeignLeg
from segue.router.legs import LegError, PrefillLeg, WorkerLeg, names_tokens
from segue.router.prompts import BytesPerToken, cached_tokens, prompt_tokens
from segue.router.registry import Registry
from segue.router.reply import ClientReply
from segue.router.request_trace import LegTrace, RequestTrace
from segue.router.splice import Splice
from segue.router.upstream_connection import Headers
from segue.server.responses import unless_gone

POLL_S = 0.05  # at most, between two looks for a worker that can go on with a request
PREFILL_GRACE_S = 1.0  # from the end of a reply until a prefill leg that has not ended is aborted


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondClaim:
    """Another decode worker takes over KV that the prefill worker of the last pair still offers."""

    assignment: Assignment


Choice = Pair | Local | Whole | SecondClaim | Refuse


class Relay:
    """An ASGI application that answers one request by the payloads of legs.

    The hold on each worker is released when its leg has ended, has failed, or has lost its client. If the
    client leaves, the connections to the workers are closed, and they abort the request.
    """

    def __init__(
        self,
        registry: Registry,
        sizes: BytesPerToken,
        headers: Headers,
        foreign_headers: Headers,
        request: ClientRequest,
        resume_timeout_s: float,
        trace: RequestTrace | None = None,
    ) -> None:
        """Take a request; ``trace`` is its own.

        ``headers`` are those that engines get, with their admin key, without which they believe a leg less.
        Foreign workers get ``foreign_headers``.
        """
        self._trace = trace
        self._incomplete: str | None = "the client has left"  # why the reply is not complete; None: it is
        self._registry = registry
        self._sizes = sizes
        self._headers = headers
        self._foreign_headers = foreign_headers
        self._request = request
        self._resume_timeout_s = resume_timeout_s
        self._splice = Splice()
        self._attempts = Attempts()
        self._leg: WorkerLeg | None = None  # that answers the client
        self._prefill: PrefillLeg | None = None  # of the last pair
        self._began = time.monotonic()
        self._has_first_token = False
        self._num_attempts = 0
        self._num_frames_before = 0  # with tokens, when the last pair was sent
        self._num_tokens_before = 0  # when the last attempt began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay the request; return when the client has the reply or has left, and all legs are closed."""
        request = self._request
        reply = ClientReply(scope, receive, send, request.path, is_stream=request.facts.is_stream)
        try:
            with suppress(ClientDisconnect, OSError):
                await unless_gone(Request(scope, receive), self._answer(reply))
        finally:
            await self._close()
            if self._trace is not None:
                self._trace.end(self._incomplete)

    async def _answer(self, reply: ClientReply) -> None:
        """Make attempts until one of them ends the reply, or there may be no more."""
        error: LegError | None = None  # of the last attempt
        while True:
            began = time.monotonic()
            choice = await self._choose(error, reply)
            if self._trace is not None:
                self._trace.chosen(began, type(choice).__name__.lower())
            if isinstance(choice, Refuse):
                return await self._give_up(reply, error, choice)
            if not self._num_attempts:
                self._observe("queue")
            try:
                await self._attempt(choice, reply)
                self._incomplete = None
                return self._observe("request")
            except LegError as failure:
                error = failure
                self._close_leg()
            if error.code == HandoverError.code and self._prefill is not None:
                # The prefill worker may be lost, which the router itself does not know yet.
                self._attempts.avoid(self._prefill.assignment.worker, FailureKind.BROKEN_OFF)
            self._attempts.progressed(self._splice.num_tokens - self._num_tokens_before)
            is_over = self._registry.is_closed
            if is_over or not self._attempts.note(error.worker, error.kind, self._is_begun, error.code):
                await self._give_up(reply, error, None)
                return
            text = "request %s goes on elsewhere, because worker %s failed: %s"
            logger.warning(text, self._request.id, error.worker.id, error)

    def _observe(self, name: str) -> None:
        """Count the time since the request came, in the histogram of this name."""
        self._registry.counters.observe(name, time.monotonic() - self._began)

    @property
    def _is_begun(self) -> bool:
        """Whether tokens are known that a further leg must go on behind."""
        return self._splice.num_frames > 0

    async def _close(self) -> None:
        """Close all legs. If the reply was complete, they are about to end, and connections can be kept."""
        is_over = self._leg is not None and self._leg.is_over
        if self._leg is not None and is_over:
            await self._leg.finish()
        self._close_leg()
        if self._prefill is not None:
            await self._prefill.close(PREFILL_GRACE_S if is_over else 0.0)

    def _close_leg(self) -> None:
        if self._leg is not None:
            self._leg.close()
            self._leg = None

    # --- which workers ---

    async def _choose(self, error: LegError | None, reply: ClientReply) -> Choice:
        """Choose the workers of the next attempt.

        A request waits for at most ``--resume-timeout-s`` seconds if the client has a part of the reply. Any
        other one waits until a cohort has had no active engine for so long: then no successor is about to
        serve, and requests that come later are refused at once.
        """
        facts, attempts = self._request.facts, self._attempts
        outputs = self._splice.num_tokens if self._is_begun else None
        if error is not None and (claim := self._second_claim(error, outputs)) is not None:
            return claim
        if self._prefill is not None:
            await self._prefill.close()
            self._prefill = None
        deadline, has_waited = time.monotonic() + self._resume_timeout_s, False
        while True:
            now = time.monotonic()
            choice = self._registry.choose(facts, self._avoided(), now, outputs)
            if isinstance(choice, Refuse) and attempts.forgive(refusals=False):
                choice = self._registry.choose(facts, self._avoided(), now, outputs)
            if not isinstance(choice, Refuse) or self._registry.is_closed:
                return choice
            vacancies = self._registry.vacancies(attempts.is_gone, now)
            is_over = now >= deadline
            if outputs is None:
                is_over = is_over or min(vacancies.values(), default=inf) >= self._resume_timeout_s
            if is_over:
                return replace(choice, no_wait=self._no_wait(vacancies, has_waited=has_waited))
            if outputs is not None:
                attempts.forgive(refusals=True)
            self._registry.counters.waits += not has_waited
            has_waited = True
            await reply.keep_alive()
            await self._registry.wait_for_change(min(POLL_S, deadline - now))

    def _no_wait(self, vacancies: Mapping[str, float], *, has_waited: bool) -> str:
        """Returns why a request waits no longer, or not at all, as the beginning of an error message."""
        limit = f"{self._resume_timeout_s:g} s (--resume-timeout-s)"
        if vacancies:
            names, seconds = " or ".join(filter(None, vacancies)), min(vacancies.values())
            engine = f"engine of cohort {names}" if names else "engine"
            return f"no {engine} has been active for {seconds:.1f} s, and requests wait for at most {limit}"
        return f"the request waited {limit} for an engine that can go on with it" if has_waited else ""

    def _avoided(self) -> frozenset[str]:
        return self._attempts.avoided(self._registry.views())

    def _second_claim(self, error: LegError, outputs: int | None) -> SecondClaim | None:
        """Returns another decode worker for the last pair's KV; None: it cannot be handed over again.

        The prefill worker offers it until it has been handed over, and at most ``UNCLAIMED_S`` seconds after
        the first token. That token is handed over with the KV. Once a frame has named it, the next leg begins
        after it, and the offer no longer fits.
        """
        prefill, now = self._prefill, time.monotonic()
        if prefill is None or prefill.has_failed or error.code == HandoverError.code:
            return None
        is_offered = prefill.ended_at is None or now < prefill.ended_at + UNCLAIMED_S
        if not is_offered or self._splice.num_frames > self._num_frames_before:
            return None
        facts, tried = self._request.facts, self._avoided()
        assignment = self._registry.second_claim(facts, prefill.assignment.worker.id, tried, now, outputs)
        return None if assignment is None else SecondClaim(assignment=assignment)

    # --- one attempt ---

    async def _attempt(self, choice: Pair | Local | Whole | SecondClaim, reply: ClientReply) -> None:
        """Send the legs of a choice, and pass the reply on; return when the client has all of it.

        Raises:
            LegError: a leg failed, and the client may lack something.
        """
        registry, request, now = self._registry, self._request, time.monotonic()
        keys, outputs = request.facts.keys, self._splice.outputs()
        self._num_tokens_before = self._splice.num_tokens
        self._count(choice)
        if isinstance(choice, Pair):
            computing = choice.prefill
            sent, trace = registry.begin(computing, now, keys), self._leg_trace("prefill", computing.worker)
            leg = WorkerLeg(registry, sent, computing.worker, trace)
            message = request.leg("prefill", computing.worker, outputs, secrets.randbits(63) or 1)
            self._prefill = PrefillLeg(leg, message, self._headers, computing)
            self._num_frames_before = self._splice.num_frames
        answering = choice.decode if isinstance(choice, Pair) else choice.assignment
        worker = answering.worker
        if worker.is_foreign:
            trace = self._leg_trace("foreign", worker)
            foreign = ForeignLeg(registry, registry.begin(answering, now, keys), reply, trace)
            await foreign.run(request, self._foreign_headers)
            return
        if isinstance(choice, Pair | SecondClaim):
            assert self._prefill is not None
            computing = self._prefill.assignment
            peer = computing.worker.record.kv_address
            message = request.leg("decode", worker, outputs, self._prefill.room, peer)
        else:
            computing = answering
            message = request.leg("whole", worker, outputs)
        sent, trace = registry.begin(answering, now, keys), self._leg_trace(message.kind, worker)
        leg = self._leg = WorkerLeg(registry, sent, worker, trace)
        self._learn(computing, await self._pass_on(leg, await self._first_frames(leg, message, reply), reply))

    def _leg_trace(self, kind: str, worker: WorkerView) -> LegTrace | None:
        return None if self._trace is None else self._trace.leg(kind, worker, self._splice.num_tokens)

    def _count(self, choice: Pair | Local | Whole | SecondClaim) -> None:
        counters = self._registry.counters
        if self._num_attempts:
            counters.resumes += self._is_begun
            counters.retries += not self._is_begun
        self._num_attempts += 1
        counters.pairs += isinstance(choice, Pair)
        counters.local += isinstance(choice, Local)
        counters.second_claims += isinstance(choice, SecondClaim)

    async def _first_frames(self, leg: WorkerLeg, message: Leg, reply: ClientReply) -> list[Frame]:
        """Send the leg that answers the client; returns the first frames that say something.

        If the prefill leg fails meanwhile, the KV will not come, and this leg is not waited for.
        """
        opening = asyncio.ensure_future(self._open(leg, message, reply))
        try:
            prefill = self._prefill
            if message.kind == "decode" and prefill is not None:
                await asyncio.wait({opening, prefill.task}, return_when=asyncio.FIRST_COMPLETED)
                if not opening.done() and prefill.has_failed:
                    prefill.task.result()  # raises its LegError
            return await opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    async def _open(self, leg: WorkerLeg, message: Leg, reply: ClientReply) -> list[Frame]:
        await leg.open(message, self._headers)
        while not names_tokens(frames := await leg.read()):
            await reply.keep_alive()
        return frames

    async def _pass_on(self, leg: WorkerLeg, frames: list[Frame], reply: ClientReply) -> tuple[bytes, bytes]:
        """Pass payloads on as they come; returns the last two, from which something can be learned."""
        splice, before, is_stream = self._splice, b"", self._request.facts.is_stream
        if is_stream and not self._has_first_token and any(map(_has_token, frames)):
            self._has_first_token = True
            self._observe("first_token")

        def push(frame: Data) -> bool:
            nonlocal before
            if not frame.payload or not reply.write_now(frame.payload):
                return False
            before = frame.payload
            splice.take(frame.outputs)
            return True

        while True:
            for frame in frames:
                payload = frame.payload
                if type(frame) is Data:
                    if frame.outputs:
                        splice.take(frame.outputs)
                    if payload and is_stream:
                        before = payload
                        await reply.write(payload)
                    elif not frame.outputs:
                        await reply.keep_alive()
                elif type(frame) is LegFailed:
                    raise leg.failure(frame)
                else:
                    await reply.end(payload)
                    return before, payload
            frames = await leg.read(push)

    # --- the end ---

    def _learn(self, computing: Assignment, last: tuple[bytes, bytes]) -> None:
        """Learn from the end of a reply how many tokens the prompt had, and how many of them were cached."""
        facts = self._request.facts
        for payload in reversed(last):
            if prompt_tokens(payload) is not None:
                self._sizes.learn(self._request.path, facts, payload)
                cached = cached_tokens(payload)
                if cached is not None and facts.num_bytes:
                    self._registry.note_cached(facts, computing, cached)
                return

    async def _give_up(self, reply: ClientReply, error: LegError | None, refusal: Refuse | None) -> None:
        """End the reply with the worker's own error, if there is one; else with the router's."""
        self._incomplete = str(error) if error is not None else "no worker could take the request"
        if refusal is not None and refusal.no_wait and not self._is_begun:
            self._registry.counters.refused += 1
            await reply.fail(refusal.error())
        elif error is not None and error.failed is not None:
            await reply.end_failed(error.failed.status, error.failed.payload)
        elif error is not None and error.answer is not None:
            await reply.answer(error.answer)
        elif self._registry.is_closed:
            await reply.fail(DrainingError("the router ended before the reply did; send the request again"))
        elif refusal is not None and not self._is_begun:
            self._registry.counters.refused += 1
            await reply.fail(refusal.error())
        elif error is not None:
            lost = f"worker {error.worker.id} was lost ({error})"
            why = refusal.error().message if refusal else "too many workers have failed at this request"
            await reply.fail(NoWorkerError(f"{lost}, and none took its place: {why}; send the request again"))


def _has_token(frame: Frame) -> bool:
    return type(frame) is Data and bool(frame.outputs or frame.payload)
