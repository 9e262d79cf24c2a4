"""KV memory of the service on a GPU: zeroed when new, and handed on behind the kernels of a killed writer."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gms import running as gms

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(200)]

POOL = (3 << 29) + (1 << 20)  # a slab of 1 GiB, and one with the rest

# Says the least and the greatest byte of what it is granted, and then writes without end.
ENGINE = """
import sys, time, torch
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.memory.cuda_driver import device_uuids
from segue.model_runner.service_kv import ServiceKVMemory
directory, name, pool, value = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
device = torch.device("cuda:0")
torch.cuda.set_device(device)
memory = ServiceKVMemory(device)
kv = memory.take_kv(pool, 1 << 20)
target = GmsTarget(directory=directory, engine=name, device=device_uuids()[0], connect_s=60.0)
client = GmsClient(target)
print("ready", flush=True)
for line in sys.stdin:
    if line == "wake\\n":
        epoch = client.claim()
        client.fence(epoch, kills=True)
        began = time.monotonic()
        memory.lease(client, epoch, 20.0)
        torch.cuda.synchronize()
        print(f"leased after {1e3 * (time.monotonic() - began):.1f} ms", file=sys.stderr)
    if line == "write\\n":
        kv.fill_(value)
        torch.cuda.synchronize()
        print("writes", flush=True)
        while True:
            for _ in range(100):
                kv.fill_(value)
            torch.cuda.synchronize()
    print(int(kv.min()), int(kv.max()), flush=True)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    service = gms.start(tmp_path / "d", "--devices", "all")
    try:
        gms.target(tmp_path / "d", tag="watch").close()
        yield tmp_path / "d"
    finally:
        gms.end(service)


def start(directory: Path, name: str, value: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ENGINE, str(directory), name, str(POOL), str(value)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(engine: subprocess.Popen[str], line: str) -> str:
    assert engine.stdin is not None and engine.stdout is not None
    if line:
        print(line, file=engine.stdin, flush=True)
    return engine.stdout.readline().strip()


def test_a_killed_writer_is_over_before_its_memory_is_handed_on(directory: Path) -> None:
    old, new = start(directory, "a", 7), start(directory, "b", 9)
    try:
        assert say(old, "") == say(new, "") == "ready"
        assert say(old, "wake") == "0 0", "memory that is new is zeroed"
        assert say(old, "write") == "writes"
        old.send_signal(signal.SIGKILL)  # in the middle of a kernel, with many behind it
        assert say(new, "wake") == "7 7", "what it has left"
        assert old.wait(gms.DEADLINE_S) == -signal.SIGKILL
        assert say(new, "write") == "writes"
        with gms.target(directory, tag="watch") as client:
            assert [row["phase"] for row in client.status()["kv"]] == ["leased"]
            assert sum(client.status()["devices"].values()) == -(-POOL // (2 << 20)) * (2 << 20)
    finally:
        for each in (old, new):
            each.kill()
            each.communicate()
    with gms.target(directory, tag="watch") as client:
        gms.until(lambda: sum(client.status()["devices"].values()) == 0, "the memory is given back")
