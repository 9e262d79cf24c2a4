"""Measures how long weights and tokenizer take to load from the GGUF, with an empty and with a full cache.

Each load has a process of its own. The clock starts after torch is imported, and the measured time includes
finding the model, converting it if the cache is empty, filling the arena in bfloat16, and loading the
tokenizer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import report
from bench.workload import bundled_model

BARS_S = {"first": 6.0, "later": 3.0}


def load(model: Path, cache_dir: Path) -> float:
    """Load once in this process, and return the seconds."""
    import torch

    from segue.checkpoint.load import load_weights
    from segue.checkpoint.source import resolve
    from segue.distributed.info import TPInfo
    from segue.frontend.tokenizer import Tokenizer
    from segue.memory.rank_memory import PrivateMemory
    from segue.models.decoder import build_model

    began = time.perf_counter()
    source = resolve(str(model), "auto", cache_dir)
    skeleton = build_model(source.config, dtype=torch.bfloat16)
    memory = PrivateMemory(torch.device("cpu"))
    arena = load_weights(skeleton, source.config, source, TPInfo(), memory, torch.bfloat16, progress=False)
    assert source.tokenizer_directory is not None
    Tokenizer.load(source.tokenizer_directory)
    seconds = time.perf_counter() - began
    assert arena.num_bytes > 0
    return seconds


def load_in_a_process(model: Path, cache_dir: Path) -> float:
    """Load once in a process of its own, and return the seconds."""
    command = [sys.executable, "-m", "bench.load_time", "--cache-dir", str(cache_dir), "--model", str(model)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cache_dir is not None:
        print(load(args.model, args.cache_dir))
        return 0
    found: dict[str, list[float]] = {"first": [], "later": []}
    for _ in range(args.repetitions):
        with tempfile.TemporaryDirectory(prefix="segue-bench-") as cache_dir:
            for seconds in found.values():
                seconds.append(round(load_in_a_process(bundled_model(), Path(cache_dir)), 3))
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    rows = [[name, f"{medians[name]:.2f}", f"{BARS_S[name]:g}"] for name in found]
    report.show("seconds to load weights and tokenizer", ["", "median", "bar"], rows)
    figures = {"unit": "s", "medians": medians, "bars": BARS_S, "repetitions": found}
    print(f"written to {report.save('load_time', figures)}")
    return 0 if all(medians[name] <= BARS_S[name] for name in found) else 1


if __name__ == "__main__":
    sys.exit(main())
