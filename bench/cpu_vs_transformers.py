"""Measures Segue against transformers' ``generate`` on the same cores, model and prompts, in one run.

All runs are bfloat16 and greedy, and ignore EOS. Decode: 128 tokens after prompts of 128, at batch 1 and 16;
a token's time is ``(t(128 new) - t(1 new)) / 127``, which leaves prefill out. Prefill: the first token after
a prompt of 1024. A CPU with AMX has a file of results of its own. The engines take turns, each repetition has
its own prompts, and medians are compared. Transformers runs with SDPA, its default, and with eager attention,
and the better of the two counts; its KV cache is its default. Segue has its defaults, but no prefix cache.
The roofline is by the speeds of memory and arithmetic that `bench.roofline` measures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import segue
from bench import report, roofline, workload
from segue.checkpoint.source import resolve
from segue.config import default_cache_dir
from segue.doctor.machine import num_cores
from segue.kernels.cpu.build import kernels
from tests.fixtures.make_reference import load_model

Generate = Callable[[list[list[int]], int], None]
"""(prompts of equal length, new tokens per prompt): generates the tokens."""

NAME = "cpu_vs_transformers"  # of the results
PREFILL_LEN = 1024
DECODE_PROMPT_LEN = 128
DECODE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One row of the table: the measured case, and the ratio that Segue must reach."""

    name: str
    batch: int
    bar: float


DECODE_1 = Measure(name="decode, batch 1", batch=1, bar=1.8)
DECODE_16 = Measure(name="decode, batch 16", batch=16, bar=2.1)
PREFILL = Measure(name=f"prefill {PREFILL_LEN}", batch=1, bar=1.5)
MEASURES = (DECODE_1, DECODE_16, PREFILL)


def tokens_per_second(generate: Generate, measure: Measure, seed: int) -> float:
    """Measure one repetition: two timed calls for decode, one for prefill."""
    if measure is PREFILL:
        return PREFILL_LEN / _seconds(generate, workload.prompts(1, PREFILL_LEN, seed=seed), 1)
    batch = workload.prompts(measure.batch, DECODE_PROMPT_LEN, seed=seed)
    first = _seconds(generate, batch, 1)
    whole = _seconds(generate, batch, DECODE_TOKENS)
    return measure.batch * (DECODE_TOKENS - 1) / (whole - first)


def _seconds(generate: Generate, batch: list[list[int]], num_tokens: int) -> float:
    began = time.perf_counter()
    generate(batch, num_tokens)
    return time.perf_counter() - began


def transformers_sides(gguf: Path) -> dict[str, Generate]:
    """Load the model of the same GGUF file into transformers, and return it with either attention."""
    model, _ = load_model(gguf, torch.bfloat16)

    def side(attention: str) -> Generate:
        """Return the function that generates with this implementation of attention; both share the model."""

        @torch.inference_mode()
        def generate(batch: list[list[int]], num_tokens: int) -> None:
            if model.config._attn_implementation != attention:
                model.set_attn_implementation(attention)
            ids = torch.tensor(batch)
            mask = torch.ones_like(ids)
            reply = model.generate(
                ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            assert reply.shape[1] == ids.shape[1] + num_tokens

        return generate

    return {f"transformers {attention}": side(attention) for attention in ("sdpa", "eager")}


def segue_side(engine: Any) -> Generate:
    """Return a running Segue engine as one side of the comparison."""

    def generate(batch: list[list[int]], num_tokens: int) -> None:
        replies = engine.generate(input_ids=batch, sampling_params=workload.greedy(num_tokens))
        assert all(len(reply["output_ids"]) == num_tokens for reply in replies)

    return generate


def measure_all(sides: dict[str, Generate], repetitions: int) -> dict[str, dict[str, list[float]]]:
    """Return tokens/s of each repetition, by measure and engine; repetition 0 warms up and is dropped."""
    found: dict[str, dict[str, list[float]]] = {m.name: {side: [] for side in sides} for m in MEASURES}
    for repetition in range(repetitions + 1):
        for measure in MEASURES:
            for side, generate in sides.items():
                speed = tokens_per_second(generate, measure, seed=repetition)
                if repetition > 0:
                    found[measure.name][side].append(round(speed, 2))
    return found


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=("transformers", "segue"), help="measure only this engine")
    args = parser.parse_args()
    torch.set_num_threads(num_cores())
    sides = {} if args.only == "segue" else transformers_sides(workload.bundled_model())
    if args.only == "transformers":
        found = measure_all(sides, args.repetitions)
    else:
        with segue.Engine(dtype="bfloat16", disable_prefix_cache=True) as engine:
            sides["segue"] = segue_side(engine)
            found = measure_all(sides, args.repetitions)
    machine = roofline.measure_cpu()
    model = resolve(None, "auto", default_cache_dir()).config
    bounds = {
        m.name: bound.seconds / (PREFILL_LEN if m is PREFILL else m.batch)
        for m, bound in zip(MEASURES, roofline.cpu_figures(model, machine).values(), strict=True)
    }
    medians = {name: {side: statistics.median(v) for side, v in by.items()} for name, by in found.items()}
    if args.only:
        report.show("tokens/s, bfloat16, medians", ["", *sides], _rows(medians))
        return 0
    ratios = {
        name: by["segue"] / max(v for k, v in by.items() if k != "segue") for name, by in medians.items()
    }
    shares = {name: by["segue"] * bounds[name] for name, by in medians.items()}
    default = {name: by["segue"] / by["transformers sdpa"] for name, by in medians.items()}
    report.show(
        "tokens/s, bfloat16, medians",
        ["", *sides, "over its default", "over its better", "bar", "of the roofline"],
        [
            [*row, f"{default[m.name]:.2f}", f"{ratios[m.name]:.2f}", f"{m.bar:.1f}", f"{shares[m.name]:.0%}"]
            for row, m in zip(_rows(medians), MEASURES, strict=True)
        ],
    )
    path = report.save(
        NAME + ("_amx" if kernels().tiles else ""),
        {
            "unit": "tokens/s",
            "medians": medians,
            "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
            "ratios over its default": {name: round(ratio, 3) for name, ratio in default.items()},
            "shares of the roofline": {name: round(share, 3) for name, share in shares.items()},
            "machine": {"GB/s": round(machine.read / 1e9, 1), "TFLOP/s": round(machine.flops / 1e12, 3)},
            "bars": {m.name: m.bar for m in MEASURES},
            "repetitions": found,
        },
    )
    print(f"written to {path}")
    return 0 if all(ratios[m.name] >= m.bar for m in MEASURES) else 1


def _rows(medians: dict[str, dict[str, float]]) -> list[list[str]]:
    return [[name, *(f"{speed:.1f}" for speed in by.values())] for name, by in medians.items()]


if __name__ == "__main__":
    sys.exit(main())
