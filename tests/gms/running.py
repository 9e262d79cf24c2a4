"""A real memory service in a process of its own, and manifests for small weights."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.gms.manifest import SourceFile, TensorPlace, WeightsIdentity, WeightsManifest
from segue.gms.supervisor import GMS_COMMAND
from tests.support.child import start_child

SLAB = 2 << 20
DEADLINE_S = 30.0


def start(directory: Path, *options: str, command: str = "serve") -> subprocess.Popen[bytes]:
    """Start `segue gms …`; what it prints goes to the test's output."""
    words = [*GMS_COMMAND, command, "--gms-dir", str(directory), *options]
    return start_child(words, start_new_session=True)


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    process.send_signal(number)
    process.wait(DEADLINE_S)


@contextmanager
def running(directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service that answers."""
    process = start(directory, *("--devices", "cpu"), *options)
    try:
        target(directory, tag="watch").close()
        yield process
    finally:
        if process.poll() is None:
            end(process)


def target(directory: Path, **fields: object) -> GmsClient:
    """Return a client."""
    return GmsClient(GmsTarget(directory=str(directory), connect_s=DEADLINE_S, **fields))  # type: ignore[arg-type]


def manifest(
    num_slabs: int = 1, *, rank: int = 0, tp_size: int = 1, model: str = "m", digests: tuple[int, ...] = ()
) -> WeightsManifest:
    tensors = [TensorPlace(f"t{n}", n, 0, (SLAB // 2,), "bfloat16") for n in range(num_slabs)]
    identity = WeightsIdentity(
        model=model,
        config_sha256="c",
        dtype="bfloat16",
        tp_rank=rank,
        tp_size=tp_size,
        slab_sizes=[SLAB] * num_slabs,
        tensors=tensors,
        source=[SourceFile("model.safetensors", num_slabs * SLAB, "1:2")],
    )
    return WeightsManifest(identity=identity, digests=list(digests))


def descriptors_of(process: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def num_memfds(pid: int) -> int:
    """The memfds that a process has; files that it opens and closes meanwhile do not count."""
    folder, names = f"/proc/{pid}/fd", list[str]()
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"{folder}/{number}"))
    return sum("memfd:" in name for name in names)


def until(holds: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def refusal(call: Callable[[], object]) -> MemoryServiceError:
    """Return the error with which a call is refused."""
    try:
        call()
    except MemoryServiceError as error:
        return error
    raise AssertionError("the call is not refused")
