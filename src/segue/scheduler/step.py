"""One step: what is decided while it is planned, and remembered until its result is applied."""

from __future__ import annotations

from typing import get_args

from segue.messages.requests import Tail
from segue.messages.steps import NewRow, StepPlan
from segue.scheduler.request import Phase, Request

_TAILS: tuple[Tail, ...] = get_args(Tail)


class Step:
    """A step that is being planned, or is in flight."""

    def __init__(self, number: int, version: str) -> None:
        self.number = number
        self.version = version  # of the weights it runs with
        self.new_rows: list[NewRow] = []
        self.pages: list[tuple[int, int, list[int]]] = []
        self.num_decode = 0
        self.rows: list[int] = []
        self.starts: list[int] = []
        self.lens: list[int] = []
        self.num_logits: list[int] = []
        self.sampling: list[Request] = []  # in plan order: one token of the result each
        self.samples: list[bool] = []
        self.prompt_logprobs: list[tuple[Request, int]] = []  # (request, how many)
        self.tail: Tail = "plain"

    def decode(self, requests: list[Request]) -> None:
        """Run one token of each."""
        count = len(requests)
        self.num_decode = count
        self.rows = [r.row for r in requests]
        self.starts = [r.launched for r in requests]
        self.lens, self.num_logits, self.samples = [1] * count, [1] * count, [True] * count
        self.sampling = requests
        for request in requests:
            request.launched += 1
            request.outputs_launched += 1
            self._need(request.tail)

    def prefill(self, request: Request, budget: int) -> int:
        """Run the next chunk of a request, at most ``budget`` tokens; returns how many."""
        start = request.launched
        count = min(budget, len(request.tokens) - start)
        last = start + count == len(request.tokens)
        num_logits = int(last)
        if request.owes_prompt_logprobs:
            # The logits of position p are of the token at p + 1, so a chunk owes those of its own positions
            # but the very last, which samples; and position 0 has no logprob.
            first = max(start, request.prompt_logprobs_next - 1)
            end = min(start + count, request.prompt_len - 1)
            if first < end:
                num_logits = start + count - first
                request.prompt_logprobs_next = end + 1
                self.prompt_logprobs.append((request, end - first))
                self._need("full")
        self.rows.append(request.row)
        self.starts.append(start)
        self.lens.append(count)
        self.num_logits.append(num_logits)
        self.samples.append(last)
        request.launched += count
        if last:
            request.outputs_launched += 1
            request.enter(Phase.DECODE)
            self.sampling.append(request)
            self._need(request.tail)
        return count

    def _need(self, tail: Tail) -> None:
        if _TAILS.index(tail) > _TAILS.index(self.tail):
            self.tail = tail

    def plan(self) -> StepPlan:
        """The message to the runners."""
        return StepPlan(
            self.number,
            self.new_rows,
            self.pages,
            self.num_decode,
            self.rows,
            self.starts,
            self.lens,
            self.num_logits,
            self.samples,
            self.tail,
        )
