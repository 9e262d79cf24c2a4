"""Discovery by files: a record goes with its process, and what is in the directory besides does no harm."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from segue.discovery.file import FOLDER, FileDiscovery
from segue.errors import ConfigError, DiscoveryError, FailoverDirectoryError
from tests.discovery.contract import CHECKS, NAMES, Check, Watching, record
from tests.discovery.serving_engine import start_engine


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "failover"


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_what_every_backend_does(check: Check, directory: Path) -> None:
    asyncio.run(check(lambda: FileDiscovery(directory)))


def test_a_killed_engine_s_record_goes_and_the_next_one_s_comes(directory: Path) -> None:
    async def run() -> None:
        router = FileDiscovery(directory)
        watching = Watching(router)
        first = start_engine(directory, "engine-a")
        await watching.shows(record("engine-a", 1))
        shadow = start_engine(directory, "engine-b")
        first.send_signal(signal.SIGKILL)
        await watching.shows(record("engine-b", 2))
        first.communicate()
        assert [path.name for path in (directory / FOLDER).glob("record-*")] == ["record-default~engine-b"]
        shadow.kill()
        await watching.shows()
        shadow.communicate()
        await watching.close()

    asyncio.run(run())


def test_a_stopped_engine_keeps_its_record_and_its_successor_has_a_higher_epoch(directory: Path) -> None:
    async def run() -> None:
        router = FileDiscovery(directory)
        watching = Watching(router)
        old = start_engine(directory, "engine-a")
        await watching.shows(record("engine-a", 1))
        old.send_signal(signal.SIGSTOP)
        (directory / "default.lock").unlink()  # so that another one can have its lock
        new = start_engine(directory, "engine-b")
        await watching.shows(record("engine-a", 1), record("engine-b", 2))
        for process in (old, new):
            process.kill()
            process.communicate()
        await watching.shows()
        await watching.close()

    asyncio.run(run())


def test_a_forked_process_keeps_no_record(directory: Path) -> None:
    async def run() -> None:
        engine, router = FileDiscovery(directory), FileDiscovery(directory)
        await engine.put(record())
        read, write = os.pipe()
        if not (child := os.fork()):
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
        assert list(await router.list()) == [record()]
        file = next(iter(engine._put.values()))
        os.close(file.number)  # as if the process had died
        file.number = -1
        assert list(await router.list()) == []
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)

    asyncio.run(run())


def test_other_files_in_the_folder_are_not_records(directory: Path) -> None:
    async def run() -> None:
        engine = FileDiscovery(directory)
        for name in (".new-1", "README", "record-x", "record-a~b~c", "epoch-default~x"):
            (directory / FOLDER / name).write_text("{")
        (directory / FOLDER / "record-default~dead").write_text("no JSON")
        await engine.put(record())
        assert list(await engine.list()) == [record()]
        assert await engine.highest_epoch("default") == 0
        await engine.close()

    asyncio.run(run())


def test_a_directory_that_went_away_is_named(directory: Path) -> None:
    async def run() -> None:
        engine = FileDiscovery(directory)
        shutil.rmtree(directory)
        for call in (engine.put(record()), engine.list(), engine.claim_epoch("default", 1)):
            with pytest.raises(DiscoveryError, match=r"discovery by files in .*/failover/discovery failed"):
                await call

    asyncio.run(run())


def test_a_name_that_cannot_be_a_file_s_is_refused(directory: Path) -> None:
    engine = FileDiscovery(directory)
    with pytest.raises(ConfigError, match="engine_id='a/b'"):
        asyncio.run(engine.put(record("a/b")))
    with pytest.raises(ConfigError, match="cohort='a~b'"):
        asyncio.run(engine.claim_epoch("a~b", 1))


def test_a_directory_that_others_may_write_to_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(FailoverDirectoryError, match="others may write to it"):
        FileDiscovery(directory)


def test_a_folder_that_was_removed_is_made_anew(directory: Path) -> None:
    async def run() -> None:
        discovery = FileDiscovery(directory)
        shutil.rmtree(directory / FOLDER)
        assert await discovery.claim_epoch("default", 3)
        shutil.rmtree(directory / FOLDER)
        await discovery.put(record())
        assert list(await discovery.list()) == [record()]
        await discovery.close()

    asyncio.run(run())


def test_a_file_in_place_of_the_folder_is_an_error_of_the_option(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / FOLDER).touch()
    with pytest.raises(FailoverDirectoryError, match=r"its folder discovery cannot be made \(File exists\)"):
        FileDiscovery(directory)
