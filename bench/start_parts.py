"""Measures what the start of an engine on a GPU consists of: calls of Triton, of CUDA's graphs, and of ours.

    python -m bench.start_parts [0.6b] [--option=value …]

An embedded engine starts twice, each time in a process of its own: without compiled kernels, and with. Parts
that run in several threads add up to more than the time that passes. The second start also captures its
graphs again: as it did, with an eager run of all layers and a wait before each capture, with Triton's own
launcher, and with a thread that instantiates a graph while the next one is captured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from bench import suite
from bench.starting import WORKLOAD, age, engine_options


class Parts:
    """Seconds and calls of functions, by name; calls inside of others count in both."""

    def __init__(self) -> None:
        """Begin with none."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def watch(self, owner: Any, attribute: str, name: str | None = None) -> None:
        """Count the calls of a function from now on."""
        function, name = getattr(owner, attribute), name or attribute

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                with self._lock:
                    self.seconds[name] += time.perf_counter() - began
                    self.calls[name] += 1

        setattr(owner, attribute, timed)

    def show(self, title: str) -> None:
        """Print what was counted since the last call, the longest first."""
        print(f"{title}:")
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            count = self.calls[name]
            print(f"  {name:42} {count:6} calls {seconds:8.3f} s {seconds / count * 1e3:9.3f} ms each")
        self.seconds.clear()
        self.calls.clear()


def one_start(size: str, options: dict[str, Any], *, again: bool) -> None:
    """Start an engine in this process, and print its parts."""
    import torch
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from segue import Engine
    from segue.kernels import compilations
    from segue.model_runner import graphs, startup
    from segue.model_runner.cuda_executor import CUDAExecutor

    print(f"imported after {age():.2f} s")
    parts = Parts()
    parts.watch(JITFunction, "run", "Triton: launch")
    parts.watch(compilations, "_load", "Triton: compile and load, in a thread")
    parts.watch(CompiledKernel, "__init__", "Triton: read a kernel")
    parts.watch(CompiledKernel, "_init_handles", "Triton: load to the device")
    parts.watch(triton.backends.nvidia.driver, "compile_module_from_src", "Triton: C code that launches")
    parts.watch(triton.compiler, "compile", "Triton: compile or find")
    parts.watch(torch.cuda.CUDAGraph, "capture_begin", "graph: begin")
    parts.watch(torch.cuda.CUDAGraph, "capture_end", "graph: end and instantiate")
    parts.watch(torch.cuda.CUDAGraph, "replay", "graph: first replay")
    parts.watch(graphs.GraphMeter, "read", "graph: read the meter")
    parts.watch(CUDAExecutor, "run", "a step of the list of kernels")
    parts.watch(CUDAExecutor, "_run_forward", "forward, eager or captured")
    parts.watch(CUDAExecutor, "_run_decode", "decode, eager or captured")
    parts.watch(startup, "free_garbage", "collect garbage")
    warm_up, capture = CUDAExecutor.warm_up, CUDAExecutor.capture

    def warmed(executor: Any, *args: Any, **keywords: Any) -> Any:
        parts.show("before the kernels")
        found = warm_up(executor, *args, **keywords)
        parts.show("kernels")
        return found

    def captured(executor: Any, *args: Any) -> Any:
        left_out = capture(executor, *args)
        parts.show("graphs")
        variants: dict[str, Callable[[], Any]] = {
            "as it is": nullcontext,
            "with eager runs of all layers": lambda: all_layers(executor),
            "with Triton's own launcher": lambda: patched(graphs, "lean_launches", nullcontext),
            "instantiated by another thread": instantiated_beside,
        }
        for name, variant in variants.items() if again else ():
            for kind in executor._graphs.values():
                kind._graphs.clear()
            began = time.perf_counter()
            try:
                with variant():
                    capture(executor, lambda: 0, 1)
                text = f"{time.perf_counter() - began:.2f} s"
            except Exception as error:
                text = f"failed: {error!r}"
            parts.show(f"graphs again, {name}: {text}")
        return left_out

    owner: Any = CUDAExecutor
    owner.warm_up, owner.capture = warmed, captured
    with Engine(suite.model_dir(size), embedded=True, **{**WORKLOAD, **options}) as engine:
        print(f"ready after {age():.2f} s")
        steps = engine.get_server_info()["decided"]["init_steps"]
        print("; ".join(f"{step['name']} {step['seconds']:.2f} s" for step in steps))


@contextmanager
def all_layers(executor: Any) -> Iterator[None]:
    """Run all layers before each capture, and wait for the device before it begins."""
    import torch

    begin = torch.cuda.CUDAGraph.capture_begin

    def wait(graph: Any, **options: Any) -> None:
        torch.cuda.current_stream().synchronize()
        begin(graph, **options)

    with ExitStack() as stack:
        stack.enter_context(patched(torch.cuda.CUDAGraph, "capture_begin", wait))
        for kind in executor._graphs.values():
            stack.enter_context(patched(kind, "shortened", nullcontext))
        yield


@contextmanager
def instantiated_beside() -> Iterator[None]:
    """Instantiate each graph in a thread while the next one is captured, which then replays it first."""
    import torch

    waiting: list[Any] = []
    original: Any = torch.cuda.CUDAGraph

    class Beside(torch.cuda.CUDAGraph):
        """A graph whose first replay waits until the next capture."""

        def __init__(self) -> None:
            super().__init__(keep_graph=True)  # type: ignore[call-arg]

        def capture_begin(self, *args: Any, **options: Any) -> None:
            upload()
            super().capture_begin(*args, **options)

        def capture_end(self) -> None:
            super().capture_end()
            self.done = thread.submit(super().instantiate)

        def replay(self) -> None:
            waiting.append(self)

    def upload() -> None:
        while waiting:
            graph = waiting.pop()
            graph.done.result()
            original.replay(graph)

    with ThreadPoolExecutor(1) as thread, patched(torch.cuda, "CUDAGraph", Beside):
        yield
        upload()
        torch.cuda.synchronize()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value while the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        usage="python -m bench.start_parts [SIZE] [--option=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", nargs="?", default="0.6b", choices=suite.SHAPES, help="of the model")
    parser.add_argument("--one", choices=("cold", "warm"), help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.one:
        one_start(args.size, engine_options(rest), again=args.one == "warm")
        return 0
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            print(f"--- {name}", flush=True)
            words = [sys.executable, "-m", "bench.start_parts", args.size, f"--one={name}", *rest]
            subprocess.run(words, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
