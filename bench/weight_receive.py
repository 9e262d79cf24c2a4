"""Measures how fast weight updates arrive over gloo from a trainer process on this machine.

``python -m bench.weight_receive``: SmolLM2's 270 MB in 73 buckets, in both formats, against a receiver of
plain torch, which runs one blocking broadcast after the other into one buffer and keeps nothing; and the copy
alone.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from segue.messages.weight_operations import Bucket, Group, Manifest
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.receiver import Receiver

TRAINER = Path(__file__).resolve().parents[1] / "tests/weight_update/trainer.py"
SECONDS = 120.0


class Copy:
    """A sink that copies each received tensor into one buffer."""

    def __init__(self, kept: torch.Tensor) -> None:
        self._kept, self._end = kept, 0

    def direct(self, name: str) -> torch.Tensor | None:
        return None

    def store(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.reshape(-1).view(torch.uint8)
        self._kept[self._end : self._end + len(data)].copy_(data)
        self._end += len(data)

    def prepare(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Callable[[], None]:
        """Return the function that stores all tensors of a bucket once their bytes have arrived."""

        def store_all() -> None:
            for name, tensor in tensors:
                self.store(name, tensor)

        return store_all


def receive(group: JoinedGroup, buckets: list[Any], kept: torch.Tensor, flattened: bool) -> None:
    """Receive one update by the engine's own `Receiver` and copy each tensor into `kept`.

    `buckets`: (name, dtype, shape) of each tensor of each bucket. With `flattened`, each bucket is one
    broadcast, else each tensor.
    """
    sink, ended = Copy(kept), threading.Event()
    errors: list[str | None] = []

    def done(error: str | None) -> None:
        errors.append(error)
        ended.set()

    columns = [[list(column) for column in zip(*bucket, strict=True)] for bucket in buckets]
    manifest = Manifest(
        group_name=group.group.name,
        buckets=[Bucket(names=names, dtypes=dtypes, shapes=shapes) for names, dtypes, shapes in columns],
        flattened=flattened,
    )
    Receiver(group, manifest, sink, on_ready=lambda: None, on_progress=lambda *_: None, on_done=done)
    assert ended.wait(SECONDS)
    assert errors == [None], errors


def receive_plainly(group: JoinedGroup, buckets: list[Any], kept: torch.Tensor, flattened: bool) -> None:
    """Receive the same broadcasts one after the other by torch alone, and keep nothing, for comparison."""
    sizes = [[2 * torch.Size(shape).numel() for _, _, shape in bucket] for bucket in buckets]
    messages = (
        [sum(bucket) for bucket in sizes] if flattened else [size for bucket in sizes for size in bucket]
    )
    receive_buffer = torch.empty(max(messages), dtype=torch.uint8)
    options = dist.BroadcastOptions()
    for size in messages:
        group.process_group.broadcast([receive_buffer[:size]], options).wait()


def main() -> None:
    """Start a trainer process, connect to it and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=270)
    parser.add_argument("--buckets", type=int, default=73)
    parser.add_argument("--tensors", type=int, default=4, help="tensors per bucket")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    numel = args.megabytes * 1_000_000 // (2 * args.buckets * args.tensors)
    buckets = [
        [(f"{bucket}.{number}", "bfloat16", [numel]) for number in range(args.tensors)]
        for bucket in range(args.buckets)
    ]
    num_bytes = 2 * numel * args.buckets * args.tensors
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as trainer:
        address = f"{place}/socket"
        process = subprocess.Popen([sys.executable, str(TRAINER), address], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline()
            trainer.settimeout(SECONDS)
            trainer.connect(address)
            run(trainer.makefile("rw"), buckets, num_bytes, args.rounds)
        finally:
            process.kill()
            process.wait()


def run(trainer: Any, buckets: list[Any], num_bytes: int, rounds: int) -> None:
    """Measure all ways to receive and print the best of `rounds` each.

    `trainer` is a file of lines of JSON: commands to the trainer process and its answers. The broadcasts
    begin 0.05 s after the command, so that this side is ready first; that time is not counted.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = Group(
        name="bench",
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        backend="gloo",
    )
    kept = torch.ones(num_bytes, dtype=torch.uint8)
    one = torch.ones(num_bytes // len(buckets), dtype=torch.uint8)
    began = time.perf_counter()
    for start in range(0, num_bytes - len(one) + 1, len(one)):
        kept[start : start + len(one)].copy_(one)
    print(f"the copy alone: {time.perf_counter() - began:.3f} s")
    groups = Groups(torch.device("cpu"))
    trainer.readline()
    command(trainer, do="host", port=port, name="bench", world_size=2)
    groups.wait(groups.start(group, 0, SECONDS), SECONDS)
    trainer.readline()
    joined = groups.get("bench")
    assert joined is not None
    ways: dict[str, Callable[..., None]] = {"Receiver": receive, "plain torch": receive_plainly}
    for flattened in (True, False):
        command(trainer, do="make", buckets=buckets, flattened=flattened)
        trainer.readline()
        for name, way in ways.items():
            best, cpu = float("inf"), 0.0
            for _ in range(rounds):
                command(trainer, do="send", name="bench", after=0.05)
                began, used = time.perf_counter(), time.process_time()
                way(joined, buckets, kept, flattened)
                seconds = time.perf_counter() - began - 0.05
                if seconds < best:
                    best, cpu = seconds, time.process_time() - used
                json.loads(trainer.readline())
            wire = "one broadcast per bucket" if flattened else "one broadcast per tensor"
            print(f"{wire:26}{name:12}{best:7.3f} s {num_bytes / best / 1e9:6.2f} GB/s, {cpu:.3f} s of CPU")
    groups.close()


def command(trainer: Any, **fields: Any) -> None:
    trainer.write(json.dumps(fields) + "\n")
    trainer.flush()


if __name__ == "__main__":
    main()
