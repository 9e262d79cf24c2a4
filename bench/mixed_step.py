"""Measures what a chunk of a prompt costs the requests that decode in the same step.

    python -m bench.mixed_step MODEL [--load-format dummy …]

Compares steps of 255 decode rows and a prompt of 256 tokens with steps of 256 decode rows. As in serving, the
next step is launched before the last one's results are read. Each step has a new prompt, which ends with it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench import report
from segue.bench.profile import StepBench
from segue.config import EngineConfig

BAR_MS = 1.0  # by which the mixed step may exceed the decode step
ROWS, CHUNK, CONTEXT = 256, 256, 640


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    bench = StepBench(
        EngineConfig(
            model=args.model,
            load_format=args.load_format,
            dtype="bfloat16",
            max_model_len=4096,
            max_running_requests=ROWS + 1,  # the prompt of the step before is still running
        )
    )
    decode, mixed = list[float](), list[float]()
    for _ in range(args.repetitions):
        decode.append(bench.decode(ROWS, CONTEXT).milliseconds)
        mixed.append(bench.decode(ROWS - 1, CONTEXT, CHUNK).milliseconds)
    bench.close()
    pure, both = statistics.median(decode), statistics.median(mixed)
    rows = [
        [f"{ROWS} decode rows", f"{pure:.3f}", ""],
        [f"{ROWS - 1} and a prompt of {CHUNK}", f"{both:.3f}", f"{pure + BAR_MS:.3f}"],
    ]
    report.show(f"ms per step, {CONTEXT} tokens per row", ["", "median", "bar"], rows)
    figures = {
        "unit": "ms",
        "model": Path(args.model).name,
        "context": CONTEXT,
        "decode": decode,
        "mixed": mixed,
        "more": both - pure,
        "bar": BAR_MS,
    }
    print(f"written to {report.save('gpu_mixed_step', figures)}")
    return 0 if both <= pure + BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
