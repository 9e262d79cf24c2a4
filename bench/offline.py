"""The pinned offline workload on Segue, figure by figure as on its peers.

    python -m bench.offline /path/to/peer_suite.py 0.6b [--option value …]

The suite brings the prompts, the seeds and the clock; this adapter only runs the batches, on a default
`segue.Engine` without prefix cache, with a context of 4096 and 256 running requests.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from bench import report
from segue import Engine


def load_suite(path: Path) -> ModuleType:
    """The suite as a module."""
    spec = importlib.util.spec_from_file_location("peer_suite", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run the suite on one size."""
    suite, size = load_suite(Path(sys.argv[1])), sys.argv[2]
    options: dict[str, Any] = dict(pair.split("=") for pair in sys.argv[3:])
    begun = time.perf_counter()
    with Engine(
        suite.model_dir(size),
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        max_running_requests=256,
        disable_prefix_cache=True,
        **options,
    ) as engine:
        print(f"RESULT segue {size} ready seconds={time.perf_counter() - begun:.1f}", flush=True)

        def generate(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> list[int]:
            params = [
                {"temperature": temperature, "max_new_tokens": count, "ignore_eos": True}
                for count in max_tokens
            ]
            replies = engine.generate(input_ids=prompts, sampling_params=params)
            return [len(reply["output_ids"]) for reply in replies]

        printed = _Tee(sys.stdout)
        with contextlib.redirect_stdout(printed):
            suite.suite("segue", size, generate)
    lines = [line.removeprefix("RESULT ") for line in printed.getvalue().splitlines()]
    print(f"written to {report.save(f'gpu_offline_{size}', {'results': lines})}")


class _Tee(io.StringIO):
    """Keeps what passes through to a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


if __name__ == "__main__":
    main()
