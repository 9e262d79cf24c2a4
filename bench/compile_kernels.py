"""Compiles the Triton kernels for GPUs that are not there: shows that they compile, not that they run.

    python -m bench.compile_kernels [80 89 90 100]

The functions that launch the kernels are called with tensors of the CPU, and Triton compiles what they would
launch, for each compute capability. A kernel that takes more shared memory than a program may have there is a
failure, as it would be when it is loaded. It needs Triton, and no GPU. The kernels are compiled in several
processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from bench import report
from segue.attention import triton as attention
from segue.attention.base import AttentionShape, Context
from segue.kernels import fp8_plan
from segue.kernels.activations import TokenQKV, Unnormed
from segue.kernels.fp8 import ExpertWeights, FP8Experts
from segue.kernels.gemm_plan import MAX_GATED_ROWS, ROWS, DeviceFacts, GemmShape, Kind, candidates
from segue.kernels.triton import (
    all_reduce,
    fp8_gemm,
    fp8_tokens,
    gate_up_silu,
    gemm,
    gemv,
    grouped_copy,
    launch,
    moe,
    moe_routing,
    norm,
    page_slices,
    sampling,
    step_inputs,
)
from segue.kernels.triton.gemm import TritonBatchInvariantGemm
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing

# SMs, and KiB of shared memory that a program may have, by compute capability: A100, L40S, H200, B200.
# The GEMMs of Qwen3-4B: N, K and kind.
KINDS: list[tuple[int, int, Kind]] = [
    (6144, 2560, "split"),
    (2560, 4096, "split"),
    (2560, 9728, "split"),
    (19456, 2560, "gated"),
    (151936, 2560, "whole"),
]
DEVICES = {80: (108, 163), 89: (142, 99), 90: (132, 227), 100: (148, 227)}


def facts(capability: int) -> DeviceFacts:
    """Return the facts about a device of a compute capability."""
    num_sms, shared = DEVICES[capability]
    return DeviceFacts(
        name=f"sm_{capability}",
        capability=divmod(capability, 10),
        num_sms=num_sms,
        shared_bytes=shared << 10,
        memory_bytes=80 << 30,
        bandwidth=2e12,
    )


@dataclass
class _Driver:
    """What Triton asks its driver for when it only compiles."""

    target: GPUTarget

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel that was compiled for a device, or why it was not."""

    name: str
    shared: int  # bytes of shared memory that it takes
    problem: str = ""


@contextmanager
def compiling_for(capability: int) -> Iterator[list[CompiledKernel]]:
    """Let launches compile for a compute capability instead; yield the list of what they have compiled."""
    device = facts(capability)
    done: list[CompiledKernel] = []
    run = JITFunction.run

    def only_compile(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        shared, problem = 0, ""
        try:
            shared = run(kernel, *args, grid=grid, warmup=True, **kwargs).metadata.shared
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if shared > device.shared_bytes:
            problem = f"{shared} bytes of shared memory, and a program may have {device.shared_bytes}"
        if problem:
            sizes = {name: value for name, value in kwargs.items() if isinstance(value, (int, str))}
            problem = f"{problem} ({sizes})"
        done.append(CompiledKernel(name=kernel.__name__, shared=shared, problem=problem))

    properties = SimpleNamespace(multi_processor_count=device.num_sms)
    for cached in (launch.is_hopper, launch.num_sms, gemm.choose, moe.choose):
        cached.cache_clear()
    driver.set_active(_Driver(GPUTarget("cuda", capability, 32)))
    with ExitStack() as patches:
        patches.enter_context(patch.object(JITFunction, "run", only_compile))
        patches.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: device.capability))
        patches.enter_context(patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        for module in (launch, gemm, moe, attention):
            patches.enter_context(patch.object(module, "device_facts", lambda: device))
        yield done


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn)


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _gemms(device: DeviceFacts, rows: int) -> None:
    """Compile the candidates of the GEMMs of Qwen3-4B."""
    for size, depth, kind in KINDS:
        if kind == "gated" and rows > MAX_GATED_ROWS:
            continue
        weight = _bf16(256, depth)  # only as many rows as any tile has
        shape = GemmShape(rows, size, depth, kind)
        for plan in candidates([shape], device)[shape][:4]:
            gemm.run(plan, _bf16(rows, depth), weight, None, torch.bfloat16, gated=kind == "gated")


