"""Runs the benchmarks behind the documented figures of one GPU, or with --gpus 2 of two, on one commit.

    python -m bench.gpu_bench [--gpus 2] [--only NAME …] [--theirs COMMAND]

Each benchmark is a process of its own and stores its results and circumstances in bench/results. One that
fails does not stop the others. A table shows what each took and whether its bars held.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from bench import report, suite

THEIRS = "http_compare"  # the benchmark that also runs on another engine

Benches = dict[str, list[str]]  # name -> module and arguments


def of_one_gpu() -> Benches:
    """Return the benchmarks that need one GPU."""
    small, large = (str(suite.model_dir(size)) for size in ("0.6b", "8b"))
    killed = ["--device=cuda", "--shadows=4", "--name"]
    return {
        "first_minute": ["first_minute"],
        "offline": ["offline", "0.6b"],
        "offline_8b": ["offline", "8b"],
        "offline_8b_deterministic": ["offline", "8b", "--deterministic=1"],
        "offline_8b_fp8": ["offline", "8b", "--quantization=fp8", "--kv-cache-dtype=fp8"],
        "kv_fp8": ["kv_fp8"],
        "untuned": ["untuned"],
        "service_speed": ["service_speed"],
        "parked": ["gpu_memory", "parked", "0.6b"],
        "parked_8b": ["gpu_memory", "parked", "8b"],
        "released": ["gpu_memory", "released"],
        "weight_sync_service": [
            *("weight_sync", large, "--device=cuda", "--same-gpu", "--num-kv-tokens=65536", "--service"),
            "--name=gpu_weight_sync_service",
        ],
        "guided": ["guided", "--device=cuda", "--model=0.6b"],
        "moe": ["moe"],
        "mixed_step": ["mixed_step", small, "--load-format=dummy"],
        "pause": ["pause", large, "--load-format=dummy", "--max-model-len=17000"],
        "weight_ipc": [
            *("weight_sync", large, "--device=cuda", "--same-gpu", "--memory-ratio=0.5"),
            "--name=gpu_weight_ipc",
        ],
        "failover": ["failover", "--model=0.6b", *killed, "gpu_failover_0.6b"],
        "failover_8b": [
            *("failover", "--model=8b", "--streams=64", "--tokens=1000"),
            *(*killed, "gpu_failover_8b"),
        ],
        "failover_soak": [
            *("failover_soak", "--model=0.6b", "--device=cuda", "--name=gpu_failover_soak"),
            *("--kills=20", "--warm-kills=5", "--every=5"),
        ],
        "warm_kv": ["warm_kv", "--model=0.6b", "--device=cuda", "--name=gpu_warm_kv"],
        "warm_kv_8b": ["warm_kv", "--model=8b", "--device=cuda", "--kills=4", "--name=gpu_warm_kv_8b"],
        "prefill_graphs_http": ["prefill_graphs_http"],
        THEIRS: ["http_compare", small],
    }


def of_two_gpus() -> Benches:
    """Return the benchmarks that need two GPUs."""
    large = str(suite.model_dir("8b"))
    return {
        "weight_sync": [
            "weight_sync",
            large,
            "--device=cuda",
            "--weight-staging-gb=18",
            "--name=gpu_weight_sync",
        ],
        "weight_sync_host": ["weight_sync", large, "--device=cuda", "--name=gpu_weight_sync_host"],
        "failover_tp2": [
            *("failover", "--model=0.6b", "--tp=2", "--device=cuda", "--kills=3", "--shadows=3"),
            *("--cold-starts=0", "--num-kv-tokens=262144", "--name=gpu_failover_0.6b_tp2"),
        ],
        "pd": ["pd", "--gpus=2"],
        "pd_against_two": ["pd", "--gpus=2", "--against-two"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; the exit code is 1 if one has failed or has missed a bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the benchmarks")
    parser.add_argument("--theirs", metavar="COMMAND", help=f"another engine's server, for {THEIRS}")
    args = parser.parse_args(arguments)
    benches = of_one_gpu() if args.gpus == 1 else of_two_gpus()
    if unknown := set(args.only or ()) - set(benches):
        parser.error(f"--only has {', '.join(sorted(unknown))}; choose from {', '.join(benches)}")
    rows, failed = [], False
    for name in args.only or benches:
        words = benches[name]
        if name == THEIRS and args.theirs:
            words = [*words, "--theirs", args.theirs]
        print(f"== {name}: python -m bench.{' '.join(words)}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", f"bench.{words[0]}", *words[1:]]).returncode
        failed |= code != 0
        result = {0: "its bars hold", 1: "missed a bar"}.get(code, f"failed with exit code {code}")
        rows.append([name, f"{time.monotonic() - began:.0f}", result])
    report.show("GPU benchmarks", ["benchmark", "seconds", "result"], rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
