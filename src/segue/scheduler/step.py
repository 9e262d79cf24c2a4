"""One step: it is filled while it is planned, and kept until its result is applied."""

from __future__ import annotations

from typing import get_args

from segue.messages.requests import SamplingMode
from segue.messages.steps import StepPlan
from segue.scheduler.request import DECODE, Request

_SAMPLING_MODES: tuple[SamplingMode, ...] = get_args(SamplingMode)


class Step:
    """A step that is being planned, or is in flight."""

    def __init__(self, number: int, version: str) -> None:
        self.number = number
        self.version = version  # name of the weights that the step runs with
        self.plan = StepPlan(number)  # the message to the model runners; nothing changes it once it is sent
        self.sampling: list[Request] = []  # requests that sample a token, in the order of the result
        self.prompt_logprobs: list[tuple[Request, int]] = []  # (request, number of them)

    def decode(self, requests: list[Request]) -> None:
        """Add the decode part: one token per request."""
        plan, count = self.plan, len(requests)
        plan.num_decode = count
        plan.slots = [r.slot for r in requests]
        plan.starts = [r.launched for r in requests]
        plan.lens, plan.num_logits, plan.samples = [1] * count, [1] * count, [True] * count
        self.sampling = requests
        for request in requests:
            request.launched += 1
            request.outputs_launched += 1
        self._require(*{request.sampling_mode for request in requests})

    def prefill(self, request: Request, budget: int) -> int:
        """Add the next prefill chunk of a request, at most ``budget`` tokens; returns its length.

        The last chunk samples a token. The request decodes from then on, if it may draw further tokens.
        """
        plan, start = self.plan, request.launched
        count = min(budget, len(request.tokens) - start)
        last = start + count == len(request.tokens)
        num_logits = int(last)
        if request.owes_prompt_logprobs:
            # The logits at position p score the token at p + 1. A chunk therefore needs the logits of all its
            # positions but the last prompt position, which samples. The token at position 0 has no logprob.
            first = max(start, request.prompt_logprobs_next - 1)
            end = min(start + count, request.prompt_len - 1)
            if first < end:
                num_logits = start + count - first
                request.prompt_logprobs_next = end + 1
                self.prompt_logprobs.append((request, end - first))
                self._require("full")
        plan.slots.append(request.slot)
        plan.starts.append(start)
        plan.lens.append(count)
        plan.num_logits.append(num_logits)
        plan.samples.append(last)
        request.launched += count
        if last:
            request.outputs_launched += 1
            request.enter(DECODE)
            self.sampling.append(request)
            self._require(request.sampling_mode)
        return count

    def _require(self, *modes: SamplingMode) -> None:
        self.plan.sampling_mode = max([self.plan.sampling_mode, *modes], key=_SAMPLING_MODES.index)
