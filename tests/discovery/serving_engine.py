"""A process that claims an epoch and puts its record, as an engine does, and lives until it is killed.

    python -m tests.discovery.serving_engine DIRECTORY ENGINE

It prints its epoch once its record is there.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from segue.discovery.file import FileDiscovery
from segue.failover.epochs import claim_epoch
from segue.failover.lock import CohortLock
from tests.discovery.contract import record
from tests.support.child import start_child

ROOT = Path(__file__).resolve().parents[2]


def start_engine(directory: Path, engine: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.discovery.serving_engine", str(directory), engine]
    return start_child(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def serve(directory: Path, engine: str) -> None:
    lock, discovery = CohortLock(directory, "default"), FileDiscovery(directory)
    lock.acquire()
    epoch = await claim_epoch(lock, discovery, engine, "http://127.0.0.1:1")
    await discovery.put(record(engine, epoch))
    print(epoch, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
