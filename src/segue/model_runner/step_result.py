"""The results of a step, and when they are on the host."""

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
    """One launched step. The host tensors are valid once `copy_done` has completed."""

    step: int
    started: float  # seconds of the monotonic clock
    next_tokens_host: Tensor  # integers, one per sampling sequence
    copy_done: torch.Event | None  # None: there is nothing to wait for
    logprobs: Logprobs | None = None  # of the tokens `logprob_indices`
    logprob_indices: Sequence[int] = ()  # indices into `next_tokens_host`
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)  # slot -> parts, in order
    finished: float = 0.0  # seconds of the monotonic clock, on a CPU; 0: the step ends with `copy_done`
    eager: EagerReason | None = "disabled"  # why the step ran without a graph; None: a graph was replayed
    padded_tokens: int = 0

    def is_ready(self) -> bool:
        """Whether the results are on the host."""
        return self.copy_done is None or self.copy_done.query()

    def result(self) -> StepResult:
        """Wait for the copy and return the result for the scheduler."""
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
                slot: [message for part in parts for message in part.messages() if message is not None]
                for slot, parts in self.prompt_logprobs.items()
            },
            eager=self.eager,
            padded_tokens=self.padded_tokens,
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The handle of a submitted step."""

    pending: Future[DeviceStepResult]

    def ready(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self.pending.done() and self.pending.result().is_ready()

    def result(self) -> StepResult:
        """Wait for the step and return its result, or raise the error of the step."""
        return self.pending.result().result()
