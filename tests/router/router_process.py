"""``segue router`` as a process, in front of workers in the test's own event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.router.fake_servers import DEADLINE_S, FakeWorker


@dataclass(eq=False)
class RouterProcess:
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    def children(self) -> set[int]:
        """The ids of the processes that serve clients, where the router has several."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return {int(word) for file in tasks for word in file.read_text().split()}


async def until_answered(
    client: httpx.AsyncClient, path: str, is_so: Callable[[httpx.Response], bool]
) -> None:
    """Waits until the answer of a GET is as it should be; a lost connection is tried again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            # As it begins to drain, the router closes connections that wait for a request.
            with suppress(httpx.TransportError):
                if is_so(await client.get(path)):
                    return


@asynccontextmanager
async def process(*workers: FakeWorker, **options: str) -> AsyncIterator[RouterProcess]:
    """Runs ``segue router`` until the block ends, and waits until every worker serves."""
    for worker in workers:
        await worker.start()
    words = ["--port", "0", "--log-level", "error"]
    for worker in workers:
        words += ["--worker", worker.url]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", value]
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "segue", "router", *words, stdout=asyncio.subprocess.PIPE
    )
    assert running.stdout is not None
    line = (await running.stdout.readline()).decode()
    url = next(word for word in line.split() if word.startswith(("http://", "https://")))
    key = options.get("api_key")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    client = httpx.AsyncClient(base_url=url, timeout=60, headers=headers, verify=False)
    try:
        await until_answered(client, "/health", lambda reply: reply.json().get("serving", 0) == len(workers))
        yield RouterProcess(running, client)
    finally:
        await client.aclose()
        if running.returncode is None:
            running.kill()
        await running.wait()
        for worker in workers:
            await worker.die()
