"""Engines that are killed, stopped, and robbed of their lock's file: no epoch is ever that of two of them."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from segue.discovery.file import FileDiscovery
from segue.discovery.record import EngineRecord
from tests.discovery.contract import Watching, until
from tests.discovery.serving_engine import start_engine

MOST_ENGINES = 4


class Cohort:
    """The processes of one cohort, and the engine that has ever put a record for each epoch."""

    def __init__(self, directory: Path, told: Sequence[Sequence[EngineRecord]]) -> None:
        self._directory, self._told = directory, told
        self._num_read = 0
        self._engines: dict[str, subprocess.Popen[str]] = {}
        self._num_started = 0
        self.printed: list[str] = []  # epochs, as engines claimed them that have ended
        self.owners: dict[int, set[str]] = {}  # by epoch

    def start(self) -> None:
        self._num_started += 1
        name = f"engine-{self._num_started}"
        self._engines[name] = start_engine(self._directory, name)

    def kill(self, name: str) -> None:
        process = self._engines.pop(name)
        process.kill()
        self.printed += process.communicate()[0].split()

    def close(self) -> None:
        for name in list(self._engines):
            self.kill(name)

    def newest(self) -> int:
        """Returns the highest epoch that a router would accept by now."""
        for record in (each for records in self._told[self._num_read :] for each in records):
            self.owners.setdefault(record.epoch, set()).add(record.engine)
        self._num_read = len(self._told)
        return max(self.owners, default=0)

    def break_down(self, fault: str) -> None:
        """Has another engine take over from the one that serves, which may go on as if it still did."""
        (owner,) = self.owners[self.newest()]
        process = self._engines[owner]
        if fault == "kill":
            self.kill(owner)
        else:
            if fault == "stop":
                process.send_signal(signal.SIGSTOP)
            (self._directory / "default.lock").unlink()
        if len(self._engines) == MOST_ENGINES:
            self.kill(next(iter(self._engines)))
        self.start()
        if fault == "stop":
            process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_faults_in_any_order_never_give_an_epoch_to_two_engines(tmp_path: Path, rounds: int) -> None:
    directory, chance = tmp_path / "failover", random.Random(rounds)

    async def run() -> None:
        watching = Watching(FileDiscovery(directory))
        cohort = Cohort(directory, watching.told)
        try:
            cohort.start()
            newest = 0
            for _ in range(rounds):
                await until(lambda newest=newest: cohort.newest() > newest)
                newest = cohort.newest()
                cohort.break_down(chance.choice(["kill", "stop", "rob"]))
            await until(lambda: cohort.newest() > newest)
        finally:
            cohort.close()
            await watching.close()
        assert len(cohort.printed) == len(set(cohort.printed))
        assert len(cohort.owners) > rounds
        assert {epoch: names for epoch, names in cohort.owners.items() if len(names) > 1} == {}

    asyncio.run(asyncio.wait_for(run(), 110))
