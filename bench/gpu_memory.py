"""Measures what engines take of a GPU: one more that stands by, and one whose memory is released and resumed.

    python -m bench.gpu_memory parked [0.6b|8b] [--kv-owner=auto] [--num-kv-tokens=262144] [--option=value …]
    python -m bench.gpu_memory released [--cycles=20]

*parked* runs ``segue serve --shadows`` with dummy weights, with one engine that stands by and with two. What
the second takes is the difference, at most 1.5 GiB. Its parts are the context of a process that has only
torch and a tensor, what the steps of an engine's start allocate on the device but for the shared weights and
the KV cache, and the rest: modules of kernels, workspaces of libraries, the parked pages.

*released* releases and resumes each tag so often: the device gets at least 95 % of the bytes back that the
engine names, each time, and outputs are the same again. The files are ``gpu_parked_SIZE.json`` and
``gpu_released.json``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench import report, suite
from bench.failover import model_options
from segue.cluster.pod_process import PodProcess
from segue.memory.budget import GIB, MIB

PARKED_GIB = 1.5
RETURNED = 0.95
NOT_PARKED = (
    "device",
    "free memory",
    "weights",
    "KV pool",
)  # no bytes, shared bytes, and bytes that come later
TAGS = (["kv_cache"], ["weights"], ["weights", "kv_cache"])
PARAMS = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[5, 6, 7] * 30, [9] * 50, list(range(3, 60))]
CONTEXT = "import sys, torch; torch.zeros(1, device='cuda'); print('there', flush=True); sys.stdin.read()"


def context_mib() -> int:
    """Return what a process with torch and one tensor takes of the GPU."""
    before = report.gpu_memory_mib()
    words = [sys.executable, "-c", CONTEXT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        found = report.gpu_memory_mib() - before
        process.stdin.close()
    return found


def parked(size: str, options: list[str]) -> dict[str, Any]:
    """Return what one more engine that stands by takes of the GPU, and the parts of it, in MiB."""
    used, steps = [], []
    with ExitStack() as stack:
        options = ["--device=cuda", *options, *model_options(size, stack)]
        for shadows in (1, 2):
            with PodProcess(options, shadows=shadows) as pod:
                pod.wait_for_standby(count=shadows)
                body = {"input_ids": PROMPTS, "sampling_params": PARAMS}
                httpx.post(f"{pod.url}/generate", json=body, timeout=60).raise_for_status()
                used.append(report.gpu_memory_mib())
                steps = httpx.get(f"{pod.url}/server_info", timeout=60).json()["decided"]["init_steps"]
    parts = {
        step["name"]: round(step["num_bytes"] / MIB, 1)
        for step in steps
        if step["num_bytes"] and step["name"] not in NOT_PARKED
    }
    parts = {"context": context_mib(), **parts}
    more = used[1] - used[0]
    parts["rest"] = round(more - sum(parts.values()), 1)
    return {
        "options": options,
        "used_mib": used,
        "parked_gib": more * MIB / GIB,
        "parts_mib": parts,
        "steps": steps,
    }


def cycles(engine: Any, tags: list[str], count: int, model: Path) -> dict[str, list[float]]:
    """Release and resume tags so often; returns bytes and milliseconds of each time.

    Raises:
        AssertionError: the outputs are others, or CUDA graphs are not used any more.
    """
    import torch

    def tokens() -> list[list[int]]:
        return [reply["output_ids"] for reply in engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)]

    def graph_hits() -> int:
        hits: int = engine.get_server_info()["internal_states"][0]["graph_hit"]
        return hits

    before = tokens()
    found: dict[str, list[float]] = {
        name: [] for name in ("named_bytes", "returned_bytes", "release_ms", "resume_ms")
    }
    for _ in range(count):
        free, began = torch.cuda.mem_get_info(0)[0], time.perf_counter()
        found["named_bytes"].append(engine.release_memory_occupation(tags)["num_bytes"])
        found["release_ms"].append(1e3 * (time.perf_counter() - began))
        found["returned_bytes"].append(torch.cuda.mem_get_info(0)[0] - free)
        began = time.perf_counter()
        engine.resume_memory_occupation(tags)
        found["resume_ms"].append(1e3 * (time.perf_counter() - began))
        if "weights" in tags:
            assert engine.update_weights_from_disk(str(model))["success"]
        hits = graph_hits()
        assert tokens() == before, "the outputs are others"
        assert graph_hits() > hits, "the graphs are not used any more"
    return found


def least_returned(found: dict[str, list[float]]) -> float:
    """Return the least share of the named bytes that the device had back."""
    return min(
        back / named for back, named in zip(found["returned_bytes"], found["named_bytes"], strict=True)
    )


def released(count: int) -> dict[str, Any]:
    """Return the figures of each choice of tags."""
    import segue
    from tests.model_runner.tiny import save_llama

    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_llama(model, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, head_dim=128)
        # Released memory has no prefix cache, and other batches: equal tokens are promised with this option.
        options: dict[str, Any] = {"device": "cuda", "num_kv_tokens": 65536, "deterministic": True}
        with segue.Engine(str(model), enable_memory_saver=True, **options) as engine:
            return {", ".join(tags): cycles(engine, tags, count, model) for tags in TAGS}


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("parked", "released"))
    parser.add_argument("size", nargs="?", default="0.6b", choices=suite.SHAPES, help="of the model")
    parser.add_argument("--num-kv-tokens", default="262144")
    parser.add_argument("--cycles", type=int, default=20)
    args, options = parser.parse_known_args()
    if args.what == "released":
        found = released(args.cycles)
        rows = []
        for name, each in found.items():
            longest = (f"{max(each[part]):.1f}" for part in ("release_ms", "resume_ms"))
            named = f"{each['named_bytes'][0] / MIB:.0f}"
            rows.append((name, named, f"{least_returned(each):.1%}", *longest))
        header = ("tags", "MiB", "returned, least", "release, ms, most", "resume, ms, most")
        report.show(f"{args.cycles} cycles each; the bar is {RETURNED:.0%}", header, rows)
        print(f"written to {report.save('gpu_released', found)}")
        return 0 if all(least_returned(each) >= RETURNED for each in found.values()) else 1
    figures = parked(args.size, [f"--num-kv-tokens={args.num_kv_tokens}", *options])
    report.show(
        f"Qwen3-{args.size}: one more engine takes {figures['parked_gib']:.2f} GiB; the bar is {PARKED_GIB}",
        ("part", "MiB"),
        [(name, f"{mib:.1f}") for name, mib in figures["parts_mib"].items()],
    )
    print(f"written to {report.save(f'gpu_parked_{args.size}', figures)}")
    return 0 if figures["parked_gib"] <= PARKED_GIB else 1


if __name__ == "__main__":
    sys.exit(main())
