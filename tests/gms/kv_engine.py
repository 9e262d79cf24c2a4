"""A rank that has KV memory, as a process that can be killed: it writes, and says what it reads."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.gms.client_kv import KVGrant
from tests.gms.running import DEADLINE_S, SLAB
from tests.support.child import start_child


class Mapped:
    """A granted set, mapped to write; the descriptors are closed."""

    def __init__(self, grant: KVGrant) -> None:
        self.is_fresh = grant.is_fresh
        self.slabs = [
            mapped(descriptor, size) for descriptor, size in zip(grant.descriptors, grant.sizes, strict=True)
        ]
        self.journal = None if grant.journal is None else mapped(grant.journal, SLAB)

    def write(self, text: bytes) -> None:
        for each in [*self.slabs, *([] if self.journal is None else [self.journal])]:
            each[: len(text)] = text

    def read(self, num_bytes: int) -> list[bytes]:
        """The first bytes of each slab, and of the journal."""
        return [each[:num_bytes] for each in [*self.slabs, *([self.journal] if self.journal else [])]]


def mapped(descriptor: int, size: int) -> mmap.mmap:
    try:
        assert os.fstat(descriptor).st_size == size
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class KVEngine:
    """The process. Every call returns once the process has answered."""

    def __init__(self, directory: Path, name: str, **fields: Any) -> None:
        given = {"directory": str(directory), "engine": name, "connect_s": DEADLINE_S} | fields
        self.process = start_child(
            [sys.executable, "-m", "tests.gms.kv_engine", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, *words: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or '"ended"')

    def call(self, *words: Any) -> Any:
        self.send(*words)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


@contextmanager
def kv_engines(directory: Path, *names: str, **fields: Any) -> Iterator[list[KVEngine]]:
    """Run ranks, one of each name."""
    made = [KVEngine(directory, name, **fields) for name in names]
    try:
        assert [each.answer() for each in made] == ["connected"] * len(names)
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.communicate()


def main() -> None:
    client = GmsClient(GmsTarget(**json.loads(sys.argv[1])))
    print(json.dumps("connected"), flush=True)
    memory: Mapped | None = None
    epoch = 0
    for line in sys.stdin:
        found: Any = None
        match json.loads(line):
            case ["claim"]:
                found = epoch = client.claim()
            case [("ask" | "take") as word, given, num_slabs, journal_bytes, wait_s]:
                grant = client.ask_kv(
                    given, num_slabs * SLAB, slab_bytes=SLAB, journal_bytes=journal_bytes, wait_s=wait_s
                )
                memory = Mapped(grant)
                found = memory.is_fresh
                if word == "ask":
                    client.kv_prepared()
            case ["write", text]:
                assert memory is not None
                memory.write(text.encode())
            case ["read", num_bytes]:
                assert memory is not None
                found = [each.decode(errors="replace") for each in memory.read(num_bytes)]
            case ["leave"]:
                client.close()
            case ["again"]:
                client.close()
                client = GmsClient(GmsTarget(**json.loads(sys.argv[1]), epoch=epoch))
            case ["release"]:
                memory = None
                client.release_kv()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
