"""Kills the engine that serves again and again, and measures the processes that live on.

    python -m bench.failover_soak [--name=cpu_failover_soak] [--kills=500] [--warm-kills=50] [--every=25]
                                  [--shadows=3] [--model=MODEL] [--option=value …]
    python -m bench.failover_soak --name=gpu_failover_soak --kills=20 --warm-kills=5 --every=5 --model=…
                                  --device=cuda

Beside ``segue serve --shadows N`` with the other options, whose engines are killed, it runs one more engine
of the cohort that stands by all the time, because only a call would wake it. All have their weights from the
memory service of the pod. Each kill comes in the middle of replies, which must all go on; in turn it hits the
engine's front, its workers, and both. Every few kills, once the pod is whole again, it notes the descriptors,
the mappings and the memory (PSS) of each process that has never been killed: the supervisor, the router, the
memory service and its holder, and the front and the worker of the engine that stands by. The first kills
fill caches and do not count. Beside a GPU it also notes how much of its memory is in use.

The bars: no more descriptors, at most 1 % and 2 more mappings, and at most 2 % and 1 MiB more memory at the
end than at the beginning, and at most 32 MiB more of the GPU's. What a process takes for its caches and
rings, and its allocator for the gaps between, it takes once: of twelve samples or more, from the middle to
the end there may be no mapping more, and at most 256 KiB more that is not mapped from files.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from string import ascii_lowercase
from typing import Any, get_args

from bench import report
from bench.failover import model_options, one_kill, quantiles
from segue.children import import_path
from segue.cluster.children import SEGUE
from segue.cluster.pod_process import COHORT, EnginePart, PodProcess
from segue.cluster.processes import die_with
from segue.failover.standby import sign_of
from segue.gms.supervisor import GMS_COMMAND
from segue.launch.processes import WORKER_COMMAND

MOST_MORE_OF_GPU_MIB = 32
MOST_LATE_KIB = 256  # from the middle to the end
WHOLE_S, START_S, STOP_S = 120.0, 120.0, 20.0
STREAMS, TOKENS = 3, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSize:
    """What a process takes."""

    descriptors: int
    mappings: int
    pss_kib: int  # its memory; what several processes share is divided between them
    # The part of it that is mapped from files, as code is: it changes when other processes that run the same
    # code start or end, and has no bar of its own.
    pss_file_kib: int


Sizes = Mapping[str, ProcessSize]  # by the names of the processes


def size_of(pid: int) -> ProcessSize:
    """Return what a process takes at the moment."""
    process = Path(f"/proc/{pid}")
    rollup = (process / "smaps_rollup").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup[1:]}
    return ProcessSize(
        descriptors=len(os.listdir(process / "fd")),
        mappings=len((process / "maps").read_text().splitlines()),
        pss_kib=kib["Pss"],
        pss_file_kib=kib["Pss_File"],
    )


def growth(first: Sequence[Sizes], last: Sequence[Sizes]) -> dict[str, ProcessSize]:
    """Return how much each process has grown, from the medians of samples at the beginning and at the end."""

    def median(samples: Sequence[Sizes], name: str, field: str) -> int:
        return round(statistics.median(getattr(sizes[name], field) for sizes in samples))

    fields = ProcessSize.__dataclass_fields__
    return {
        name: ProcessSize(
            **{field: median(last, name, field) - median(first, name, field) for field in fields}
        )
        for name in first[0]
    }


def leaks(first: Sizes, grown: Mapping[str, ProcessSize]) -> list[str]:
    """Return what has grown by more than its bar."""
    found = []
    for name, more in grown.items():
        bars = {
            "descriptors": 0,
            "mappings": 2 + first[name].mappings // 100,
            "pss_kib": 1024 + first[name].pss_kib // 50,
        }
        for field, limit in bars.items():
            if getattr(more, field) > limit:
                found.append(f"{name}: {getattr(more, field)} more {field}, and {limit} are allowed")
    return found


def late_growth(samples: Sequence[Sizes], num_each: int) -> dict[str, ProcessSize]:
    """Return how much each process has grown from the middle to the end; {}: there are too few samples."""
    if len(samples) < 4 * num_each:
        return {}
    middle = len(samples) // 2
    return growth(samples[middle : middle + num_each], samples[-num_each:])


def late_leaks(grown: Mapping[str, ProcessSize]) -> list[str]:
    """Return what still grows where all that is taken once has been taken."""
    found = []
    for name, more in grown.items():
        kib = more.pss_kib - more.pss_file_kib
        if more.mappings > 0 or kib > MOST_LATE_KIB:
            text = f"{more.mappings} more mappings and {kib} KiB more since the middle"
            found.append(f"{name}: {text}, and none and {MOST_LATE_KIB} KiB are allowed")
    return found


def descendants(root: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes below this one, with the words of their command lines."""
    for file in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for pid in map(int, file.read_text().split()):
                yield pid, Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                yield from descendants(pid)


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of ``segue`` until the block ends."""
    process = subprocess.Popen(
        [*SEGUE, *words],
        env=os.environ | import_path(os.environ),
        stdout=subprocess.DEVNULL,
        preexec_fn=partial(die_with, os.getpid()),
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SoakedPod:
    """A pod whose engines are killed, and beside it an engine that only stands by."""

    def __init__(self, options: Sequence[str], shadows: int, stack: ExitStack) -> None:
        """Start all of it, and end it with ``stack``."""
        options = ["--device=cpu", "--deterministic", *options]  # of both, so that they have equal weights
        self.pod = stack.enter_context(PodProcess(options, shadows=shadows))
        self._engines = [f"engine-{letter}" for letter in ascii_lowercase[: 1 + shadows]]
        directory = self.pod.failover_dir
        place = [f"--failover-dir={directory}", f"--cohort={COHORT}", "--engine-id=bystander"]
        place += [f"--gms-dir={directory.with_name('gms')}"]
        bystander = stack.enter_context(
            command(
                *("serve", "--shadow-mode", "--wake=manual", "--port=0", "--system-port=0"),
                *("--log-level=warning", *place, *options),
            )
        )
        self._pids = {"supervisor": self.pod.process.pid, "bystander": bystander.pid}
        deadline = time.monotonic() + START_S
        while len(self._pids) < 6:
            if time.monotonic() >= deadline or bystander.poll() is not None:
                sys.exit(f"not all processes have started: {self._pids}")
            self._find(bystander.pid)
            time.sleep(0.1)

    def _find(self, bystander: int) -> None:
        """Note the processes that others have started."""
        for pid, words in descendants(self.pod.process.pid):
            if GMS_COMMAND[-1] in words:
                self._pids["gms holder" if "hold" in words else "gms service"] = pid
            elif "router" in words:
                self._pids["router"] = pid
        for pid, words in descendants(bystander):
            if WORKER_COMMAND[-1] in words:
                self._pids["bystander's worker"] = pid

    def sizes(self) -> Sizes:
        """Return what each process takes that lives on.

        Raises:
            SystemExit: one of them has ended.
        """
        sizes = {}
        for name, pid in self._pids.items():
            try:
                sizes[name] = size_of(pid)
            except FileNotFoundError:
                sys.exit(
                    f"the {name} (process {pid}), which nobody killed, has ended:\n" + "\n".join(self.pod.log)
                )
        return sizes

    def wait_until_whole(self) -> None:
        """Wait until every engine serves or stands by."""
        deadline = time.monotonic() + WHOLE_S
        while sum(self._stands_by(engine) for engine in self._engines) < len(self._engines) - 1:
            if time.monotonic() >= deadline:
                sys.exit(f"not all engines stand by after {WHOLE_S:g} s:\n" + "\n".join(self.pod.log))
            time.sleep(0.05)

    def _stands_by(self, engine: str) -> bool:
        sign = sign_of(self.pod.failover_dir, COHORT, engine)
        if not sign.try_acquire():
            return True
        sign.release()
        return False


def soak(
    options: Sequence[str], *, kills: int, shadows: int, warm_kills: int = 50, every: int = 25
) -> dict[str, Any]:
    """Kill engines so often; returns the figures, with the bars that do not hold under ``leaks``.

    Raises:
        SystemExit: a stream failed, an engine did not start, or there would be nothing to compare.
    """
    if kills < warm_kills + every:
        needed = f"--warm-kills + --every = {warm_kills} + {every}"
        sys.exit(f"--kills={kills}: to compare two samples it takes at least {needed}")
    samples: list[Sizes] = []
    of_gpu: list[int] = []
    seconds: list[float] = []
    rng = random.Random(0)
    with ExitStack() as stack:
        soaked = SoakedPod(options, shadows, stack)
        began_at = time.monotonic()
        for number, part in zip(range(1, kills + 1), cycle(get_args(EnginePart)), strict=False):
            soaked.pod.wait_for_standby()
            seconds += one_kill(soaked.pod, STREAMS, TOKENS, rng, part)[1]
            if number == kills or (number >= warm_kills and number % every == 0):
                soaked.wait_until_whole()
                samples.append(soaked.sizes())
                if "--device=cuda" in options:
                    of_gpu.append(report.gpu_memory_mib())
                told = ", ".join(f"{name} {size.pss_kib >> 10} MiB" for name, size in samples[-1].items())
                print(f"{number} kills, {time.monotonic() - began_at:.0f} s: {told}", flush=True)
        took_s = time.monotonic() - began_at
        files = {
            "failover": len(list(soaked.pod.failover_dir.rglob("*"))),
            "run": len(list(soaked.pod.directory.glob("segue-*"))),
        }
    num_each = max(1, min(3, len(samples) // 2))
    grown = growth(samples[:num_each], samples[-num_each:])
    late = late_growth(samples, num_each)
    found = leaks(samples[0], grown) + late_leaks(late)
    if of_gpu:
        more = statistics.median(of_gpu[-num_each:]) - statistics.median(of_gpu[:num_each])
        if more > MOST_MORE_OF_GPU_MIB:
            found.append(f"GPU: {more:g} MiB more are in use, and {MOST_MORE_OF_GPU_MIB} are allowed")
    return {
        "options": list(options),
        "kills": kills,
        "shadows": shadows,
        "seconds": round(took_s, 1),
        "num_streams_that_went_on": len(seconds),
        "next_token_ms": quantiles(seconds),
        "files": files,
        "first": {name: asdict(size) for name, size in samples[0].items()},
        "last": {name: asdict(size) for name, size in samples[-1].items()},
        "growth": {name: asdict(size) for name, size in grown.items()},
        "late_growth": {name: asdict(size) for name, size in late.items()},
        "samples": [[asdict(size) | {"process": name} for name, size in each.items()] for each in samples],
        "GPU memory in use, MiB": of_gpu,
        "leaks": found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="cpu_failover_soak", help="of the file in bench/results")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--warm-kills", type=int, default=50, help="that do not count")
    parser.add_argument("--every", type=int, default=25, help="kills from one sample to the next")
    parser.add_argument("--shadows", type=int, default=3)
    parser.add_argument("--model", default="tiny", help="tiny, with dummy weights, or as in segue serve")
    args, options = parser.parse_known_args()
    with ExitStack() as stack:
        figures = soak(
            [*model_options(args.model, stack), *options],
            kills=args.kills,
            shadows=args.shadows,
            warm_kills=args.warm_kills,
            every=args.every,
        )
    path = report.save(args.name, figures)
    rows = [
        (name, *(f"{figures['first'][name][field]} {more[field]:+}" for field in more))
        for name, more in figures["growth"].items()
    ]
    report.show(
        f"{args.kills} kills: first, and growth", ("process", "descriptors", "mappings", "PSS, KiB"), rows
    )
    for leak in figures["leaks"]:
        print(leak)
    print(f"took {figures['seconds']:.0f} s; wrote {path}")
    return 1 if figures["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
