"""Where one step's time goes: each kernel's share, beside the floor that memory and arithmetic set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from segue.checkpoint.source import ModelSource, resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError
from segue.messages.control import InitStep
from segue.messages.requests import Abort, AddRequest, SamplingParams, pack_ids
from segue.model_runner.runner import ModelRunner
from segue.model_runner.step_result import ForwardOutput
from segue.scheduler.scheduler import Scheduler
from segue.worker.main import limits_of

_WARM, _TIMED, _TRACED = 8, 40, 10  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kernel, or on a CPU one operator, averaged over steps."""

    name: str
    calls: float  # a step
    microseconds: float  # a step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One kind of step."""

    label: str
    milliseconds: float  # from launch to launch, as served
    host_milliseconds: float  # of planning, launching and reading, the wait for the device left out
    floor_milliseconds: float  # weights and KV read once at the memory's speed, or the GEMMs' arithmetic
    kernels: list[KernelTime]  # the slowest first


class StepBench:
    """A scheduler and a runner in this process, without a frontend."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the runner of `config`, a single rank."""
        if config.tp != 1:
            raise ConfigError(f"tp={config.tp}: profiles are of one rank; leave --tp out", param="tp")
        self.config = config = config.with_(disable_prefix_cache=True)  # every prompt is computed
        self.source: ModelSource = resolve(config.model, config.load_format, config.cache_dir)
        self.init_steps: list[InitStep] = []
        with TemporaryDirectory() as run_dir:
            self.runner = ModelRunner(config, self.source, TPInfo(), Path(run_dir), self.init_steps.append)
        self._speed = self.runner.on_stream(partial(_measure_device, self.runner.device, self.runner.dtype))
        self._scheduler = Scheduler(limits_of(config, self.runner))
        self._count = 0

    def close(self) -> None:
        """Give the device back."""
        self.runner.close()

    def decode(self, rows: int, context: int, prompt: int = 0) -> StepProfile:
        """Steps of `rows` decode rows that have about `context` tokens each, and one prompt of `prompt`.

        Raises:
            ConfigError: so many rows, or so many tokens, do not fit.
        """
        limits = self.runner.limits
        prefills = -(-rows * context // limits.chunked_prefill_size)  # the first rows decode meanwhile
        tokens = context + prefills + 2 + _WARM + _TIMED + _TRACED
        pages = -(-tokens // limits.page_size)
        beside = 2 if prompt else 0  # of the step before too, which is still to be read
        if rows + beside > limits.max_running_requests:
            raise ConfigError(
                f"{rows + beside} rows: at most {limits.max_running_requests} can run; raise "
                "--max-running-requests"
            )
        if prompt > limits.chunked_prefill_size:
            raise ConfigError(
                f"a prompt of {prompt} tokens takes several steps; raise --chunked-prefill-size, which is "
                f"{limits.chunked_prefill_size}"
            )
        pages_beside = beside * -(-(prompt + 1) // limits.page_size)
        if rows * pages + pages_beside > limits.num_pages or tokens > limits.max_seq_len:
            raise ConfigError(
                f"{rows} rows of {tokens} tokens do not fit {limits.num_pages} KV pages of "
                f"{limits.page_size} tokens, {limits.max_seq_len} a sequence; ask for fewer rows or less "
                "context"
            )
        with self._scheduled(rows, context) as drive:
            drive.run_until_all_decode()
            if prompt:
                drive.before = partial(self._add_prompt, prompt)
            drive.run(_WARM)
            host, begun = drive.host_seconds, time.perf_counter()
            drive.run(_TIMED)
            drive.wait()
            seconds = (time.perf_counter() - begun) / _TIMED
            host = (drive.host_seconds - host) / _TIMED
            kernels = self._traced(lambda: drive.run(1), drive)
        beside_label = f", and a prompt of {prompt}" if prompt else ""
        return StepProfile(
            label=f"decode, {rows} rows of {context} tokens{beside_label}",
            milliseconds=seconds * 1e3,
            host_milliseconds=host * 1e3,
            floor_milliseconds=self._floor(rows + prompt, rows * context + prompt, rows + (prompt > 0)) * 1e3,
            kernels=kernels,
        )

    def prefill(self, tokens: int) -> StepProfile:
        """Steps that each run one prompt of `tokens` tokens whole and sample its first token."""
        drive = _Drive(self._scheduler, self.runner)

        def step() -> None:
            self._add_prompt(tokens)
            while self._scheduler.has_work:
                drive.run(1)
                drive.wait()

        for _ in range(_WARM):
            step()
        host, seconds = drive.host_seconds, []
        for _ in range(_TIMED):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        host = (drive.host_seconds - host) / _TIMED
        return StepProfile(
            label=f"prefill of {tokens} tokens",
            milliseconds=sorted(seconds)[_TIMED // 2] * 1e3,
            host_milliseconds=host * 1e3,
            floor_milliseconds=self._floor(tokens, tokens, 1) * 1e3,
            kernels=self._traced(step, drive),
        )

    def _prompt(self, seed: int, length: int) -> list[int]:
        return [(7919 * seed + 31 * i) % (self.runner.vocab_size - 1) for i in range(length)]

    def _add_prompt(self, length: int) -> None:
        self._count += 1
        ids = self._prompt(self._count, length)
        self._add(f"p{self._count}", ids, SamplingParams(max_new_tokens=1))

    def _add(self, rid: str, ids: list[int], params: SamplingParams) -> None:
        rejected = self._scheduler.add(AddRequest(rid=rid, prompt=pack_ids(ids), params=params))
        if rejected is not None:
            raise ConfigError(rejected.message)

    def _traced(self, step: Callable[[], None], drive: _Drive) -> list[KernelTime]:
        on_cpu = self.runner.device.type == "cpu"
        activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
        drive.wait()
        trace = profile(activities=[activity], acc_events=True)
        self.runner.on_stream(trace.start)
        for _ in range(_TRACED):
            step()
        drive.wait()
        if not on_cpu:
            torch.cuda.synchronize()
        self.runner.on_stream(trace.stop)
        wanted = DeviceType.CPU if on_cpu else DeviceType.CUDA
        found = [
            KernelTime(
                name=event.key,
                calls=event.count / _TRACED,
                microseconds=(event.self_cpu_time_total if on_cpu else event.self_device_time_total)
                / _TRACED,
            )
            for event in trace.key_averages()
            if event.device_type == wanted
        ]
        return sorted(found, key=lambda kernel: -kernel.microseconds)

    def _floor(self, tokens: int, kv_tokens: int, logits: int) -> float:
        """Seconds: every weight and cached token read once, or two operations a weight and token.

        The head works on `logits` rows alone; of experts, those count that the tokens can choose.
        """
        bandwidth, flops = self._speed
        model, item = self.source.config, self.runner.dtype.itemsize
        head = model.vocab_size * model.hidden_size
        read = work = self.runner.weight_bytes // item - head * (1 if model.tie_embeddings else 2)
        if model.moe is not None:
            layers = sum(model.is_sparse(index) for index in range(model.num_layers))
            expert = 3 * model.moe.expert_intermediate_size * model.hidden_size * layers
            experts, chosen = model.moe.num_experts, model.moe.num_experts_per_tok
            read -= expert * (experts - min(experts, chosen * tokens))
            work -= expert * (experts - chosen)
        kv = kv_tokens * model.num_layers * 2 * model.num_kv_heads * model.head_dim
        return max((read + head + kv) * item / bandwidth, 2 * (work * tokens + head * logits) / flops)

    @contextmanager
    def _scheduled(self, rows: int, context: int) -> Iterator[_Drive]:
        scheduler, drive = self._scheduler, _Drive(self._scheduler, self.runner)
        length = max(1, context - _WARM - _TIMED // 2)
        prefills = -(-rows * length // self.runner.limits.chunked_prefill_size)
        most = prefills + 2 + _WARM + _TIMED + _TRACED
        for i in range(rows):
            params = SamplingParams(max_new_tokens=most, temperature=0.6, seed=i)
            self._add(str(i), self._prompt(i, length), params)
        yield drive
        drive.wait()
        scheduler.abort(Abort(abort_all=True))


class _Drive:
    """The loop of `segue.worker.loop`, with overlap, without messages."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pending: ForwardOutput | None = None
        self.host_seconds = 0.0
        self.before: Callable[[], None] = lambda: None  # every step

    def run_until_all_decode(self) -> None:
        scheduler = self._scheduler
        while scheduler.waiting or any(not r.wants_decode for r in scheduler.running.values()):
            self.run(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.before()
            begun = time.perf_counter()
            plan = self._scheduler.plan()
            assert plan is not None
            launched = self._runner.forward_batch(plan)
            self.host_seconds += time.perf_counter() - begun
            self.wait()
            self._pending = launched

    def wait(self) -> None:
        if self._pending is not None:
            result = self._pending.result()
            begun = time.perf_counter()
            self._scheduler.apply(result)
            self.host_seconds += time.perf_counter() - begun
            self._pending = None


def _measure_device(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes moved a second and operations a second, on random values."""
    size = 1 << (26 if device.type == "cpu" else 30)
    data = torch.empty(size, dtype=torch.uint8, device=device).random_().view(torch.int32)
    square = torch.randn(512 if device.type == "cpu" else 8192, device=device).to(dtype)
    matrix = torch.outer(square, square.flip(0))
    copy = torch.empty_like(data)
    read = _seconds(lambda: copy.copy_(data), device)
    gemm = _seconds(lambda: matrix @ matrix, device)
    return 2 * size / read, 2 * len(square) ** 3 / gemm


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return best
