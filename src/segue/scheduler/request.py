"""One request inside the scheduler: its phase, its tokens, and the slot and pages that it owns."""

from __future__ import annotations

from enum import Enum, auto

from segue.kvcache.prefix_cache import Node
from segue.messages.requests import SamplingParams


class RequestPhase(Enum):
    """The phase of a request; it owns a slot and pages in PREFILL and DECODE only.

    Admission leads from WAITING to PREFILL, the last prefill chunk to DECODE, a retraction back to WAITING.
    A request may end in any phase: it is FINISHED.
    """

    WAITING = auto()
    PREFILL = auto()  # some of its known tokens have no KV yet
    DECODE = auto()  # one token per step
    FINISHED = auto()


_NEXT = {
    RequestPhase.WAITING: {RequestPhase.PREFILL, RequestPhase.FINISHED},
    RequestPhase.PREFILL: {RequestPhase.DECODE, RequestPhase.WAITING, RequestPhase.FINISHED},
    RequestPhase.DECODE: {RequestPhase.WAITING, RequestPhase.FINISHED},
    RequestPhase.FINISHED: set[RequestPhase](),
}


class Request:
    """One request. Positions count from the first prompt token; a position is computed once its KV is."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "capacity",
        "kv_epoch",
        "launched",
        "max_new_tokens",
        "node",
        "num_inserted",
        "num_retractions",
        "outputs_launched",
        "pages",
        "params",
        "phase",
        "priority",
        "prompt_len",
        "prompt_logprobs_next",
        "rid",
        "sampling_mode",
        "slot",
        "stop_ids",
        "tokens",
        "versions",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        arrival: int,
        max_new_tokens: int,
    ) -> None:
        self.rid = rid
        self.params = params
        self.priority = priority
        self.arrival = arrival  # 1, 2, 3, …; a retracted request keeps its number, and so its queue position
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(params.stop_token_ids)
        self.sampling_mode = params.sampling_mode
        self.phase = RequestPhase.WAITING

        self.tokens = prompt  # the prompt, then the output tokens known on the host
        self.outputs_launched = 0  # output tokens that all launched steps sample, those in flight included
        self.versions: list[tuple[str, int, int]] = []  # (weight version, start, end) over the output tokens
        self.prompt_logprobs_next = params.prompt_logprobs_start  # first position still owed; -1: none
        self.cached_tokens = -1  # tokens that its first admission found in the prefix cache; -1: not admitted
        self.num_retractions = 0

        self.slot = -1
        self.launched = 0  # positions that all launched steps compute
        self.pages: list[int] = []  # in token order: first pages of the prefix cache, then its own
        self.capacity = 0  # positions that the pages have room for
        self.node: Node | None = None  # the deepest locked node of the prefix cache
        self.num_inserted = 0  # leading pages that belong to the prefix cache
        self.kv_epoch = -1  # the weights' epoch at its admission

    @property
    def num_outputs(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_decode(self) -> bool:
        """Whether it takes part in the next decode; an end by length is known before its last token is."""
        return self.phase is RequestPhase.DECODE and self.outputs_launched < self.max_new_tokens

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

    def forget_kv(self) -> None:
        """Reset all KV state but keep the tokens; its slot, pages and lock have been released before."""
        self.slot = -1
        self.launched = 0
        self.pages = []
        self.capacity = 0
        self.node = None
        self.num_inserted = 0
        self.kv_epoch = -1
        self.outputs_launched = self.num_outputs
