"""Measures decode steps of models whose GEMMs are in no stored table, with and without plans found at start.

    python -m bench.untuned [MODEL …] [--modes auto stored]

The models have dummy weights. Each is started three times: with plans and empty caches of kernels and plans,
without plans (`--gemm-plans stored`), where cuBLAS computes what has no stored plan, and with plans again,
for which the caches are filled now. It shows each decode step beside its roofline, and how long each start
took until it was ready, from `Engine(…)` on. Then it times each GEMM of the model alone, with its plan and by
cuBLAS, for the fewest and the most rows that the plan serves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import report, roofline, suite
from segue import Engine
from segue.bench.offline import Batch, generate
from segue.models.config import ModelConfig

ROWS = (1, 8, 32, 100, 256)
PROMPT, STEPS, REPETITIONS = 512, 64, 2
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": suite.COMMON | suite.SHAPES["4b"],
    "qwen3-14b": suite.COMMON
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 17408,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": suite.COMMON | suite.SHAPES["llama-8b"],
    "mistral-7b": _LLAMA
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 14336,
        "vocab_size": 32768,
        "sliding_window": None,
    },
}
BARS = {1: 0.80, 256: 0.78}  # shares of the roofline; the first one for models of at least 4B


@contextmanager
def started(name: str, caches: Path, mode: str) -> Iterator[tuple[Engine, float]]:
    """Yield an engine of a model, and the seconds until it was ready."""
    directory = caches / name
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    os.environ["TRITON_CACHE_DIR"] = str(caches / "triton")  # for the processes of the engine
    began = time.perf_counter()
    with Engine(
        str(directory),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        max_running_requests=256,
        cache_dir=str(caches / "segue"),
        gemm_plans=mode,
    ) as engine:
        yield engine, time.perf_counter() - began


def decode_steps(engine: Engine) -> dict[int, float]:
    """Return the milliseconds of a decode step by its number of rows.

    The prompts of a measurement are the same each time, and its first round caches them: so both of the times
    whose difference counts are those of a short prefill and of decode steps.
    """
    rng = random.Random(0)
    found = {}
    for rows in ROWS:
        prompts = [suite.draw_prompt(rng, PROMPT) for _ in range(rows)]

        def seconds(tokens: int, prompts: list[list[int]] = prompts) -> float:
            batch = Batch(prompts=prompts, max_tokens=[tokens] * len(prompts), temperature=0.0)
            began = time.perf_counter()
            generate(engine, batch)
            return time.perf_counter() - began

        seconds(2)
        first = min(seconds(1) for _ in range(REPETITIONS))
        whole = min(seconds(1 + STEPS) for _ in range(REPETITIONS))
        found[rows] = (whole - first) / STEPS * 1e3
    return found


def rooflines(config: ModelConfig) -> dict[int, float]:
    """Return the least milliseconds of the mean step, by its number of rows."""
    machine, cached = roofline.Machine(), PROMPT + STEPS // 2
    return {
        rows: roofline.total(machine, roofline.step(config, [(1, cached)] * rows, rows)).seconds * 1e3
        for rows in ROWS
    }


def plan_times(name: str, plans: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the microseconds of each GEMM of a model alone, with its plan and by cuBLAS."""
    import torch

    from segue.kernels.gemm_plan import fewest_rows
    from segue.kernels.triton import gemm
    from segue.kernels.triton.plan_tasks import GemmTask
    from segue.kernels.triton.plan_timing import ChainTimer, use_plans
    from segue.model_runner.gemm_plans import model_gemms
    from segue.models.decoder import build_model

    use_plans(plans)
    with torch.device("cuda"), torch.inference_mode():
        model = build_model(ModelConfig.from_hf(MODELS[name]), dtype=torch.bfloat16).to_empty(device="cuda")
        timer, found = ChainTimer(), []
        for own in model_gemms(model):
            for weight in own.weights:
                weight.normal_(std=0.02)
            for shape in own.shapes():
                for rows in sorted({max(fewest_rows(shape.rows), own.first_rows), shape.rows}):
                    exact = replace(shape, rows=rows)
                    task = GemmTask(gemm=own, shape=exact, plans=(), bandwidth=roofline.Machine().read)
                    plan = gemm.choose(rows, shape.depth, shape.size, torch.bfloat16, shape.kind)
                    inputs, copies = task.inputs(), min(32, max(4, int(3e-4 / task.seconds)))
                    library = timer(partial(task.run, None, inputs), copies)
                    ours = plan and timer(partial(task.run, plan, inputs), copies) + task.reading(plan)
                    least = shape.size * shape.depth * 2 / roofline.Machine().read * 1e6
                    found.append(
                        {
                            "gemm": f"{shape.size}x{shape.depth}, {shape.kind}",
                            "rows": rows,
                            "read, us": least,
                            "cuBLAS, us": library,
                            "plan, us": ours,
                            "plan": plan and astuple(plan),
                            "layers": len(own.weights),
                        }
                    )
    return found


