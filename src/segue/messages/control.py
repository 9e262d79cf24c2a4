"""The conversation of the frontend (``FrontendMessage``) with the scheduler (``SchedulerMessage``)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from segue.messages.requests import Abort, AddRequest, Finish, Finished, Rejected, TokenLogprob
from segue.messages.steps import EagerReason
from segue.messages.weight_update import WeightAnswer, WeightCall, WeightNotice, WithdrawCall

# What a pause does to requests: lets those that run end; leaves all where they are; takes rows and pages back
# and has them wait; ends them. Each is stronger than the one before it.
PauseMode = Literal["wait", "in_place", "retract", "abort"]


class Pause(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop generating; answered by :class:`Paused` once no rank runs anything.

    Paused already, it may make the mode stronger, not weaker, and its time to live replaces the one before.
    """

    call: int
    mode: PauseMode
    ttl_s: float | None = None  # continue by itself after so long; None: never
    sent: float | None = None  # when, by the host's monotonic clock: the scheduler may be busy; None: now


class Continue(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Generate again; answered by :class:`Continued`, also if nothing was paused."""

    call: int


class Flush(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget all cached KV and reset the scheduler's measures; answered by :class:`Flushed`."""

    call: int
    timeout_s: float = 0.0  # how long to wait until no live request owns KV


class GetState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for the scheduler's state (``internal_states``); ``check`` also proves the invariants."""

    call: int
    check: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the scheduler loop."""


FrontendMessage = (
    AddRequest | Finish | Abort | Pause | Continue | Flush | GetState | Shutdown | WeightCall | WithdrawCall
)


class InitStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of the runner's initialisation: its seconds and the bytes it took."""

    name: str
    seconds: float
    num_bytes: int
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The engine can serve; what was decided at start."""

    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    device: str
    dtype: str
    attention_backend: str
    weight_bytes: int
    kv_bytes: int
    init_steps: list[InitStep]


class StartFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine cannot start; ``kind`` is the name of the error's class in ``segue.errors``."""

    kind: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker process lives; sent by each rank about once per second."""

    rank: int
    turn_s: float  # seconds that its loop has been at one turn, such as a step; 0: it waits for messages


class Counters(msgspec.Struct, array_like=True, kw_only=True):
    """State and running totals that ride on every output, for metrics."""

    paused: PauseMode | None = None  # what a client has asked for; None: nothing, or to continue
    is_paused: bool = False  # whether that has taken effect
    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0  # pages of live requests and of the prefix cache
    cached_pages: int = 0  # pages of the prefix cache
    num_preemptions: int = 0  # totals from here on
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_steps: int = 0
    graph_hits: int = 0  # steps that replayed a graph
    eager_steps: dict[EagerReason, int] = {}  # steps that did not, by reason
    padded_tokens: int = 0  # computed to fill graphs
    non_finite_logits: int = 0  # requests that ended because of them
    num_accepted: int = 0  # requests taken in, whatever has become of them


class SchedulerOutput(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """What one turn of the scheduler tells the frontend. ``rids`` and ``tokens`` are parallel."""

    rids: list[str]
    tokens: list[int]
    finished: list[Finished]
    counters: Counters
    step_seconds: float = 0.0  # 0: no step was applied
    logprobs: dict[str, TokenLogprob] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`GetState`."""

    call: int
    state: dict[str, Any]
    problems: list[str] = []  # broken invariants


class Paused(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The answer to :class:`Pause`: nothing runs on any rank."""

    call: int
    mode: PauseMode | None  # the present one, perhaps stronger than what was asked for; None: continued since
    num_running: int
    num_waiting: int
    num_retracted: int  # by this pause
    num_aborted: int
    drained_ms: float  # from the sending of the message to the end of the last step


class Continued(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Continue`."""

    call: int


class Flushed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Flush`."""

    call: int
    success: bool
    flushed_items: int  # tokens whose KV was cached
    error_msg: str = ""  # why not, and the way out


SchedulerMessage = (
    Ready
    | StartFailed
    | Heartbeat
    | SchedulerOutput
    | Rejected
    | State
    | Paused
    | Continued
    | Flushed
    | WeightAnswer
    | WeightNotice
)


class PauseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a pause made of the requests; nothing runs any more."""

    mode: PauseMode | None  # the present one, perhaps stronger than what was asked for; None: continued since
    num_running: int
    num_waiting: int
    num_retracted: int  # by this pause
    num_aborted: int
    drained_ms: float  # how long the steps in flight took to end


class FlushResult(msgspec.Struct, frozen=True):
    """Whether the KV cache is empty now."""

    success: bool
    flushed_items: int = 0  # tokens whose KV was cached
    error_msg: str = ""  # why not, and the way out
