"""KV memory of a real service: who gets whose, with real processes that are killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.cli.gms import status_tables
from segue.errors import SharedMemoryError, SlabMemoryError
from segue.gms import messages as wire
from segue.gms.client import GmsClient
from segue.gms.fencing import ProcessFence
from segue.memory.memfd import MemfdVMM
from tests.gms.kv_engine import Mapped, kv_engines
from tests.gms.running import DEADLINE_S, SLAB, end, refusal, running, start, target, until
from tests.gms.serving import SlowVMM, serving

Patch = pytest.MonkeyPatch


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path / "d") as found:
        yield found


def rows(directory: Path) -> list[dict[str, Any]]:
    with target(directory, tag="watch") as client:
        found: list[dict[str, Any]] = client.status()["kv"]
    return found


def kinds(directory: Path) -> list[str]:
    with target(directory, tag="watch") as client:
        return [event.kind for event in client.events()]


def ask(client: GmsClient, epoch: int, **options: Any) -> Mapped:
    given = {"pool_bytes": 2 * SLAB, "slab_bytes": SLAB} | options
    memory = Mapped(client.ask_kv(epoch, **given))
    client.kv_prepared()
    return memory


def test_a_set_of_many_slabs_comes_with_a_journal(directory: Path) -> None:
    with target(directory, engine="a", cohort="c") as client:
        epoch = client.claim()
        grant = client.ask_kv(epoch, 65 * SLAB, slab_bytes=SLAB, journal_bytes=100)
        assert grant.is_fresh and grant.sizes == [SLAB] * 65 and grant.journal is not None
        memory = Mapped(grant)
        assert memory.read(3) == [b"\0\0\0"] * 66
        memory.write(b"abc")
        assert memory.read(3) == [b"abc"] * 66
        (row,) = rows(directory)
        assert {**row, "user": None} == {
            **{"cohort": "c", "rank": 0, "phase": "leased", "epoch": epoch, "user": None, "waits": None},
            **{"bytes": 65 * SLAB, "journal_bytes": 100},
        }
        assert row["user"].startswith("c/a rank 0 (pid ")
        (table,) = (table for title, table in status_tables(client.status()) if title == "KV memory")
        assert table.row_count == 1
    until(lambda: rows(directory) == [], "the memory of a cohort without engines is given back")
    with target(directory, tag="watch") as client:
        assert client.status()["devices"] == {"cpu": 0}
    assert [each for each in kinds(directory) if each.startswith("kv_")] == [
        *("kv_granted", "kv_quarantined", "kv_freed")
    ]


def test_the_last_slab_has_the_rest(directory: Path) -> None:
    with target(directory) as client:
        grant = client.ask_kv(client.claim(), 5 * SLAB, slab_bytes=2 * SLAB)
        assert grant.sizes == [2 * SLAB, 2 * SLAB, SLAB] and grant.journal is None
        assert len(Mapped(grant).slabs) == 3


@pytest.mark.parametrize("stopped", [False, True])
def test_a_successor_gets_the_memory_of_a_killed_engine_once_its_process_has_ended(
    directory: Path, stopped: bool
) -> None:
    with kv_engines(directory, "a", "b") as (old, new):
        assert old.call("ask", old.call("claim"), 2, 10, 0.0) is True
        old.call("write", "left")
        if stopped:  # it has the connection still: the service kills it
            old.process.send_signal(signal.SIGSTOP)
        else:
            old.process.kill()
        assert new.call("ask", new.call("claim"), 2, 10, DEADLINE_S) is False
        assert new.call("read", 4) == ["left"] * 3
        assert old.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert [row["epoch"] for row in rows(directory)] == [2]


def test_a_process_that_has_only_left_may_still_write(directory: Path) -> None:
    with kv_engines(directory, "a", "b") as (old, new):
        assert old.call("ask", old.call("claim"), 1, 0, 0.0)
        old.call("leave")
        until(lambda: [row["phase"] for row in rows(directory)] == ["quarantined"], "it is seen")
        old.call("write", "late")
        assert new.call("ask", new.call("claim"), 1, 0, DEADLINE_S) is False
        assert old.process.wait(DEADLINE_S) == -signal.SIGKILL, "it was killed first"
        assert new.call("read", 4) == ["late"]


def test_who_cannot_be_killed_keeps_its_memory_and_the_successor_gets_other(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ProcessFence, "kill", lambda self, process: None)
    with serving(tmp_path / "d") as directory, kv_engines(directory, "a", "b") as (old, new):
        assert old.call("ask", old.call("claim"), 1, 0, 0.0)
        began = time.monotonic()
        assert new.call("ask", new.call("claim"), 1, 0, 0.3) is True
        assert time.monotonic() - began >= 0.3
        new.call("write", "new")
        old.call("write", "old")
        assert (old.call("read", 3), new.call("read", 3)) == (["old"], ["new"])
        assert [row["bytes"] for row in rows(directory)] == [SLAB]


class ScarceVMM(MemfdVMM):
    """Has memory for some slabs, and then for none until it gets more."""

    def __init__(self, slabs: int) -> None:
        super().__init__()
        self.left = slabs
        self.tries = 0

    def create(self, size: int) -> int:
        self.tries += 1
        if not self.left:
            raise SlabMemoryError("none is left")
        self.left -= 1
        return super().create(size)


def test_without_memory_for_a_second_set_the_successor_is_refused_until_the_writer_has_ended(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ProcessFence, "kill", lambda self, process: None)
    with (
        serving(tmp_path / "d", {"cpu": ScarceVMM(1)}) as directory,
        kv_engines(directory, "a") as (old,),
        target(directory, engine="b") as new,
    ):
        assert old.call("ask", old.call("claim"), 1, 0, 0.0)
        old.call("write", "left")
        epoch = new.claim()
        refused = refusal(lambda: ask(new, epoch, pool_bytes=SLAB))
        assert refused.code == "fence"
        for part in ("'default', rank 0", f"default/a rank 0 (pid {old.process.pid})", "none is left"):
            assert part in refused.message
        old.kill()
        assert ask(new, epoch, pool_bytes=SLAB, wait_s=DEADLINE_S).read(4) == [b"left"]


def test_memory_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    vmm = ScarceVMM(1)
    with serving(tmp_path / "d", {"cpu": vmm}) as directory, target(directory) as client:
        epoch = client.claim()
        refused = refusal(lambda: ask(client, epoch))
        assert refused.code == "memory" and "none is left" in refused.message
        vmm.tries = 0

        def more() -> None:
            until(lambda: vmm.tries >= 3, "it is tried again and again")
            vmm.left = 2

        helper = threading.Thread(target=more)
        helper.start()
        assert ask(client, epoch, wait_s=DEADLINE_S).is_fresh
        helper.join()
        assert kinds(directory).count("out_of_memory") == 2


def test_an_engine_that_gives_up_waiting_is_left_nothing(tmp_path: Path) -> None:
    vmm = SlowVMM()
    with serving(tmp_path / "d", {"cpu": vmm}) as directory, target(directory) as client:
        epoch = client.claim()
        vmm.may_create.clear()
        assert refusal(lambda: ask(client, epoch, limit_s=0.1)).code == "late"
        assert [(row["phase"], row["waits"]) for row in rows(directory)] == [("making", None)]
        vmm.may_create.set()
        until(lambda: rows(directory) == [], "what is made too late is freed")
        assert client.status()["devices"] == {"cpu": 0}
        assert ask(client, epoch).is_fresh, "the session goes on"
        assert "kv_withdrawn" in kinds(directory)


def test_a_grant_that_comes_too_late_is_taken_back(tmp_path: Path, monkeypatch: Patch) -> None:
    """The service carries the ask out once the engine has given it up, and grants what is there."""
    vmm = SlowVMM()
    with serving(tmp_path / "d", {"cpu": vmm}) as directory, target(directory) as client:
        epoch = client.claim()
        ask(client, epoch)
        client.release_kv()
        epoch = client.claim()
        send, granted = client._send, kinds(directory).count("kv_granted")

        def let(message: Any, descriptors: Any) -> None:
            send(message, descriptors)
            if isinstance(message, wire.WithdrawKV):
                vmm.may_say.set()

        monkeypatch.setattr(client, "_send", let)
        vmm.may_say.clear()
        assert refusal(lambda: ask(client, epoch, limit_s=0.1)).code == "late"
        assert kinds(directory).count("kv_granted") == granted + 1, "too late"
        assert rows(directory) == [] and client.status()["devices"] == {"cpu": 0}


def test_an_older_engine_that_withdraws_leaves_the_memory_to_the_newer_one(directory: Path) -> None:
    with target(directory, engine="a") as old, target(directory, engine="b") as new:
        ask(old, old.claim()).write(b"left")
        old.release_kv()
        epoch = new.claim()
        old.withdraw_kv()
        memory = ask(new, epoch)
        assert (memory.is_fresh, memory.read(4)) == (False, [b"left"] * 2)
        old.withdraw_kv()
        assert [row["phase"] for row in rows(directory)] == ["leased"]


def test_a_set_without_memory_for_its_journal_is_given_back(tmp_path: Path, monkeypatch: Patch) -> None:
    with serving(tmp_path / "d", {"cpu": ScarceVMM(4)}) as directory, target(directory) as client:
        epoch = client.claim()
        monkeypatch.setattr("segue.gms.kv_calls.MemfdVMM", lambda: ScarceVMM(0))
        assert refusal(lambda: ask(client, epoch, journal_bytes=10)).code == "memory"
        assert client.status()["devices"] == {"cpu": 0} and rows(directory) == []
        monkeypatch.undo()
        assert ask(client, epoch, journal_bytes=10).journal is not None


def test_without_a_pidfd_memory_is_never_handed_on(tmp_path: Path, monkeypatch: Patch) -> None:
    def none(connection: object) -> None:
        raise SharedMemoryError("no pidfd")

    monkeypatch.setattr("segue.gms.server.shared.peer_process", none)
    with serving(tmp_path / "d") as directory, kv_engines(directory, "a", "b") as (old, new):
        assert old.call("ask", old.call("claim"), 2, 10, 0.0)
        old.call("write", "left")
        old.kill()
        assert new.call("ask", new.call("claim"), 2, 10, DEADLINE_S) is True
        assert new.call("read", 4) == ["\0\0\0\0"] * 3
        assert rows(directory)[0]["bytes"] == 2 * SLAB


def test_an_older_engine_gets_nothing(directory: Path) -> None:
    with target(directory, engine="a") as old, target(directory, engine="b") as new:
        first, second = old.claim(), new.claim()
        refused = refusal(lambda: ask(old, first))
        assert refused.code == "stale_epoch" and f"epoch {second}" in refused.message
        assert ask(new, second).is_fresh
        refused = refusal(lambda: ask(new, second))
        assert refused.code == "held" and "default/b rank 0" in refused.message


def test_an_epoch_that_its_engine_has_not_claimed_is_refused_by_name(directory: Path) -> None:
    with target(directory, engine="a", size=2) as first, target(directory, engine="b") as other:
        epoch = first.claim()
        refused = refusal(lambda: ask(other, epoch))
        assert refused.code == "unclaimed" and f"epoch {epoch} is not one" in refused.message
        assert "it has claimed none" in refused.message
        refused = refusal(lambda: ask(first, epoch + 1))
        assert refused.code == "unclaimed" and f"its highest is {epoch}" in refused.message
        assert rows(directory) == [], "a refused ask leaves nothing"
        with target(directory, engine="a", rank=1, size=2) as second:
            assert ask(second, epoch).is_fresh, "rank 0 has claimed it for all ranks, also for later sessions"
        with target(directory, engine="c", epoch=epoch + 5) as third:
            assert refusal(lambda: ask(third, epoch)).code == "stale_epoch", "it has told a higher one"
            assert ask(third, epoch + 5).is_fresh


def test_who_waits_is_refused_once_a_newer_engine_claims(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(ProcessFence, "kill", lambda self, process: None)
    with (
        serving(tmp_path / "d") as directory,
        kv_engines(directory, "a") as (old,),
        target(directory, engine="b") as waits,
        target(directory, engine="c") as newest,
    ):
        assert old.call("ask", old.call("claim"), 1, 0, 0.0)
        epoch, found = waits.claim(), []
        thread = threading.Thread(
            target=lambda: found.append(
                refusal(lambda: ask(waits, epoch, pool_bytes=SLAB, wait_s=DEADLINE_S))
            )
        )
        thread.start()
        until(lambda: rows(directory)[0]["waits"] is not None, "it waits")
        newest.claim()
        thread.join(DEADLINE_S)
        assert found[0].code == "stale_epoch"


def test_memory_is_fresh_until_an_engine_has_prepared_it(directory: Path) -> None:
    with kv_engines(directory, "a", "b", "c") as engines:
        for engine, word, is_fresh in zip(engines, ("take", "ask", "ask"), (True, True, False), strict=True):
            assert engine.call(word, engine.call("claim"), 1, 0, DEADLINE_S) is is_fresh
            engine.call("write", "left")
            engine.kill()


def test_a_process_that_lost_its_session_gets_its_own_memory_again(directory: Path) -> None:
    with kv_engines(directory, "a") as (engine,), target(directory, engine="b"):
        epoch = engine.call("claim")
        assert engine.call("take", epoch, 1, 0, 0.0) is True
        engine.call("again")
        assert engine.call("ask", epoch, 1, 0, 0.0) is True, "it may never have got the first answer"
        engine.call("write", "mine")
        engine.call("again")
        assert engine.call("ask", epoch, 1, 0, 0.0) is False
        assert engine.call("read", 4) == ["mine"]
        engine.kill()
        until(lambda: rows(directory)[0]["phase"] == "shaped", "the end of its process is still seen")


def test_memory_that_is_given_back_needs_no_fence(directory: Path) -> None:
    with kv_engines(directory, "a") as (old,), target(directory, engine="b") as new:
        assert old.call("ask", old.call("claim"), 2, 0, 0.0)
        old.call("write", "left")
        old.call("release")
        assert not ask(new, new.claim()).is_fresh
        assert old.process.poll() is None


def test_another_size_or_device_makes_other_memory(tmp_path: Path) -> None:
    vmms = {"cpu": MemfdVMM(), "other": MemfdVMM()}
    with serving(tmp_path / "d", vmms) as directory, target(directory, engine="keeps the cohort"):
        for device, slabs, fresh in (
            ("cpu", 1, True),
            ("cpu", 2, True),
            ("other", 2, True),
            ("other", 2, False),
        ):
            with target(directory, device=device) as client:
                assert ask(client, client.claim(), pool_bytes=slabs * SLAB).is_fresh == fresh
                client.release_kv()
                (row,) = rows(directory)
                assert row["bytes"] == slabs * SLAB and row["user"] is None


def test_wrong_sizes_and_sessions_are_refused(directory: Path) -> None:
    with target(directory) as client:
        refused = refusal(lambda: ask(client, client.claim(), pool_bytes=SLAB + 1))
        assert refused.code == "slabs" and f"multiple of {SLAB}" in refused.message
        for count in (4097, 1 << 26):  # nobody is kept waiting while as many are counted
            refused = refusal(lambda num=count: ask(client, 1, pool_bytes=num * SLAB))
            assert refused.code == "memory" and f"a set of {count} slabs" in refused.message
    with target(directory, tag="watch") as client:
        assert refusal(lambda: ask(client, 1)).code == "protocol"


def test_a_service_that_was_started_again_hands_nothing_on(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    holder = start(directory, command="hold")
    try:
        with running(directory) as service, kv_engines(directory, "a", "b") as (old, new):
            epoch = old.call("claim")
            assert old.call("ask", epoch, 1, 10, 0.0)
            old.call("write", "old")
            end(service, signal.SIGKILL)
            with running(directory):
                assert rows(directory) == []
                new.call("again")
                assert refusal(lambda: ask_stale(directory, epoch)).code == "stale_epoch"
                assert new.call("ask", new.call("claim"), 1, 10, 0.0) is True
                new.call("write", "new")
                old.call("write", "OLD")
                assert (old.call("read", 3), new.call("read", 3)) == (["OLD"] * 2, ["new"] * 2)
    finally:
        end(holder)


def ask_stale(directory: Path, epoch: int) -> None:
    """Ask with an epoch before the one that the holder has kept."""
    with target(directory, engine="c") as client:
        ask(client, epoch - 1)


def test_a_service_that_ends_while_it_makes_memory_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "d", {"cpu": ScarceVMM(0)}) as directory:
        client = target(directory)
        epoch = client.claim()
        thread = threading.Thread(target=lambda: refusal(lambda: ask(client, epoch, wait_s=DEADLINE_S)))
        thread.start()
        until(lambda: rows(directory) != [], "it is tried")
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    client.close()
