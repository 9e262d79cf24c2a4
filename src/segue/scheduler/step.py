"""One step: what is decided while it is planned, and remembered until its result is applied."""

from __future__ import annotations

from typing import get_args

from segue.messages.requests import SamplingMode
from segue.messages.steps import NewSlot, StepPlan
from segue.scheduler.request import Request, RequestPhase

_SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)


class Step:
    """A step that is being planned, or is in flight."""

    def __init__(self, number: int, version: str) -> None:
        self.number = number
        self.version = version  # of the weights it runs with
        self.new_slots: list[NewSlot] = []
        self.pages: list[tuple[int, int, list[int]]] = []
        self.num_decode = 0
        self.slots: list[int] = []
        self.starts: list[int] = []
        self.lens: list[int] = []
        self.num_logits: list[int] = []
        self.sampling: list[Request] = []  # in plan order: one token of the result each
        self.samples: list[bool] = []
        self.prompt_logprobs: list[tuple[Request, int]] = []  # (request, how many)
        self.sampling_mode: SamplingMode = "plain"

    def decode(self, requests: list[Request]) -> None:
        """Run one token of each."""
        count = len(requests)
        self.num_decode = count
        self.slots = [r.slot for r in requests]
        self.starts = [r.launched for r in requests]
        self.lens, self.num_logits, self.samples = [1] * count, [1] * count, [True] * count
        self.sampling = requests
        for request in requests:
            request.launched += 1
            request.outputs_launched += 1
            self._need(request.sampling_mode)

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
        self.slots.append(request.slot)
        self.starts.append(start)
        self.lens.append(count)
        self.num_logits.append(num_logits)
        self.samples.append(last)
        request.launched += count
        if last:
            request.outputs_launched += 1
            request.enter(RequestPhase.DECODE)
            self.sampling.append(request)
            self._need(request.sampling_mode)
        return count

    def _need(self, sampling_mode: SamplingMode) -> None:
        if _SAMPLING_MODES.index(sampling_mode) > _SAMPLING_MODES.index(self.sampling_mode):
            self.sampling_mode = sampling_mode

    def plan(self) -> StepPlan:
        """The message to the runners."""
        return StepPlan(
            self.number,
            self.new_slots,
            self.pages,
            self.num_decode,
            self.slots,
            self.starts,
            self.lens,
            self.num_logits,
            self.samples,
            self.sampling_mode,
        )