def _fp8_gemms(device: DeviceFacts) -> None:
    """Compile GEMMs by weights in FP8, with all kinds of scales: the default plans, and candidates."""
    if device.capability < (8, 9):
        return
    depth = 12288
    for block, rows in itertools.product((0, 16, 128), (1, 32, 33, 64, 4096)):
        shape = fp8_plan.FP8Shape(rows, 4096, depth, block, "split" if rows in (1, 33) else "whole")
        found = fp8_plan.candidates([shape], device)[shape] if rows <= fp8_plan.MAX_FEW_ROWS else []
        weight, scales = _fp8(256, depth), torch.empty(256, depth // block if block else 1)
        for plan in [fp8_plan.default_plan(shape, device.num_sms), *found]:
            for gated in {False, plan.splits == 1 and rows <= fp8_plan.MAX_FEW_ROWS}:
                fp8_gemm.run_fp8(plan, _bf16(rows, depth), weight, scales, block, None, gated=gated)
    for block in (0, 128):
        tokens = fp8_tokens.quantize_tokens(_bf16(256, 4096), block)
        norm.add_rms_norm(*(_bf16(256, 4096),) * 2, _bf16(4096), 1e-6, fp8_block=block)
        gate_up_silu.silu_mul_fp8(_bf16(256, 24576), block)
    if device.has_tma:  # others take the kernel of few rows
        for size in (6144, 24576):
            fp8_tokens.multiply_in_fp8(tokens, _fp8(size, 4096), torch.empty(size, 32), None)


def _gemvs(device: DeviceFacts) -> None:
    """Compile GEMMs of one token, by short weights and by long ones, which have other plans and a loop."""
    for depth, block, gated in itertools.product(
        (64, 1024, 2560, 4096, 12288, 14336, 28672), (None, 0, 128), (0, 1)
    ):
        row, x = _bf16(1, depth) if block is None else _fp8(1, depth), _bf16(1, depth)
        scales = None if block is None else torch.empty(1, -(-depth // block) if block else 1)
        for size, token in ((256, x), (151936, Unnormed(x, x, _bf16(depth), 1e-6, x))):
            weight = row.expand(size, depth)  # which takes no memory
            gemv.gemv(token, weight, scales, block or 0, None, torch.bfloat16, gated=bool(gated))


def _batch_invariant(device: DeviceFacts) -> None:
    """Compile the GEMMs of deterministic mode."""
    for rows in (1, 32, 64, 256, 8192):
        for size in (1024, 24576):
            TritonBatchInvariantGemm(_bf16(size, 1024), torch.bfloat16)(_bf16(rows, 1024), None)


def _small(device: DeviceFacts) -> None:
    """Compile the norms, the activation, and what prepares a step's inputs."""
    heads, kv_heads, dim, size = 32, 8, 128, 4096
    for rows in (1, 64, 4096):
        norm.add_rms_norm(_bf16(rows, size), _bf16(rows, size), _bf16(size), 1e-6)
        if rows <= 64:
            norm.add_rms_norm(torch.empty(4, rows, size), _bf16(rows, size), _bf16(size), 1e-6)
        width = (heads + 2 * kv_heads) * dim
        whole, partials = _bf16(rows, width), torch.empty(8, min(rows, 64), width)
        pools = (_bf16(1024, kv_heads, dim), None), (_fp8(1024, kv_heads, dim), (0.5, 0.5))
        for qkv, (pool, scales) in itertools.product((whole, partials), pools):
            if scales and device.capability < (8, 9):
                continue
            norm.qk_norm_rope_store(
                qkv,
                torch.empty(heads + kv_heads, dim),
                1e-6,
                *(_bf16(rows, 1, dim) for _ in range(2)),
                _int32(rows),
                torch.zeros(rows, dtype=torch.int64),
                *(pool, pool),
                dtype=torch.bfloat16,
                scales=scales,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
            )
        gate_up_silu.silu_mul(_bf16(rows, 2 * size), torch.bfloat16)
        tokens, tables = (_int32(rows), _int32(rows)), (_int32(8, 64), _int32(8, 4))
        step_inputs.embed_inputs(*tokens, *tables, _bf16(100, size), 0, page_size=64, page_rows=128)
    if device.has_tma:  # other devices never take it
        gate_up_silu.run_large_m(_bf16(4096, 1024), _bf16(6144, 1024))
    step_inputs.scatter(_int32(32), 8)
    numbers = torch.zeros((8, 32), dtype=torch.int32)
    step_inputs.list_pages(numbers, numbers[0, :8], numbers[0, :9], numbers.view(-1))


def _attention(device: DeviceFacts) -> None:
    """Compile decode and prefill, also batch-invariant, for heads of 64 to 256, and for a cache in FP8."""
    kinds = attention.TritonAttention, attention.TritonInvariantAttention
    fp8 = (False, True) if device.capability >= (8, 9) else (False,)
    sizes_of_heads_and_pages = (64, 16), (64, 64), (128, 16), (128, 64), (256, 64)
    for (dim, page_size), kind, in_fp8 in itertools.product(sizes_of_heads_and_pages, kinds, fp8):
        shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=dim, scale=dim**-0.5)
        sizes = KVShape(
            num_pages=8,
            num_layers=1,
            page_size=page_size,
            num_kv_heads=8,
            head_dim=dim,
            dtype=torch.bfloat16,
            fp8=in_fp8,
        )
        pool = KVPool(sizes, backing.zeros(sizes.num_bytes, torch.device("cpu")))
        backend = kind(shape, pool)
        for count, q_len in ((1, 1), (32, 1), (1, 64), (1, 2048)):
            table = PageTable(
                max_running=count,
                max_seq_len=4096,
                page_size=page_size,
                scratch_page=pool.scratch_page,
                device=torch.device("cpu"),
            )
            ctx = Context.build(
                input_ids=torch.zeros(count * q_len, dtype=torch.int64),
                slots=range(count),
                q_lens=[q_len] * count,
                kv_lens=[q_len] * count,
                num_decode=count if q_len == 1 else 0,
                page_table=table,
                kv=pool,
                backend=backend,
            )
            backend.prepare(ctx)
            backend.forward(_bf16(count * q_len, 32, dim), None, None, 0, ctx)
            if count == q_len == 1:
                qkv, angles = _bf16(1, (32 + 2 * 8) * dim), (torch.empty(64, dim // 2),) * 2
                for norm in (torch.empty(32 + 8, dim), None):
                    backend.attend_token(TokenQKV(qkv, norm, 1e-6, *angles), 0, ctx)


def _experts(device: DeviceFacts) -> None:
    """Compile the experts of Qwen3-30B-A3B's shape, with few experts, in bfloat16 and in FP8."""
    num_experts, per_token, size, hidden = 16, 8, 768, 2048

    def weight(rows: int, columns: int, block: int | None) -> ExpertWeights:
        if block is None:
            return _bf16(num_experts, rows, columns)
        scales = torch.empty(num_experts, rows, columns // (block or columns))
        return FP8Experts(_fp8(num_experts, rows, columns), scales, block, torch.bfloat16)

    for tokens, block in itertools.product((1, 8, 64, 4096), (None, 0, 128)):
        if block is not None and device.capability < (8, 9):
            continue
        weights, experts = moe_routing.route(
            _bf16(tokens, num_experts), per_token, renormalise=True, num_unpadded=None
        )
        gate_up, down = weight(2 * size, hidden, block), weight(hidden, size, block)
        moe.run_experts(_bf16(tokens, hidden), gate_up, down, weights, experts)


def _sampling(device: DeviceFacts) -> None:
    """Compile sampling, with and without filters and masks."""
    rows, vocab = 32, 151936
    columns = {
        "inverse_temperatures": torch.empty(rows),
        "seeds": torch.zeros(rows, dtype=torch.int64),
        "ring": _int32(4, rows),
        "ring_index": _int32(1),
        "token_pool": _int32(rows, 64),
        "num_top": torch.zeros(rows, dtype=torch.int64),
        "logprob_ring": torch.empty(4, rows),
    }
    logits = torch.empty(rows, vocab)
    filters = torch.zeros(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
    masks = _int32(rows, vocab // 32), torch.zeros(rows, dtype=torch.int64)
    for given in (None, filters):
        for masked in (None, masks):
            sampling.sample_plain(logits, _int32(rows), _int32(rows), **columns, filters=given, masks=masked)
    sampling.log_sum_exp(logits)


def _ranks(device: DeviceFacts) -> None:
    """Compile the all-reduce with its norm, and shared sampling, for two ranks."""
    groups = SimpleNamespace(
        tp=SimpleNamespace(size=2, rank=0), share=lambda device, num_bytes: ([0] * 2, None)
    )
    reduce = all_reduce.OneShotAllReduce(groups, torch.device("cpu"), 4096, 64)  # type: ignore[arg-type]
    for rows in (1, 64):
        reduce.add_rms_norm(_bf16(rows, 4096), _bf16(rows, 4096), _bf16(4096), 1e-6)
    shard = sampling.VocabShard(reduce, 0, 151936)
    count = 8
    sampling.sample_plain(
        torch.empty(count, 75968),
        *(_int32(count), _int32(count)),
        inverse_temperatures=torch.empty(count),
        seeds=torch.zeros(count, dtype=torch.int64),
        ring=_int32(4, count),
        ring_index=_int32(1),
        part=shard,
    )


def _weights(device: DeviceFacts) -> None:
    """Compile the copies of weights and pages."""
    pair = torch.zeros(1024), torch.zeros(1024)
    grouped_copy.GroupedCopy([pair])()
    grouped_copy.are_finite([_bf16(1024)], torch.bfloat16)
    pages = torch.zeros(2, 4, dtype=torch.int64)
    page_slices.copy_slices(1 << 40, 1 << 41, pages, num_rows=8, source_row=1024, target_row=1024, run=512)


PARTS: list[Callable[[DeviceFacts], None]] = [
    *(partial(_gemms, rows=rows) for rows in ROWS),
    *(_fp8_gemms, _gemvs, _batch_invariant, _small, _attention, _experts, _sampling, _ranks, _weights),
]


def compile_part(job: tuple[int, int]) -> list[CompiledKernel]:
    """Launch the kernels of one of `PARTS`, with the sizes of common models, for a compute capability."""
    capability, part = job
    with compiling_for(capability) as done:
        PARTS[part](facts(capability))
    return done


def main() -> int:
    """Print one line per compute capability; the exit code is 1 if a kernel does not compile."""
    capabilities, began = list(map(int, sys.argv[1:] or map(str, DEVICES))), time.monotonic()
    jobs = list(itertools.product(capabilities, range(len(PARTS))))
    processes = min(len(jobs), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = dict(zip(jobs, pool.map(compile_part, jobs, chunksize=1), strict=True))
    lines, problems = [], []
    for capability in capabilities:
        done = [each for job, kernels in results.items() if job[0] == capability for each in kernels]
        worst = max(done, key=lambda each: each.shared)
        lines.append(
            [
                f"sm_{capability}",
                f"{len({each.name for each in done})}",
                f"{len(done)}",
                f"{sum(bool(each.problem) for each in done)}",
                f"{worst.shared / 1024:.0f} KiB, {worst.name}",
            ]
        )
        problems += [f"sm_{capability} {each.name}: {each.problem}" for each in done if each.problem]
    header = ["", "kernels", "launches", "do not compile", "most shared memory"]
    report.show(f"compiled, not run, in {time.monotonic() - began:.0f} s", header, lines)
    print("\n".join(dict.fromkeys(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
