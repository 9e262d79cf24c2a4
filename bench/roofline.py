"""Computes the roofline of the offline workload: bytes over memory bandwidth, operations over FLOP/s.

    python -m bench.roofline /path/to/model [--measure | --cpu]

A step has three parts, one after the other: the layers' GEMMs, attention, and the head. Each part takes the
longer of two times: that of reading its inputs once, and that of its arithmetic. Everything between the parts
is free. The machine's two constants are those of an H200; `--measure` measures them on this GPU, and `--cpu`
on this CPU, whose figures are those of `bench.cpu_vs_transformers`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import report, suite
from segue.checkpoint.source import resolve
from segue.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The peak speeds of a device."""

    read: float = 4.16e12  # bytes per second; measured on an H200
    flops: float = (
        764e12  # bfloat16 operations per second; measured on the same H200 with a GEMM of 8192 cubed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The bytes that one part of a step reads, and its operations."""

    bytes: float
    flops: float

    def seconds(self, machine: Machine) -> float:
        """Return the longer of the two times: of reading and of arithmetic."""
        return max(self.bytes / machine.read, self.flops / machine.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The least time of one figure of the workload, with its bytes and operations."""

    seconds: float
    bytes: float
    flops: float


Sequences = Iterable[tuple[int, int]]
"""(tokens of this step, cached tokens including them) of each sequence."""


def step(
    model: ModelConfig, sequences: Sequences, num_logits: int, *, fp8_kv: bool = False
) -> tuple[Work, Work, Work]:
    """Return the GEMMs, the attention and the head of one bfloat16 step.

    Weights in FP8 are half the bytes, and with `fp8_kv` so are keys and values; their multiplications count
    as if they were bfloat16's. Of experts, those are read that tokens choose if each chooses at random.
    Every layer counts in full for every token, although the last layer's MLP is needed only for sampled
    tokens (so an engine may be faster than the roofline by 1 / layers).
    """
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    tokens = cached = pairs = 0
    for q, kv in sequences:
        tokens += q
        cached += kv
        pairs += q * kv - q * (q - 1) // 2  # (query, key) pairs that the causal mask allows
    head = model.vocab_size * model.hidden_size
    used = read = model.num_layers * model.hidden_size * (2 * heads + 2 * kv_heads) * dim  # weights
    for layer in range(model.num_layers):
        if model.moe is not None and model.is_sparse(layer):
            expert = 3 * model.hidden_size * model.moe.expert_intermediate_size
            count, per_token = model.moe.num_experts, model.moe.num_experts_per_tok
            used += per_token * expert  # by one token
            read += count * (1 - (1 - per_token / count) ** tokens) * expert
        else:
            used += 3 * model.hidden_size * model.intermediate_size
            read += 3 * model.hidden_size * model.intermediate_size
    return (
        Work(bytes=(2 if model.fp8 is None else 1) * read, flops=2 * used * tokens),
        Work(
            bytes=(1 if fp8_kv else 2) * cached * model.num_layers * 2 * kv_heads * dim,
            flops=4 * pairs * model.num_layers * heads * dim,
        ),
        Work(bytes=2 * head, flops=2 * head * num_logits),
    )


def total(machine: Machine, *steps: tuple[Work, ...]) -> Roofline:
    """Return the roofline of steps that run one after the other."""
    works = [work for parts in steps for work in parts]
    return Roofline(
        seconds=sum(work.seconds(machine) for work in works),
        bytes=sum(work.bytes for work in works),
        flops=sum(work.flops for work in works),
    )


def offline(
    model: ModelConfig,
    machine: Machine,
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    fp8_kv: bool = False,
) -> Roofline:
    """Return the roofline of requests that all run at once: one prefill step, then decode steps.

    `prompts` and `outputs` are the numbers of prompt and output tokens of each request.
    """
    steps = [step(model, [(n, n) for n in prompts], len(prompts), fp8_kv=fp8_kv)]
    for made in range(1, max(outputs)):  # the step that makes output token `made`, counted from 0
        rows = [(1, n + made) for n, count in zip(prompts, outputs, strict=True) if made < count]
        steps.append(step(model, rows, len(rows), fp8_kv=fp8_kv))
    return total(machine, *steps)


def figures(model: ModelConfig, machine: Machine, *, fp8_kv: bool = False) -> dict[str, Roofline]:
    """Return the roofline of each figure of the workload, by its name in `bench.offline`."""
    prompts, outputs = offline256_lengths()

    def one(sequences: Sequences, num_logits: int) -> Roofline:
        return total(machine, step(model, sequences, num_logits, fp8_kv=fp8_kv))

    return {
        "offline256": offline(model, machine, prompts, outputs, fp8_kv=fp8_kv),
        **{  # the mean of the steps that make tokens 1 to 256 after prompts of 512
            f"decode bs={rows}": one([(1, 640)] * rows, rows) for rows in (1, 32, 256)
        },
        **{f"first_token prompt={n}": one([(n, n)], 1) for n in (16, 64, 256, 1024, 3500)},
        "prefill 64x2048": one([(2048, 2048)] * 64, 64),
    }


def cpu_figures(model: ModelConfig, machine: Machine) -> dict[str, Roofline]:
    """Return the roofline of one step of each figure of `bench.cpu_vs_transformers`, by its name there."""
    return {
        **{  # in the middle of the 128 tokens after prompts of 128
            f"decode, batch {rows}": total(machine, step(model, [(1, 192)] * rows, rows)) for rows in (1, 16)
        },
        "prefill 1024": total(machine, step(model, [(1024, 1024)], 1)),
    }


def offline256_lengths() -> tuple[list[int], list[int]]:
    """Return the prompt and output tokens of the pinned workload's 256 requests."""
    prompts, outputs = suite.offline256(random.Random(0))
    return [len(prompt) for prompt in prompts], outputs


def measure() -> Machine:
    """Measure the constants of this machine's GPU."""
    import torch

    data = torch.randn(1 << 30, device="cuda")
    square = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    read = min(_seconds(torch.cuda.synchronize, run) for run in (data.sum, data.amax))
    gemm = _seconds(torch.cuda.synchronize, lambda: square @ square)
    return Machine(read=data.nbytes / read, flops=2 * 8192**3 / gemm)


def measure_cpu() -> Machine:
    """Measure the constants of this machine's CPU, with the threads that torch uses."""
    import torch

    data = torch.ones(1 << 28)
    square = torch.randn(2048, 2048).to(torch.bfloat16)
    read = _seconds(lambda: None, data.sum)
    gemm = _seconds(lambda: None, lambda: square @ square)
    return Machine(read=data.nbytes / read, flops=2 * 2048**3 / gemm)


def _seconds(synchronize: Callable[[], None], run: Callable[[], object]) -> float:
    """Return the median seconds of `run` on the device, without its first two calls, which warm up."""
    times = []
    for _ in range(12):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    """Print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a directory with a config.json")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--measure", action="store_true", help="measure the machine's constants here")
    where.add_argument("--cpu", action="store_true", help="measure those of the CPU, and show its figures")
    args = parser.parse_args()
    machine = measure_cpu() if args.cpu else measure() if args.measure else Machine()
    model = resolve(str(args.model), "dummy", args.model).config
    report.show(
        f"rooflines at {machine.read / 1e9:.3g} GB/s and {machine.flops / 1e12:.3g} TFLOP/s",
        ["", "GB", "TFLOP", "ms"],
        [
            [name, f"{bound.bytes / 1e9:.3g}", f"{bound.flops / 1e12:.3g}", f"{bound.seconds * 1e3:.3f}"]
            for name, bound in (cpu_figures if args.cpu else figures)(model, machine).items()
        ],
    )


if __name__ == "__main__":
    main()
