"""What every backend of discovery does, whichever it is; each test file runs all of it with its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from segue.discovery.base import DiscoveryBackend
from segue.discovery.record import EngineRecord

Make = Callable[[], DiscoveryBackend]
Check = Callable[[Make], Awaitable[None]]
DEADLINE_S = 60.0


def record(engine: str = "engine-a", epoch: int = 1, cohort: str = "default") -> EngineRecord:
    return EngineRecord(
        cohort=cohort,
        engine=engine,
        epoch=epoch,
        url=f"http://127.0.0.1:{8000 + epoch}",
        system_url="http://127.0.0.1:9090",
        model="tiny",
        tp=2,
        role="decode",
        generation=3,
        weight_version="v3",
        boot_id="boot",
        started_at=12.5,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


class Watching:
    """Keeps what a watch has told last."""

    def __init__(self, backend: DiscoveryBackend) -> None:
        self.told: list[Sequence[EngineRecord]] = []
        self._task = asyncio.ensure_future(backend.watch(self.told.append))

    async def shows(self, *records: EngineRecord) -> None:
        await until(lambda: bool(self.told) and list(self.told[-1]) == list(records))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def a_record_is_listed_whole_until_it_is_removed(make: Make) -> None:
    engine, router = make(), make()
    assert list(await router.list()) == []
    await engine.put(record())
    assert list(await router.list()) == [record()]
    await engine.put(record(epoch=2))  # in place of the first one
    assert list(await router.list()) == [record(epoch=2)]
    await engine.remove("default", "engine-a")
    await engine.remove("default", "engine-a")
    assert list(await router.list()) == []
    await engine.close()
    await router.close()


async def a_closed_backend_s_records_are_gone(make: Make) -> None:
    engine, router = make(), make()
    await engine.put(record())
    await engine.put(record(cohort="other"))
    assert len(await router.list()) == 2
    await engine.close()
    assert list(await router.list()) == []
    await router.close()


async def a_successor_s_record_is_told_at_once_beside_the_old_one(make: Make) -> None:
    old, new, router = make(), make(), make()
    watching = Watching(router)
    await watching.shows()
    await old.put(record("engine-a", 1))
    await watching.shows(record("engine-a", 1))
    await new.put(record("engine-b", 2))  # the first one hangs, and its record still lives
    router.nudge()
    await watching.shows(record("engine-a", 1), record("engine-b", 2))
    await old.close()
    await watching.shows(record("engine-b", 2))
    assert len(watching.told) == 4  # each change once
    await watching.close()
    for backend in (new, router):
        await backend.close()


async def nobody_claims_an_epoch_that_was_claimed_or_a_lower_one(make: Make) -> None:
    first, second = make(), make()
    assert await second.highest_epoch("default") == 0
    assert await first.claim_epoch("default", 4)
    assert await second.highest_epoch("default") == 4
    assert not await second.claim_epoch("default", 4)
    assert not await second.claim_epoch("default", 3)
    assert await second.claim_epoch("default", 5)
    assert not await first.claim_epoch("default", 4)
    assert await first.claim_epoch("other", 1)
    assert await first.highest_epoch("default") == 5
    for backend in (first, second):
        await backend.close()


async def of_many_that_claim_an_epoch_at_once_at_most_one_has_it(make: Make) -> None:
    backends = [make() for _ in range(6)]
    for epoch in range(1, 6):
        claims = await asyncio.gather(*(each.claim_epoch("default", epoch) for each in backends))
        assert sum(claims) == 1
    for backend in backends:
        await backend.close()


async def an_engine_that_waits_has_no_record(make: Make) -> None:
    shadow, router = make(), make()
    watching = Watching(router)
    await watching.shows()
    await shadow.highest_epoch("default")
    await shadow.claim_epoch("default", 1)  # it wakes, and does not serve yet
    watch = Watching(shadow)
    await watch.shows()
    assert list(await router.list()) == []
    await watch.close()
    await watching.close()
    for backend in (shadow, router):
        await backend.close()


CHECKS: Sequence[Check] = (
    a_record_is_listed_whole_until_it_is_removed,
    a_closed_backend_s_records_are_gone,
    a_successor_s_record_is_told_at_once_beside_the_old_one,
    nobody_claims_an_epoch_that_was_claimed_or_a_lower_one,
    of_many_that_claim_an_epoch_at_once_at_most_one_has_it,
    an_engine_that_waits_has_no_record,
)
NAMES = [check.__name__ for check in CHECKS]
