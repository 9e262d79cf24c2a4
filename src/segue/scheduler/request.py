"""One request inside the scheduler: its phase, its tokens, and the slot and pages that it owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from segue.kvcache.prefix_cache import Node
from segue.messages.requests import FinishReason, SamplingMode, SamplingParams


class RequestPhase(Enum):
    """The phase of a request; it owns a slot and pages in PREFILL and DECODE only.

    Admission leads from WAITING to PREFILL, the last prefill chunk to DECODE, a retraction back to WAITING.
    A request may end in any phase: it is FINISHED.
    """

    WAITING = auto()
    PREFILL = auto()  # some of its known tokens have no KV yet
    DECODE = auto()  # one token per step
    FINISHED = auto()


# The same phases; on Python 3.11 reading one from its class takes 140 ns, for each request and step.
WAITING, PREFILL, DECODE, FINISHED = RequestPhase

_NEXT = {
    WAITING: {PREFILL, FINISHED},
    PREFILL: {DECODE, WAITING, FINISHED},
    DECODE: {WAITING, FINISHED},
    FINISHED: set[RequestPhase](),
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request. Positions count from the first prompt token; a position is computed once its KV is."""

    rid: str
    params: SamplingParams
    tokens: list[int]  # the prompt, then the output tokens known on the host
    prompt_len: int
    most_outputs: int  # output tokens that it may have here; those that it arrived with count too
    priority: int
    arrival: int  # 1, 2, 3, …; a retracted request keeps its number, and so its queue position
    added_at: float  # seconds, by the clock of `Scheduler.plan`
    deadline: float = inf  # when its first token is due, by the same clock
    has_begun: bool  # whether it was admitted before, or arrived with output tokens
    stop_ids: frozenset[int] = field(init=False)
    sampling_mode: SamplingMode = field(init=False)
    phase: RequestPhase = WAITING
    outputs_launched: int = field(init=False)  # output tokens known, or sampled by a step in flight
    versions: list[tuple[str, int, int]] = field(default_factory=list)  # (weight version, start, end)
    prompt_logprobs_next: int = field(init=False)  # first prompt position still owed; -1: none
    cached_tokens: int = -1  # prompt tokens that its first admission found cached; -1: not admitted

    slot: int = -1
    launched: int = 0  # positions that all launched steps compute
    pages: list[int] = field(default_factory=list)  # in token order: first the prefix cache's, then its own
    capacity: int = 0  # positions that the pages have room for
    node: Node | None = None  # the deepest locked node of the prefix cache
    num_inserted: int = 0  # leading pages that belong to the prefix cache
    kv_epoch: int = -1  # the weights' epoch at its admission

    def __post_init__(self) -> None:
        """Derive what the parameters and tokens imply."""
        self.stop_ids = frozenset(self.params.stop_token_ids)
        self.sampling_mode = self.params.sampling_mode
        self.outputs_launched = self.num_outputs
        self.prompt_logprobs_next = self.params.prompt_logprobs_start

    @property
    def num_outputs(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_decode(self) -> bool:
        """Whether it takes part in the next decode; an end by length is known before its last token is."""
        return self.phase is DECODE and self.outputs_launched < self.most_outputs

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens were asked for and some are not launched yet."""
        return 0 <= self.prompt_logprobs_next < self.prompt_len

    @property
    def own_pages(self) -> list[int]:
        """Pages that belong to this request and not to the prefix cache."""
        return self.pages[self.num_inserted :]

    def enter(self, phase: RequestPhase) -> None:
        """Change the phase; nothing else changes it."""
        assert phase in _NEXT[self.phase], f"request {self.rid}: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def add_token(self, token: int, version: str) -> None:
        """Append a sampled token; ``version`` is that of the weights that made it."""
        at = len(self.tokens) - self.prompt_len
        self.tokens.append(token)
        spans = self.versions
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + 1)
        else:
            spans.append((version, at, at + 1))

    def end_by_output(self) -> FinishReason | None:
        """Returns how the last output token ends the request; None if it goes on."""
        count = len(self.tokens) - self.prompt_len
        if self.tokens[-1] in self.stop_ids and 0 < count >= self.params.min_new_tokens:
            return "stop"
        return "length" if count >= self.most_outputs else None

    def forget_kv(self) -> None:
        """Reset all KV state but keep the tokens; its slot, pages and lock have been released before."""
        self.slot = self.kv_epoch = -1
        self.launched = self.capacity = self.num_inserted = 0
        self.pages = []
        self.node = None
        self.outputs_launched = self.num_outputs
