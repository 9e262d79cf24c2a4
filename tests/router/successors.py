"""Engines of one cohort, as a router sees them: each serves in the place of the one before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from segue.discovery.file import FileDiscovery
from segue.discovery.record import EngineRecord
from segue.router.discovery import DiscoveredWorkers
from tests.router.fake_servers import FakeWorker, RunningRouter, routed, until
from tests.router.workers import report


class CohortEngine(FakeWorker):
    """An engine with an epoch, which puts its record into files once it serves."""

    def __init__(self, directory: Path, epoch: int, answer: Any, cohort: str = "c", **of_record: Any) -> None:
        super().__init__(answer, cohort=cohort, epoch=epoch, **of_record)
        self.report = report(epoch=epoch)
        self.discovery = FileDiscovery(directory)

    async def serve(self) -> None:
        """Listens, and puts the record."""
        await self.start()
        await self.put()

    async def put(self) -> None:
        record = self.record
        name = f"engine-{record.epoch}"
        await self.discovery.put(
            EngineRecord(cohort=record.cohort, engine=name, epoch=record.epoch, url=self.url)
        )

    async def die(self) -> None:
        """The record goes with the process."""
        await self.discovery.close()
        await super().die()


@asynccontextmanager
async def discovering(
    directory: Path, *engines: CohortEngine, **options: Any
) -> AsyncIterator[RunningRouter]:
    """Runs a router that finds these engines, and others that serve later, in a directory."""
    for engine in engines:
        await engine.serve()
    try:
        async with routed(waits=False, **options) as router:
            router.router.discover(DiscoveredWorkers(FileDiscovery(directory)))
            for engine in engines:
                await until(lambda engine=engine: router.serves(engine), f"{engine.id} serves")
            yield router
    finally:
        for engine in engines:
            await engine.die()
