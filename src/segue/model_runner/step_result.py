"""What a step gives back, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from segue.messages.requests import TokenLogprob
from segue.messages.steps import EagerReason, StepResult
from segue.sampling.logprobs import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStepResult:
    """One launched step. What is on the host is there once `copy_done` has happened."""

    step: int
    started: float  # seconds of the monotonic clock
    next_tokens_host: Tensor  # integers, one a sampling sequence
    copy_done: torch.Event | None  # None: nothing to wait for
    logprobs: Logprobs | None = None  # of the sequences below
    logprob_indices: Sequence[int] = ()
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)  # by row, in runs
    finished: float = 0.0  # on a CPU; 0: when copy_done has happened
    eager: EagerReason | None = "disabled"  # why it ran without a graph; None: with one
    padded_tokens: int = 0

    def is_there(self) -> bool:
        """Whether it is on the host."""
        return self.copy_done is None or self.copy_done.query()

    def result(self) -> StepResult:
        """The step as the scheduler takes it; waits for the copy."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        tokens = self.next_tokens_host.tolist()
        logprobs: list[TokenLogprob | None] | None = None
        if self.logprobs is not None:
            logprobs = [None] * len(tokens)
            for index, entry in zip(self.logprob_indices, self.logprobs.messages(), strict=True):
                logprobs[index] = entry
        return StepResult(
            step=self.step,
            tokens=tokens,
            seconds=(self.finished or time.monotonic()) - self.started,
            logprobs=logprobs,
            prompt_logprobs={
                row: [message for part in parts for message in part.messages() if message is not None]
                for row, parts in self.prompt_logprobs.items()
            },
            eager=self.eager,
            padded_tokens=self.padded_tokens,
        )


class ForwardOutput:
    """A step that was submitted."""

    def __init__(self, pending: Future[DeviceStepResult]) -> None:
        self._pending = pending

    def ready(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._pending.done() and self._pending.result().is_there()

    def result(self) -> StepResult:
        """Wait for the step and return what it made; raises what the step raised."""
        return self._pending.result().result()
