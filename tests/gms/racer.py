"""Engines that race for weights, each a process: a schedule per line of input, results per line of output.

The processes are forked from this one, which has everything imported, so that they really race.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from segue.gms.client import GmsClient
from segue.gms.messages import WeightsGranted
from segue.memory.memfd import MemfdVMM
from segue.memory.window import MemoryWindow
from tests.gms.running import SLAB, manifest, target

BLOCK = SLAB // 100


def contents(model: str, rank: int, slab: int) -> bytes:
    """The bytes that every engine would load."""
    seed = hashlib.sha256(f"{model}/{rank}/{slab}".encode()).digest()
    return (seed * (SLAB // len(seed) + 1))[:SLAB]


def digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest())


class RacingRank:
    """One rank of an engine."""

    def __init__(self, directory: Path, schedule: dict[str, Any], engine: int, rank: int) -> None:
        self.model: str = schedule["model"]
        self.size: int = schedule["tp"]
        self.num_slabs: int = schedule["slabs"]
        self.rank = rank
        spec = schedule["engines"][engine]
        self.dies: dict[str, Any] | None = (
            spec["dies"] if spec["dies"] and spec["dies"]["rank"] == rank else None
        )
        time.sleep(spec["delay_s"])
        self.client: GmsClient = target(
            directory, cohort=schedule["cohort"], engine=f"e{engine}", rank=rank, size=self.size
        )
        self.vmm = MemfdVMM()
        self.window = MemoryWindow(self.vmm, self.num_slabs * SLAB)
        self.manifest = manifest(self.num_slabs, rank=rank, tp_size=self.size, model=self.model)

    def die_at(self, point: str) -> None:
        if self.dies is not None and self.dies["point"] == point:
            os.write(1, f"died {time.time()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def map(self, sizes: list[int], descriptors: list[int], *, writable: bool) -> None:
        for number, (size, descriptor) in enumerate(zip(sizes, descriptors, strict=True)):
            slab = self.vmm.adopt(descriptor, size)
            os.close(descriptor)
            self.window.map(number * SLAB, slab, writable=writable)
            self.vmm.close(slab)

    def load(self, grant: WeightsGranted) -> None:
        """Fill the slabs, and seal them."""
        sizes = [SLAB] * self.num_slabs
        self.map(sizes, self.client.allocate(grant.lease, sizes), writable=True)
        digests = []
        for number in range(self.num_slabs):
            data = contents(self.model, self.rank, number)
            for percent in range(100):
                if number == self.num_slabs - 1:
                    self.die_at(f"{percent}%")
                start = percent * BLOCK
                end = SLAB if percent == 99 else start + BLOCK
                ctypes.memmove(self.window.address + number * SLAB + start, data[start:end], end - start)
            digests.append(digest(data))
            self.client.progress(grant.lease, (number + 1) * SLAB)
        for number in range(self.num_slabs):
            self.window.unmap(number * SLAB)
        loaded = manifest(
            self.num_slabs, rank=self.rank, tp_size=self.size, model=self.model, digests=tuple(digests)
        )
        self.client.seal(grant.lease, loaded)
        self.die_at("flip")

    def check(self, generation: int) -> None:
        """Map a committed generation to read, and compare its bytes with what every engine would load."""
        self.map(*self.client.export(generation, self.rank), writable=False)
        served = self.client.manifest(generation, self.rank)
        assert served.identity == self.manifest.identity
        for number, expected in enumerate(served.digests):
            data = ctypes.string_at(self.window.address + number * SLAB, SLAB)
            assert digest(data) == expected == digest(contents(self.model, self.rank, number)), "other bytes"


def engine(directory: Path, schedule: dict[str, Any], number: int) -> str:
    """Run all ranks of an engine, each in a process of its own; returns what it did."""
    others = []
    for rank in range(1, schedule["tp"]):
        commands, replies = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(commands[1])
            other_rank(directory, schedule, number, rank, commands[0], replies[1])
        os.close(replies[1])
        os.close(commands[0])
        others.append((commands[1], replies[0]))

    def tell(text: str) -> bool:
        """Tell the other ranks to go on, and wait until they have; False: one has died."""
        for command, _ in others:
            os.write(command, text.encode())
        return all(os.read(reply, 1) == b"+" for _, reply in others)

    rank = RacingRank(directory, schedule, number, 0)
    grant = rank.client.ask(rank.manifest, wait_s=60)
    if grant.mode == "rw":
        rank.load(grant)
        if not tell(f"{grant.lease} "):
            return "lost a rank"
        rank.die_at("commit")
        rank.client.commit(grant.lease)
    elif not tell(f"{grant.lease} "):
        return "lost a rank"
    rank.check(grant.generation)
    return ("loaded" if grant.mode == "rw" else "imported") if tell("check ") else "lost a rank"


def other_rank(
    directory: Path, schedule: dict[str, Any], number: int, rank: int, commands: int, replies: int
) -> None:
    """Run a rank that is not the first one; the process ends here."""
    try:
        own = RacingRank(directory, schedule, number, rank)
        lease = os.read(commands, 100).split()[0]
        grant = own.client.join(int(lease))
        if grant.mode == "rw":
            own.load(grant)
        os.write(replies, b"+")
        if os.read(commands, 100):
            own.check(grant.generation)
            os.write(replies, b"+")
    except IndexError:  # rank 0 has died
        pass
    finally:
        os._exit(0)


def run(directory: Path, schedule: dict[str, Any]) -> list[str]:
    """Run a schedule; returns what each engine did."""
    children = []
    for number in range(len(schedule["engines"])):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.dup2(writing, 1)
            os.close(writing)
            os.close(reading)
            result = "failed"
            try:
                result = engine(directory, schedule, number)
            finally:
                os.write(1, result.encode())
                os._exit(0)
        os.close(writing)
        children.append(reading)
    results = []
    for reading in children:
        with os.fdopen(reading, "rb") as file:
            results.append(file.read().decode().strip())
    for _ in children:
        os.wait()
    return results


def main() -> None:
    directory = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(directory, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
