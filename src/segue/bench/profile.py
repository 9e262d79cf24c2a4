"""Profiles one step: each kernel's share of the time, beside the roofline of memory and arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from segue.checkpoint.source import resolve_model
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError
from segue.messages.requests import Abort, AddRequest, Rejected, SamplingParams, pack_ids
from segue.model_runner.executor import ForwardOutput
from segue.model_runner.runner import ModelRunner
from segue.scheduler.scheduler import Scheduler
from segue.sizes import ceil_div

_WARM, _TIMED, _TRACED = 8, 40, 10  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The time of one kernel, or on a CPU of one operator, averaged over steps."""

    name: str
    calls: float  # per step
    microseconds: float  # per step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The times of one kind of step."""

    label: str
    milliseconds: float  # from launch to launch, as in serving; the median
    host_milliseconds: float  # of planning, launching and reading, without the wait for the device
    roofline_milliseconds: float  # the longer of reading weights and KV once, and of the GEMMs' arithmetic
    kernels: list[KernelTime]  # the slowest first


class StepBench:
    """A scheduler and a runner in this process, without a frontend.

    Steps run as in `segue.worker.loop`, with overlap but without messages: a step is launched before the
    results of the previous one are read. `_host_seconds` counts the time that this takes, without waits.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the runner of `config`, on a single rank."""
        if config.tp != 1:
            raise ConfigError(f"tp={config.tp}: only one rank can be profiled; leave --tp out", param="tp")
        config = replace(config, disable_prefix_cache=True)  # so that every prompt is computed
        source = resolve_model(config)
        self._model = source.config
        with TemporaryDirectory() as run_dir:
            self.runner = ModelRunner(config, source, TPInfo(), Path(run_dir), lambda *_: None)
        self._speed = self.runner.on_stream(partial(_measure_device, self.runner.device, self.runner.dtype))
        self._scheduler = Scheduler(self.runner.limits, config)
        self._num_prompts = 0
        self._launched: ForwardOutput | None = None  # the step whose results are not read yet
        self._host_seconds = 0.0

    def close(self) -> None:
        """Close the runner and free its device memory."""
        self.runner.close()

    def decode(self, rows: int, context: int, prompt: int = 0) -> StepProfile:
        """Profile steps of `rows` decode rows of about `context` tokens each, and one prompt of `prompt`.

        Raises:
            ConfigError: so many rows, or so many tokens, do not fit.
        """
        length = max(1, context - _WARM - _TIMED // 2)  # half-way through the timed steps it is `context`
        prefills = ceil_div(rows * length, self.runner.limits.chunked_prefill_size)  # others decode meanwhile
        # No row may end before the last step. The 2: its prefill's token, and the step in flight.
        max_tokens = prefills + 2 + _WARM + _TIMED + _TRACED
        self._check_fit(rows, length + max_tokens, prompt)
        for i in range(rows):
            params = SamplingParams(max_new_tokens=max_tokens, temperature=0.6, seed=i)
            self._add(str(i), seed=i, length=length, params=params)
        scheduler = self._scheduler
        # Until every row is prefilled and decodes.
        while scheduler.waiting or any(not r.wants_decode for r in scheduler.running.values()):
            self._run_step()

        def step() -> None:
            if prompt:
                self._add_prompt(prompt)
            self._run_step()

        prompt_label = f", and a prompt of {prompt}" if prompt else ""
        found = self._profile(
            f"decode, {rows} rows of {context} tokens{prompt_label}",
            step,
            self._roofline(rows + prompt, kv_tokens=rows * context + prompt, logits=rows + (prompt > 0)),
        )
        scheduler.abort(Abort(abort_all=True))
        return found

    def prefill(self, tokens: int) -> StepProfile:
        """Profile steps that each run a whole prompt of `tokens` tokens and sample its first token."""

        def step() -> None:
            self._add_prompt(tokens)
            while self._scheduler.has_work:  # a prompt longer than a chunk takes several steps
                self._run_step()
                self._read_results()

        return self._profile(
            f"prefill of {tokens} tokens", step, self._roofline(tokens, kv_tokens=tokens, logits=1)
        )

    def _profile(self, label: str, step: Callable[[], None], roofline_milliseconds: float) -> StepProfile:
        """Call `step` to warm up, then to time it, and last with the profiler, which would slow it down."""
        for _ in range(_WARM):
            step()
        host, seconds = self._host_seconds, []
        for _ in range(_TIMED):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        self._read_results()
        host = self._host_seconds - host
        return StepProfile(
            label=label,
            milliseconds=median(seconds) * 1e3,
            host_milliseconds=host / _TIMED * 1e3,
            roofline_milliseconds=roofline_milliseconds,
            kernels=self._traced(step),
        )

    def _check_fit(self, rows: int, tokens: int, prompt: int) -> None:
        """Raise ConfigError unless all rows run at once, of up to `tokens` tokens, with prompts beside them.

        If requests had to wait or were retracted, the steps would not be those that were asked for.
        """
        limits = self.runner.limits
        num_prompts = 2 if prompt else 0  # the prompt of the step before is still running too
        pages = rows * ceil_div(tokens, limits.page_size)
        pages += num_prompts * ceil_div(prompt + 1, limits.page_size)
        if rows + num_prompts > limits.max_running_requests:
            raise ConfigError(
                f"{rows + num_prompts} rows: at most {limits.max_running_requests} can run; raise "
                "--max-running-requests"
            )
        if prompt > limits.chunked_prefill_size:
            raise ConfigError(
                f"a prompt of {prompt} tokens takes several steps; raise --chunked-prefill-size, which is "
                f"{limits.chunked_prefill_size}"
            )
        if pages > limits.num_pages or tokens > limits.max_seq_len:
            raise ConfigError(
                f"{rows} rows of {tokens} tokens do not fit {limits.num_pages} KV pages of "
                f"{limits.page_size} tokens, or {limits.max_seq_len} tokens per sequence; ask for fewer rows "
                "or less context"
            )

    def _add_prompt(self, length: int) -> None:
        """Add a new prompt of `length` tokens, which ends with its first output token."""
        self._num_prompts += 1
        self._add(f"p{self._num_prompts}", self._num_prompts, length, SamplingParams(max_new_tokens=1))

    def _add(self, rid: str, seed: int, length: int, params: SamplingParams) -> None:
        """Add a request with a prompt of `length` tokens, which follow from `seed`."""
        ids = [(7919 * seed + 31 * i) % (self.runner.vocab_size - 1) for i in range(length)]
        message = AddRequest(rid=rid, prompt=pack_ids(ids), params=params)
        rejected = self._scheduler.add(message, time.perf_counter())
        if isinstance(rejected, Rejected):
            raise ConfigError(rejected.message)

    def _run_step(self) -> None:
        """Plan and launch a step, and only then read the results of the previous one, as in serving."""
        begun = time.perf_counter()
        plan = self._scheduler.plan(begun)
        assert plan is not None
        launched = self.runner.forward_batch(plan)
        self._host_seconds += time.perf_counter() - begun
        self._read_results()
        self._launched = launched

    def _read_results(self) -> None:
        """Wait for the step in flight, if there is one, and apply its results."""
        if self._launched is not None:
            result = self._launched.result()
            begun = time.perf_counter()
            self._scheduler.apply(result, begun)
            self._host_seconds += time.perf_counter() - begun
            self._launched = None

    def _traced(self, step: Callable[[], None]) -> list[KernelTime]:
        """Run some steps with torch's profiler; returns the time of each kernel, or operator on a CPU.

        The profiler starts and stops on the thread of the steps, whose operators it records.
        """
        on_cpu = self.runner.device.type == "cpu"
        activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
        trace = profile(activities=[activity], acc_events=True)
        self.runner.on_stream(trace.start)
        for _ in range(_TRACED):
            step()
        self._read_results()
        if not on_cpu:
            torch.cuda.synchronize()
        self.runner.on_stream(trace.stop)
        device_type = DeviceType.CPU if on_cpu else DeviceType.CUDA
        found = [
            KernelTime(
                name=event.key,
                calls=event.count / _TRACED,
                microseconds=(event.self_cpu_time_total if on_cpu else event.self_device_time_total)
                / _TRACED,
            )
            for event in trace.key_averages()
            if event.device_type == device_type
        ]
        return sorted(found, key=lambda kernel: -kernel.microseconds)

    def _roofline(self, tokens: int, kv_tokens: int, logits: int) -> float:
        """Return the least ms: the weights and KV read once, or two operations per weight and token.

        A step has `tokens` tokens and reads the KV of `kv_tokens`. The head computes only `logits` rows. Only
        the experts that the tokens can choose are read, and only those that a token chooses compute. A CPU
        reads copies of weights in FP8.
        """
        bandwidth, flops = self._speed
        model, item = self._model, self.runner.dtype.itemsize
        head = model.vocab_size * model.hidden_size
        # Weights in the layers: those that a step reads, and those that one token multiplies.
        stored = item if model.fp8 is None else 1  # bytes of such a weight
        of_head = head * (1 if model.tie_embeddings else 2) * item
        read = work = (self.runner.weight_bytes - of_head) // stored
        if model.moe is not None:
            layers = sum(model.is_sparse(index) for index in range(model.num_layers))
            expert = 3 * model.moe.expert_intermediate_size * model.hidden_size * layers
            experts, chosen = model.moe.num_experts, model.moe.num_experts_per_tok
            read -= expert * (experts - min(experts, chosen * tokens))
            work -= expert * (experts - chosen)
        kv = kv_tokens * model.num_layers * 2 * model.num_kv_heads * model.head_dim
        of_layers = read * (item if self.runner.device.type == "cpu" else stored)
        seconds = max(
            (of_layers + (head + kv) * item) / bandwidth, 2 * (work * tokens + head * logits) / flops
        )
        return seconds * 1e3


def _measure_device(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure the bytes moved per second and the operations per second, on random values."""
    size = 1 << (26 if device.type == "cpu" else 30)
    data = torch.empty(size, dtype=torch.uint8, device=device).random_().view(torch.int32)
    vector = torch.randn(512 if device.type == "cpu" else 8192, device=device).to(dtype)
    matrix = torch.outer(vector, vector.flip(0))
    copy = torch.empty_like(data)
    read = _seconds(lambda: copy.copy_(data), device)
    gemm = _seconds(lambda: matrix @ matrix, device)
    # A copy reads and writes each byte; a GEMM has a multiplication and an addition per three indices.
    return 2 * size / read, 2 * len(vector) ** 3 / gemm


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of five runs, each awaited on the device."""
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best
