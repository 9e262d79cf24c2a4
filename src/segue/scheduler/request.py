"""A request's life inside the scheduler."""

from __future__ import annotations

from enum import Enum, auto

from segue.kvcache.prefix_cache import Node
from segue.messages.requests import SamplingParams


class RequestPhase(Enum):
    """Where a request is; it owns a slot and pages in PREFILL and DECODE only."""

    WAITING = auto()
    PREFILL = auto()  # some of its known tokens have no KV yet
    DECODE = auto()  # one token a step
    FINISHED = auto()


_NEXT = {
    RequestPhase.WAITING: {RequestPhase.PREFILL, RequestPhase.FINISHED},
    RequestPhase.PREFILL: {RequestPhase.DECODE, RequestPhase.WAITING, RequestPhase.FINISHED},
    RequestPhase.DECODE: {RequestPhase.WAITING, RequestPhase.FINISHED},
    RequestPhase.FINISHED: set[RequestPhase](),
}


class Request:
    """One request. Positions count from the first prompt token; position *p* is computed when its KV is."""

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
        self.arrival = arrival  # running number; a retracted request keeps it, and so its place in the queue
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(params.stop_token_ids)
        self.sampling_mode = params.sampling_mode
        self.phase = RequestPhase.WAITING

        self.tokens = prompt  # prompt and output known on the host
        self.outputs_launched = 0  # output tokens sampled by launched steps, the one in flight included
        self.versions: list[tuple[str, int, int]] = []  # (weight version, start, end) over the output tokens
        self.prompt_logprobs_next = params.prompt_logprobs_start  # first prompt position still owed; -1: none
        self.cached_tokens = (
            -1
        )  # prompt tokens found in the prefix cache at the first admission; -1: not yet admitted
        self.num_retractions = 0

        self.slot = -1
        self.launched = 0  # positions computed by launched steps
        self.pages: list[int] = []  # in token order: shared ones of the prefix cache, then its own
        self.capacity = 0  # positions the pages hold
        self.node: Node | None = None  # the deepest locked node of the prefix cache
        self.num_inserted = 0  # leading pages that belong to the prefix cache
        self.kv_epoch = -1  # of the weights under which its KV began

    @property
    def num_outputs(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_decode(self) -> bool:
        """Whether its next step runs one token; an end by length is known before the last token is."""
        return self.phase is RequestPhase.DECODE and self.outputs_launched < self.max_new_tokens

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether logprobs of prompt tokens are wanted and not all launched yet."""
        return 0 <= self.prompt_logprobs_next < self.prompt_len

    @property
    def own_pages(self) -> list[int]:
        """Pages that are this request's alone."""
        return self.pages[self.num_inserted :]

    def enter(self, phase: RequestPhase) -> None:
        """Change the phase; the only place that does."""
        assert phase in _NEXT[self.phase], f"request {self.rid}: {self.phase.name} -> {phase.name}"
        self.phase = phase

    def add_token(self, token: int, version: str) -> None:
        """Note a sampled token and the weights that made it."""
        at = len(self.tokens) - self.prompt_len
        self.tokens.append(token)
        spans = self.versions
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], at + 1)
        else:
            spans.append((version, at, at + 1))

    def forget_kv(self) -> None:
        """Begin anew with the tokens it has, after its slot, pages and lock were released."""
        self.slot = -1
        self.launched = 0
        self.pages = []
        self.capacity = 0
        self.node = None
        self.num_inserted = 0
        self.kv_epoch = -1
        self.outputs_launched = self.num_outputs
