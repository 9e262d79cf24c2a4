"""One step: the queue that it runs in, the forward pass up to the logits, sampling, and its results.

This executor is for a CPU.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from segue.attention.base import AttentionBackend, Context
from segue.guided.matchers import CompleteRows
from segue.kvcache.pool import KVPool
from segue.messages.requests import TokenLogprob
from segue.messages.steps import EagerReason, StepPlan, StepResult
from segue.model_runner.batch_state import BatchState
from segue.model_runner.inputs import PlanArrays, PromptRun
from segue.model_runner.sampler import Sampled, Sampler
from segue.models.decoder import Decoder
from segue.sampling.logprobs import Logprobs, logprobs_of

Result = TypeVar("Result")


class ComputeStream:
    """The queue that steps run in, one after the other: this class is a thread, for a CPU.

    After one piece of work has failed, all later work fails with the same error: its input is missing.
    """

    _failure: BaseException | None = None

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-stream")

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`; the future is done when `work` has run, or on CUDA when it has been launched."""
        return self._executor.submit(self._run, work)

    def submit_halves(self, first: Callable[[], Callable[[], Result]], *, apart: bool) -> Future[Result]:
        """Queue work in two halves; `first` returns the second one, whose result the future has.

        On CUDA, with `apart`, the second half is launched by `finish`, or before what is submitted next. It
        may wait for the host then, without holding up the calling thread so early.
        """
        return self.submit(lambda: first()())

    def finish(self) -> None:
        """Launch what is left of work in halves."""

    def submit_long(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work` that takes long to launch, such as a copy of all weights; the caller never waits."""
        return self.submit(work)

    def close(self) -> None:
        """Finish all submitted work; no more may be submitted afterwards."""
        self._executor.shutdown(wait=True)

    def _run(self, work: Callable[[], Result]) -> Result:
        """Run one piece of work, or raise the error of an earlier one that failed."""
        if self._failure is not None:
            raise self._failure
        try:
            return work()
        except BaseException as failure:
            self._failure = failure
            raise


class CUDAStream(ComputeStream):
    """A compute stream of one device; work is launched on the thread that submits it."""

    def __init__(self, device: torch.device) -> None:
        # High priority, because its kernels go first, and because torch reuses streams: code that asks for a
        # stream of the default priority never gets this one.
        self._stream = torch.Stream(device, priority=-1)
        self._lock = threading.Lock()
        self._second: Callable[[], None] | None = None  # the half that is left, and ends its future
        self._long = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="segue-long",
            initializer=torch.cuda.set_device,  # calls of the driver need the thread's context
            initargs=(device,),
        )

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` here and now, with the stream as current one: its kernels are queued, not awaited."""
        done: Future[Result] = Future()
        with self._lock, self._stream:
            self._finish()
            self._end(work, done)
        return done

    def submit_halves(self, first: Callable[[], Callable[[], Result]], *, apart: bool) -> Future[Result]:
        """See `ComputeStream.submit_halves`."""
        if not apart:
            return self.submit(lambda: first()())
        done: Future[Result] = Future()
        with self._lock, self._stream:
            self._finish()
            try:
                self._second = partial(self._end, self._run(first), done)
            except Exception as failure:
                done.set_exception(failure)
        return done

    def finish(self) -> None:
        """See `ComputeStream.finish`."""
        if self._second is not None:
            with self._lock, self._stream:
                self._finish()

    def _finish(self) -> None:
        second, self._second = self._second, None
        if second is not None:
            second()

    def _end(self, work: Callable[[], Result], done: Future[Result]) -> None:
        try:
            done.set_result(self._run(work))
        except Exception as failure:
            done.set_exception(failure)

    def submit_long(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on a thread of its own; what is submitted meanwhile may come between its kernels."""
        return self._long.submit(self._run_long, work)

    def _run_long(self, work: Callable[[], Result]) -> Result:
        self.finish()
        own = self._stream  # the object belongs to the thread that has entered it, so this thread has another
        same = torch.Stream(
            stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type
        )
        with same:
            return self._run(work)

    def close(self) -> None:
        self._long.shutdown(wait=True)
        self.finish()
        self._stream.synchronize()


def make_stream(device: torch.device) -> ComputeStream:
    """Return the stream for steps on `device`."""
    return ComputeStream() if device.type == "cpu" else CUDAStream(device)


def free_garbage() -> None:
    """Return memory to CUDA that only garbage holds: of the profile run, or of an engine closed before.

    Later the garbage collector might free it in the middle of a capture.
    """
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(slots=True, kw_only=True)
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
    failures: dict[int, str] = field(default_factory=dict)  # index into `next_tokens_host` -> why
    # of the indices whose grammars are complete; it comes soon after the tokens. None: no row is guided
    complete: CompleteRows | None = None
    graph: str | None = None  # the kind of the graph that was replayed
    eager: EagerReason | None = "disabled"  # why the step ran without a graph; None: a graph was replayed
    padded_tokens: int = 0

    def is_ready(self) -> bool:
        """Whether the results are on the host."""
        return self.copy_done is None or self.copy_done.query()

    def tokens(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        tokens: list[int] = self.next_tokens_host.tolist()
        return tokens

    def result(self) -> StepResult:
        """Wait for the copy and return the result for the scheduler."""
        tokens = self.tokens()
        # First, as the next masks may be computed from then on.
        complete = [] if self.complete is None else self.complete.result()
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
            graph=self.graph,
            eager=self.eager,
            padded_tokens=self.padded_tokens,
            failures=self.failures,
            complete=complete,
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The handle of a submitted step."""

    pending: Future[DeviceStepResult]
    finish: Callable[[], None] = lambda: None  # launches what is left of the step, see `submit_halves`

    def ready(self) -> bool:
        """Whether :meth:`result` would return at once."""
        self._finish()
        return self.pending.done() and self.pending.result().is_ready()

    def queue_behind(self) -> None:
        """Let what the calling thread does next come behind the step; raises the step's error.

        For a step on a CPU the thread waits. For a step on CUDA only the thread's current stream does.
        """
        self._finish()
        result = self.pending.result()
        if result.copy_done is not None:
            result.copy_done.wait()

    def result(self) -> StepResult:
        """Wait for the step and return its result, or raise the error of the step."""
        self._finish()
        return self.pending.result().result()

    def _finish(self) -> None:
        """Launch what is left of this step, and not of the next, which waits for this one's tokens."""
        if not self.pending.done():
            self.finish()


@dataclass(kw_only=True, eq=False, repr=False)
class StepExecutor:
    """Runs step plans one after the other, on the calling thread and its current stream."""

    model: Decoder
    state: BatchState
    kv: KVPool
    backend: AttentionBackend
    sampler: Sampler

    logits_bytes: ClassVar[int] = 16 << 20  # float32 logits of prompt tokens held at a time

    def run(self, plan: StepPlan) -> DeviceStepResult:
        """Apply the plan, run the model, sample, and write the tokens where the next step reads them."""
        return self.start(plan)()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Callable[[], DeviceStepResult]:
        """Do the first half of `run`, up to the model's hidden states; returns the second one, sampling.

        Of a step with guided rows, the second half waits for their masks. No other step may come between.
        """
        started = time.monotonic()
        arrays = self.state.apply(plan)
        runs = arrays.prompt_runs()
        context = context_of(arrays, self.state, self.kv, self.backend, all_hidden=bool(runs))
        hidden = sampled_hidden = self.model(context)
        if len(hidden) != len(arrays.sample_slots):  # the model has returned the states of all tokens
            sampled_hidden = hidden[torch.from_numpy(arrays.last_tokens)]
        return partial(self._second_half, arrays, started, sampled_hidden, hidden, runs)

    @torch.inference_mode()
    def _second_half(
        self,
        arrays: PlanArrays,
        started: float,
        sampled_hidden: Tensor,
        hidden: Tensor,
        runs: list[PromptRun],
    ) -> DeviceStepResult:
        return self._result(arrays, started, self._sample(arrays, sampled_hidden), hidden, runs)

    def _sample(self, arrays: PlanArrays, hidden: Tensor) -> Sampled:
        """Sample from the hidden states of the sequences that sample; the order is that of the plan.

        Only rank 0 has the logits of the whole vocabulary. It samples, and the other ranks receive its
        tokens, because every rank needs them as inputs of the next step.
        """
        slots, positions = arrays.sample_slots, arrays.sample_positions
        logits = self.model.logits(hidden) if len(slots) else None
        if logits is not None:
            sampled = self.sampler.sample(logits, slots, positions, arrays.plan.sampling_mode)
        else:
            sampled = Sampled(tokens=torch.empty(len(slots), dtype=torch.int64, device=hidden.device))
        if len(slots):
            self.state.write_tokens(slots, positions, self.model.collectives.broadcast(sampled.tokens))
        return sampled

    def _result(
        self,
        arrays: PlanArrays,
        started: float,
        sampled: Sampled,
        hidden: Tensor,
        runs: list[PromptRun],
        *,
        graph: str | None = None,
        eager: EagerReason | None = "disabled",
        padded_tokens: int = 0,
    ) -> DeviceStepResult:
        """Return the step's results, and start their copies to the host.

        `runs` are prompt tokens whose log-probabilities are requested; if there are any, `hidden` has the
        states of all tokens of the step, and otherwise it is not read.
        """
        prompt_parts = {run.slot: self._prompt_logprobs(hidden, run) for run in runs}
        device, on_cpu = self.state.device, self.state.device.type == "cpu"
        result = DeviceStepResult(
            step=arrays.plan.step,
            started=started,
            next_tokens_host=sampled.tokens.to("cpu", non_blocking=True),
            logprobs=sampled.logprobs.to_host() if sampled.logprobs else None,
            logprob_indices=sampled.logprob_indices,
            prompt_logprobs={
                slot: [part.to_host() for part in parts] for slot, parts in prompt_parts.items()
            },
            copy_done=None if on_cpu else torch.Event(device),
            finished=time.monotonic() if on_cpu else 0.0,
            graph=graph,
            eager=eager,
            padded_tokens=padded_tokens,
            failures=sampled.failures,
        )
        if result.copy_done is not None:
            result.copy_done.record()
        if self.state.matchers is not None and arrays.plan.sampling_mode in ("guided", "full"):
            # Masks of the next tokens are computed beside the next step.
            result.complete = self.state.matchers.take(arrays.sample_slots, result.tokens)
        return result

    def _prompt_logprobs(self, hidden: Tensor, run: PromptRun) -> list[Logprobs]:
        """Return the log-probabilities of a run of prompt tokens, in parts; on ranks other than 0 none.

        `hidden` are those of all tokens of the step.
        """
        # All logits of a chunk at once would be hundreds of MB.
        size = max(1, self.logits_bytes // (4 * self.model.config.vocab_size))
        known = self.state.token_pool[run.slot, run.position : run.position + run.count].to(torch.int64)
        num_top = int(self.state.num_prompt_top[run.slot])
        parts = []
        for start in range(0, run.count, size):
            end = min(start + size, run.count)
            logits = self.model.logits(hidden[run.hidden_start + start : run.hidden_start + end])
            if logits is not None:
                counts = [num_top] * (end - start)
                parts.append(logprobs_of(logits, known[start:end], counts, with_ranks=True))
        return parts


def context_of(
    arrays: PlanArrays, state: BatchState, kv: KVPool, backend: AttentionBackend, *, all_hidden: bool = False
) -> Context:
    """Return the context of a step on a CPU: the plan's arrays as tensors, and the host lists.

    `slots` are request slots; `slot_mapping` is the row of the KV pool that each token writes.

    With `all_hidden` the model returns the hidden states of all tokens, else those of the tokens that sample
    if there are any.
    """
    slots, positions = torch.from_numpy(arrays.token_slots), torch.from_numpy(arrays.positions)
    returns_all = all_hidden or len(arrays.last_tokens) in (0, len(positions))
    return Context(
        input_ids=state.token_pool[slots, positions].to(torch.int64),
        positions=positions,
        slot_mapping=kv.token_rows(state.page_table.kv_slots(slots, positions)),
        logits_indices=None if returns_all else torch.from_numpy(arrays.last_tokens),
        slots=arrays.plan.slots,
        q_lens=arrays.plan.lens,
        kv_lens=arrays.kv_lens.tolist(),
        slots_device=torch.from_numpy(arrays.slots),
        kv_lens_device=torch.from_numpy(arrays.kv_lens.astype(np.int32)),
        cu_seqlens_q_device=torch.from_numpy(np.append(0, arrays.ends).astype(np.int32)),
        num_decode=arrays.plan.num_decode,
        page_table=state.page_table,
        kv=kv,
        backend=backend,
    )
