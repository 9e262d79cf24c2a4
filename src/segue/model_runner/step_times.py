"""Times a few steps at start: the first samples of the scheduler's cost model.

Without them the scheduler knows nothing of the device until prompts have been computed, and guesses by their
length. The steps are ordinary plans of one prompt in the first request slot, with graphs where the device
has them. The slot has no pages, so all keys and values go to the scratch page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from segue.laps.cost import NO_WORK, StepTime
from segue.messages.control import EngineLimits
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NewSlot, StepPlan
from segue.model_runner.executor import DeviceStepResult, StepExecutor

MOST_S = 0.5  # a size whose steps are expected to take longer is left out
SMALL, MIDDLE = 32, 8  # so many steps of these sizes would have the tokens of a whole chunk
HISTORY = 2  # chunks before the prompt of the step that shows what attention costs


class TimedSize(NamedTuple):
    """A size of step to time."""

    tokens: int
    history: int  # tokens of the same prompt before them
    repeats: int  # of the step, after the first
    is_needed: bool  # it is timed however long it takes


def timed_sizes(limits: EngineLimits) -> list[TimedSize]:
    """Return the sizes to time, the quickest first; each prompt has room for one more token.

    The smallest step is timed most often, because the fit takes the floor from the steps with the fewest
    tokens. With one sample each of three sizes, the predictions for Qwen3-8B on an H200 were 4 times too high
    below 200 tokens; with these they are within 4 % for all sizes, also without the last one (simulated).
    """
    most = limits.max_seq_len - 1
    chunk = min(limits.chunked_prefill_size, most)
    small, middle = max(1, chunk // SMALL), max(1, chunk // MIDDLE)
    return [
        TimedSize(1, 0, repeats=4, is_needed=True),
        TimedSize(small, 0, repeats=1, is_needed=True),
        TimedSize(middle, 0, repeats=2, is_needed=True),
        TimedSize(middle, min(HISTORY * chunk, most - middle), repeats=1, is_needed=False),
        TimedSize(chunk, 0, repeats=1, is_needed=False),
    ]


def time_steps(
    executor: StepExecutor,
    limits: EngineLimits,
    vocab_size: int,
    gather: Callable[[Sequence[int]], list[list[int]]],
) -> list[StepTime]:
    """Run some steps of each of `timed_sizes`, and return how long they took on rank 0.

    All ranks call it, before the first step of a request. The first step of each size is not timed, because
    it may compile kernels. The plans of later steps begin with number 1 again.

    Args:
        executor: runs the steps, on the calling thread.
        limits: the sizes of the engine.
        vocab_size: the number of token ids.
        gather: returns every rank's integers, by rank.
    """
    found: list[StepTime] = []
    for size in timed_sizes(limits):
        if not size.is_needed:  # there is a time already to expect its own from
            per_token = found[-1].seconds / found[-1].work.tokens
            if (1 + size.repeats) * size.tokens * per_token > MOST_S:
                continue
        # Whatever else the machine does can only make a step slower, so the quickest one tells most.
        seconds = min(_seconds(executor, size, vocab_size))
        # All ranks go on with the times of rank 0, and so leave out the same sizes.
        [microseconds], *_ = gather([round(1e6 * seconds)])
        time_of_size = StepTime(NO_WORK.plus(size.tokens, size.history), microseconds / 1e6)
        found += [time_of_size] * size.repeats  # the fit counts samples
    executor.state.step = 0
    return found


def describe_times(times: Sequence[StepTime]) -> str:
    """Return the time of each size, in words for the log of the start."""
    parts = []
    for work, seconds in dict.fromkeys(times):
        history = round(work.pairs / work.prompt_tokens - work.prompt_tokens / 2)
        behind = f" behind {history}" if history else ""
        parts.append(f"{work.prompt_tokens}{behind} in {1e3 * seconds:.1f} ms")
    return f"prompt tokens: {', '.join(parts)}"


def _seconds(executor: StepExecutor, size: TimedSize, vocab_size: int) -> list[float]:
    """Run steps of one size, two in flight as when serving; return the times between their ends."""
    before, ends = executor.run(_plan(executor, size, vocab_size)), list[float]()
    for _ in range(size.repeats):
        behind = executor.run(_plan(executor, size, vocab_size))
        ends.append(_end(before))
        before = behind
    ends.append(_end(before))
    return [end - start for start, end in pairwise(ends)]


def _plan(executor: StepExecutor, size: TimedSize, vocab_size: int) -> StepPlan:
    """Return the next plan: one prompt, whose history counts as computed, in slot 0."""
    length = size.history + size.tokens
    tokens = pack_ids([index % vocab_size for index in range(length)])  # all experts get some of them
    return StepPlan(
        executor.state.step + 1,
        new_slots=[NewSlot(0, tokens, length, SamplingParams(max_new_tokens=1))],
        slots=[0],
        starts=[size.history],
        lens=[size.tokens],
        num_logits=[1],
        samples=[True],
    )


def _end(launched: DeviceStepResult) -> float:
    """Wait for the end of a step; returns when it was, in seconds of the monotonic clock."""
    launched.result()
    return launched.finished or time.monotonic()