def in_gemms(times: Sequence[dict[str, Any]], rows: int) -> float:
    """Return the milliseconds that the GEMMs of a step of `rows` rows take alone, each with its plan.

    It is 0 if no timed GEMM serves so many rows. One row has no plans.
    """
    each: dict[str, dict[str, Any]] = {}
    for found in sorted(times, key=lambda found: -found["rows"]):
        if found["rows"] >= rows:
            each[found["gemm"].partition(",")[0]] = found  # the last one has the fewest rows
    return sum((gemm["plan, us"] or gemm["cuBLAS, us"]) * gemm["layers"] for gemm in each.values()) / 1e3


def measure(name: str, modes: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one model."""
    found: dict[str, Any] = {"roofline, ms": rooflines(ModelConfig.from_hf(MODELS[name])), "ready, s": {}}
    with tempfile.TemporaryDirectory() as path:
        caches = Path(path)
        for mode, title in [*((mode, mode) for mode in modes), (modes[0], f"{modes[0]}, warm")]:
            with started(name, caches, mode) as (engine, ready):
                found["ready, s"][title] = round(ready, 2)
                steps = engine.get_server_info()["decided"]["init_steps"]
                found[f"GEMM plans, {title}"] = next(
                    step["detail"] for step in steps if step["name"] == "GEMM plans"
                )
                found[f"{title}, ms"] = decode_steps(engine)
                print(f"{title}: {found[f'GEMM plans, {title}']}; ms: {found[f'{title}, ms']}", flush=True)
        kept = [json.loads(file.read_text())["plans"] for file in caches.glob("segue/plans/*.json")]
        found["GEMMs"] = plan_times(name, kept[0] if kept else {})
    return found


def main() -> None:
    """Print one table per model, and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--modes", nargs="+", default=["auto", "stored"], help="of --gemm-plans")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(MODELS)}")
    results = {}
    for name in args.models or MODELS:
        results[name] = found = measure(name, args.modes)
        bounds, titles = found["roofline, ms"], [*args.modes, f"{args.modes[0]}, warm"]
        report.show(
            f"{name}: ms per decode step; ready in {found['ready, s']} s",
            ["rows", "roofline", *(f"{title}, of the roofline" for title in titles), "in GEMMs", "bar"],
            [
                [
                    str(rows),
                    f"{bounds[rows]:.3f}",
                    *(
                        f"{found[f'{title}, ms'][rows]:.3f}, {bounds[rows] / found[f'{title}, ms'][rows]:.0%}"
                        for title in titles
                    ),
                    f"{in_gemm:.3f}" if (in_gemm := in_gemms(found["GEMMs"], rows)) and rows > 1 else "",
                    f"{BARS[rows]:.0%}" if rows in BARS else "",
                ]
                for rows in ROWS
            ],
        )
        for each in found["GEMMs"]:
            ours = each["plan, us"]
            share = (
                f"{ours:.1f}, {ours / each['cuBLAS, us']:.0%} of it, {each['plan']}" if ours else "no plan"
            )
            read = f"read in {each['read, us']:.1f}, cuBLAS {each['cuBLAS, us']:.1f}"
            print(f"{each['gemm']}, {each['rows']} rows, us: {read}, {share}")
        print(f"written to {report.save('gpu_untuned', results)}")


if __name__ == "__main__":
    main()
