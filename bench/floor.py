"""What the offline workload costs at least: bytes over the memory's speed, operations over the GPU's.

    python -m bench.floor /path/to/model [--measure]

A step has three parts, one after the other: the layers' GEMMs, attention, and the head. Each takes as long
as the slower of reading what it needs once and of its arithmetic; what lies between them is free. `--measure`
takes the machine's two constants from this GPU instead of an H200.
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
    """What a device can do at best."""

    read: float = 4.16e12  # bytes a second; measured on an H200
    flops: float = 764e12  # bfloat16 operations a second; 8192 cubed, on the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one part of a step reads and computes."""

    bytes: float
    flops: float

    def seconds(self, machine: Machine) -> float:
        """The slower of both."""
        return max(self.bytes / machine.read, self.flops / machine.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One figure of the workload."""

    seconds: float
    bytes: float
    flops: float


Sequences = Iterable[tuple[int, int]]
"""(tokens of this step, tokens in the cache with them) of each sequence."""


def step(model: ModelConfig, sequences: Sequences, num_logits: int) -> tuple[Work, Work, Work]:
    """GEMMs, attention and head of one bfloat16 step of a dense model.

    Every layer counts in full for every token, though the last one's MLP is needed only where a token is
    sampled (an engine may go below by 1 / layers).
    """
    assert model.moe is None, "a step of experts depends on what the router chooses"
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    weights = model.num_layers * (
        model.hidden_size * (2 * heads + 2 * kv_heads) * dim + 3 * model.hidden_size * model.intermediate_size
    )
    tokens = cached = pairs = 0
    for q, kv in sequences:
        tokens += q
        cached += kv
        pairs += q * kv - q * (q - 1) // 2  # (query, key) that the causal mask lets through
    head = model.vocab_size * model.hidden_size
    return (
        Work(bytes=2 * weights, flops=2 * weights * tokens),
        Work(
            bytes=2 * cached * model.num_layers * 2 * kv_heads * dim,
            flops=4 * pairs * model.num_layers * heads * dim,
        ),
        Work(bytes=2 * head, flops=2 * head * num_logits),
    )


def total(machine: Machine, *steps: tuple[Work, ...]) -> Floor:
    """Steps one after the other."""
    works = [work for parts in steps for work in parts]
    return Floor(
        seconds=sum(work.seconds(machine) for work in works),
        bytes=sum(work.bytes for work in works),
        flops=sum(work.flops for work in works),
    )


def offline(model: ModelConfig, machine: Machine, prompts: Sequence[int], outputs: Sequence[int]) -> Floor:
    """Requests of `prompts` and `outputs` tokens, all running at once: one step of prefill, then decode."""
    steps = [step(model, [(n, n) for n in prompts], len(prompts))]
    for made in range(1, max(outputs)):  # the step that makes output token `made` (from 0)
        rows = [(1, n + made) for n, count in zip(prompts, outputs, strict=True) if made < count]
        steps.append(step(model, rows, len(rows)))
    return total(machine, *steps)


def figures(model: ModelConfig, machine: Machine) -> dict[str, Floor]:
    """Of each figure of the workload, by the name that `bench.offline` gives it."""
    prompts, outputs = offline256_lengths()
    return {
        "offline256": offline(model, machine, prompts, outputs),
        **{  # the mean of the steps that make tokens 1 to 256 behind prompts of 512
            f"decode bs={rows}": total(machine, step(model, [(1, 640)] * rows, rows)) for rows in (1, 32, 256)
        },
        **{
            f"first_token prompt={n}": total(machine, step(model, [(n, n)], 1))
            for n in (16, 64, 256, 1024, 3500)
        },
        "prefill 64x2048": total(machine, step(model, [(2048, 2048)] * 64, 64)),
    }


def offline256_lengths() -> tuple[list[int], list[int]]:
    """Prompt and output tokens of the pinned workload's 256 requests."""
    prompts, outputs = suite.offline256(random.Random(0))
    return [len(prompt) for prompt in prompts], outputs


def measure() -> Machine:
    """The constants of the GPU at hand."""
    import torch

    data = torch.randn(1 << 30, device="cuda")
    square = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    read = min(_seconds(torch.cuda.synchronize, run) for run in (data.sum, data.amax))
    gemm = _seconds(torch.cuda.synchronize, lambda: square @ square)
    return Machine(read=data.nbytes / read, flops=2 * 8192**3 / gemm)


def _seconds(synchronize: Callable[[], None], run: Callable[[], object]) -> float:
    times = []
    for _ in range(12):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    """Print a line a figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a directory with a config.json")
    parser.add_argument("--measure", action="store_true", help="measure the machine's constants here")
    args = parser.parse_args()
    machine = measure() if args.measure else Machine()
    model = resolve(str(args.model), "dummy", args.model).config
    report.show(
        f"floors at {machine.read / 1e12:.2f} TB/s and {machine.flops / 1e12:.0f} TFLOP/s",
        ["", "GB", "TFLOP", "ms"],
        [
            [name, f"{floor.bytes / 1e9:.3g}", f"{floor.flops / 1e12:.3g}", f"{floor.seconds * 1e3:.3f}"]
            for name, floor in figures(model, machine).items()
        ],
    )


if __name__ == "__main__":
    main()
