"""The spans of calls and of weight updates, made of times that are taken anyway, once something has ended.

A call is one request of a client, or one leg of a router. Its span has children for what its requests have
gone through: ``receive``, ``queue``, ``prefill``, ``hand-over`` (of KV, to a decode engine) and ``decode``.
Attributes are those of OpenTelemetry's conventions for generative AI where there are such.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from segue.errors import InvalidRequestError
from segue.messages.requests import Finished, SamplingParams
from segue.messages.weight_update import EndedUpdate, WeightNotice
from segue.tracing.context import Header, TraceContext, context_of
from segue.tracing.spans import Attribute, EndedSpan
from segue.tracing.tracer import Tracer

if TYPE_CHECKING:
    from segue.frontend.request import RequestState

_CHATS = ("/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/responses", "/v1/messages")
OPERATIONS = dict.fromkeys(_CHATS, "chat")  # others: a completion
UPDATE = "weight update"
# What an update does from the beginning of each of its phases until the next one.
PHASES: Mapping[str, str] = {
    "STAGING": "stage",
    "POSTING": "post receives",
    "PREPARED": "wait for tensors",
    "RECEIVING": "receive",
    "RECEIVED": "wait for commit",
    "SEALING": "seal",
    "COMMITTING": "hold generation",
    "WRITING": "write",
}


@dataclass(slots=True, eq=False)
class CallTrace:
    """The spans of one call."""

    tracer: Tracer
    parent: TraceContext | None
    context: TraceContext
    name: str
    began: float  # when the head of the call had come, by the monotonic clock
    attributes: dict[str, Attribute]
    num_left: int = 0  # requests that have not ended
    _is_over: bool = False  # whether the call's own span was recorded
    _first_at: float = 0.0  # the first token of any of the requests
    _tokens: list[int] = field(default_factory=lambda: [0, 0, 0])  # of prompts, found in the cache, output
    _reasons: list[str] = field(default_factory=list)

    def ended(self, state: RequestState, finished: Finished, now: float) -> None:
        """Take that a request has ended as ``finished`` says; record the call if it was the last one."""
        self.num_left -= 1
        if not self.context.is_sampled:
            return
        if not self._reasons:
            self._describe(state)
        for index, count in enumerate((finished.prompt_tokens, finished.cached_tokens, finished.num_tokens)):
            self._tokens[index] += count
        self._reasons.append(finished.client_reason)
        if state.first_token_at > self.began and not self._first_at:
            self._first_at = state.first_token_at
        self.tracer.record(list(self._phases(state, finished, now)))
        if self.num_left <= 0:
            failed = finished.error is not None or finished.reason == "error"
            self._record(now, (finished.message or finished.error) if failed else None, finished.error)

    def fail(self, error: BaseException) -> None:
        """Take that the call fails, or that its client has left; nothing happens if it is over."""
        kind = type(error).__name__
        # What is wrong with a request may quote it.
        text = kind if isinstance(error, InvalidRequestError) else str(error) or kind
        self._record(time.monotonic(), text, kind)

    def _record(self, now: float, error: str | None, kind: str | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if kind is not None:
            self.attributes["error.type"] = kind
        if self._reasons:
            prompt, cached, output = self._tokens
            self.attributes |= {
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.cache_read.input_tokens": cached,
                "gen_ai.usage.output_tokens": output,
                "gen_ai.response.finish_reasons": self._reasons,
            }
        if self._first_at:
            self.attributes["gen_ai.response.time_to_first_chunk"] = self._first_at - self.began
        parent = 0 if self.parent is None else self.parent.span_id
        span = EndedSpan(
            self.name, self.context, parent, self.began, now, "server", self.attributes, error, bool(parent)
        )
        self.tracer.record([span])

    def _describe(self, state: RequestState) -> None:
        """Note what the call asks for; its requests differ in their prompts and seeds alone."""
        self.attributes["gen_ai.response.id"] = state.batches[0] if state.batches else state.rid
        self.attributes |= _asked(state.params)
        if self.num_left:
            self.attributes["gen_ai.request.choice.count"] = self.num_left + 1

    def _phases(self, state: RequestState, finished: Finished, now: float) -> Iterator[EndedSpan]:
        times, rid = finished.times, state.rid
        added = times.added or now
        if len(self._reasons) == 1:
            yield self._child("receive", self.began, added, {})
        about: dict[str, Attribute] = {"segue.request.id": rid}
        if times.taken_over:
            yield self._child("hand-over", added, times.taken_over, about)
        elif times.added:
            yield self._child("queue", added, times.admitted or now, about)
        if times.admitted and not times.taken_over:
            cached: dict[str, Attribute] = {"gen_ai.usage.cache_read.input_tokens": finished.cached_tokens}
            yield self._child("prefill", times.admitted, times.prefilled or now, about | cached)
        # The first token is that of the prompt; one that came with the request does not count as one.
        if finished.reason != "handoff" and state.last_token_at > state.first_token_at:
            yield self._child("decode", max(times.prefilled, times.taken_over, times.admitted), now, about)

    def _child(self, name: str, start: float, end: float, about: Mapping[str, Attribute]) -> EndedSpan:
        place = self.tracer.child(self.context)
        return EndedSpan(name, place, self.context.span_id, start, max(start, end), "internal", about)


def _asked(params: SamplingParams) -> dict[str, Attribute]:
    """Return the attributes of a request's options."""
    found: dict[str, Attribute] = {
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if params.top_k:
        found["gen_ai.request.top_k"] = params.top_k
    if params.presence_penalty:
        found["gen_ai.request.presence_penalty"] = params.presence_penalty
    if params.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    return found


@dataclass(slots=True, eq=False)
class EngineTracing:
    """What makes an engine's spans."""

    tracer: Tracer
    model: str  # as clients know it
    _update_parent: TraceContext | None = None  # of the calls of the present weight update

    def call(self, headers: Iterable[Header], path: str, began: float, leg: str = "") -> CallTrace:
        """Begin a call; ``path`` is the client's route, and ``leg`` the kind of a router's leg, or empty."""
        operation = OPERATIONS.get(path, "text_completion")
        name, parent = f"{operation} {self.model}", context_of(headers)
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "segue",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "http.request.method": "POST",
            "url.path": path,
        }
        if leg:
            attributes["segue.leg.kind"] = leg
        return CallTrace(self.tracer, parent, self.tracer.begin(parent, name), name, began, attributes)

    def note_update_call(self, headers: Iterable[Header]) -> None:
        """Take the headers of a call for a weight update: its span becomes a child of what they name."""
        self._update_parent = context_of(headers) or self._update_parent

    def note_weights(self, before: WeightNotice, notice: WeightNotice) -> None:
        """Record the spans of a weight update, if one has ended between two notices."""
        number = (before.num_committed, before.num_failed)
        if notice.ended is None or number == (notice.num_committed, notice.num_failed):
            return
        parent, self._update_parent = self._update_parent, None
        place = self.tracer.begin(parent, UPDATE)
        self.tracer.record(list(self._of_update(notice.ended, notice.version, place, parent)))

    def close(self) -> None:
        """Send what is there, within a bound."""
        self.tracer.close()

    def _of_update(
        self, update: EndedUpdate, version: str, place: TraceContext, parent: TraceContext | None
    ) -> Iterator[EndedSpan]:
        phases = sorted(update.times.items(), key=lambda phase: phase[1])  # of equal ones, as they came
        ends = [at for _, at in phases[1:]] + [update.ended]
        for (name, at), end in zip(phases, ends, strict=True):
            if name in PHASES:
                yield EndedSpan(PHASES[name], self.tracer.child(place), place.span_id, at, end)
        attributes: dict[str, Attribute] = {
            "segue.weights.update": update.id,
            "segue.weights.kind": update.kind,
            "segue.weights.bytes": update.num_bytes,
            "segue.weights.version": version,
        }
        above, began = 0 if parent is None else parent.span_id, min([update.began, *update.times.values()])
        yield EndedSpan(
            UPDATE, place, above, began, update.ended, "internal", attributes, update.error, bool(above)
        )


@contextmanager
def failing(trace: CallTrace | None) -> Iterator[None]:
    """Tell a call's trace of an error that leaves the block."""
    try:
        yield
    except BaseException as error:
        if trace is not None:
            trace.fail(error)
        raise
