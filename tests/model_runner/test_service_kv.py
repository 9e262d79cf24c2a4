"""Ranks whose KV cache is memory of a real service: what each one gets, and what it does without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.collectives import Collectives
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo
from segue.errors import MemoryServiceError, SlabMemoryError
from segue.gms import client_kv
from segue.gms.transport import close
from segue.kvcache.journal import NAME_BYTES, journal_bytes
from segue.memory.arena import Arena, Layout, TensorSpec
from segue.memory.geometry import KVGeometry
from segue.memory.memfd import MemfdVMM
from segue.memory.rank_memory import PrivateMemory, SharedKVMemory
from segue.memory.releasable import ReleasableMemory
from segue.memory.vmm import Slab
from segue.model_runner import service_kv, service_memory
from segue.model_runner.service_kv import ServiceKVMemory
from segue.model_runner.service_memory import ServiceMemory
from segue.model_runner.service_start import choose_kv_owner, kv_memory, make_service_memory
from tests.gms import running as gms
from tests.gms.kv_engine import kv_engines
from tests.gms.serving import SlowVMM, serving
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

CPU = torch.device("cpu")
LAYOUT = Layout.of([TensorSpec(name="t", shape=(100,), dtype=torch.float32)])
PAGE, POOL = 1 << 20, 9 << 20
STANDS_BY = {"shadow_mode": True, "kv_owner": "gms"}
Make = Callable[..., ServiceMemory]
GEOMETRY = KVGeometry(
    num_pages=8,
    max_seq_len=64,
    page_size=16,
    page_bytes=PAGE,
    max_running_requests=4,
    chunked_prefill_size=16,
)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with serving(tmp_path / "d") as found:
        yield found


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Make]:
    """Returns memory of a rank that stands by: with its weights, and the scratch page of its KV cache."""
    source = resolve(str(tiny_model), "dummy", "/nonexistent")
    with ExitStack() as stack:

        def new(directory: Path, name: str, groups: TPGroups | None = None, **options: Any) -> ServiceMemory:
            groups = groups or TPGroups(TPInfo(rank=0, size=1), Collectives(TPInfo(rank=0, size=1)))
            given = {"gms_dir": str(directory), "engine_id": name, **STANDS_BY, **options}
            config = EngineConfig.create({}, model=str(tiny_model), **given)
            memory = make_service_memory(config, source, CPU, torch.float32, groups)
            stack.callback(memory.close)
            memory.load(LAYOUT, fill)
            memory.kv = memory.take_kv(POOL, PAGE)  # type: ignore[attr-defined]
            return memory

        yield new


def fill(take: Callable[[], Arena]) -> None:
    for slab in take().slabs:
        slab.fill_(1)


def kv_of(memory: ServiceMemory) -> torch.Tensor:
    return memory.kv  # type: ignore[attr-defined, no-any-return]


def is_leased(memory: ServiceMemory) -> bool:
    assert memory._leasable is not None
    return memory._leasable.is_leased


def row_of(directory: Path) -> dict[str, Any] | None:
    with gms.target(directory, tag="watch") as client:
        found: list[dict[str, Any]] = client.status()["kv"]
    return found[0] if found else None


def test_an_engine_that_wakes_gets_the_memory_of_the_one_before(directory: Path, make: Make) -> None:
    # Both are of this process, and have one name, or the service would kill the first one.
    first, second = make(directory, "a"), make(directory, "a")
    assert first.parks_kv and row_of(directory) is None, "one that stands by has a page of its own"
    kv_of(second)[-PAGE:].fill_(5)
    first.wake(1, timeout_s=10.0)
    assert is_leased(first) and not kv_of(first).any()
    kv_of(first).fill_(7)
    row = row_of(directory)
    assert row is not None and (row["phase"], row["bytes"], row["epoch"]) == ("leased", 10 << 20, 1)
    first.close()
    assert (row_of(directory) or {})["phase"] == "shaped", "it was given back"
    second.wake(2, timeout_s=10.0)
    assert is_leased(second) and bool((kv_of(second) == 7).all())


def test_the_journal_goes_with_the_memory_and_its_name_changes_with_each_engine(
    directory: Path, make: Make
) -> None:
    first, second = make(directory, "a", warm_kv=True), make(directory, "a", warm_kv=True)
    for memory in (first, second):
        memory.pin_kv(GEOMETRY)
    first.wake(1, timeout_s=10.0)
    held = first.held_kv
    assert held is not None and (held.before, held.is_fresh) == ("00" * NAME_BYTES, True)
    assert first.kv_journal is not None and len(first.kv_journal) >= journal_bytes(8, 16)
    first.kv_journal[100:107] = b"written"
    first.close()
    second.wake(2, timeout_s=10.0)
    again = second.held_kv
    assert again is not None and (again.before, again.is_fresh) == (held.now, False)
    assert again.now not in (held.now, held.before)
    assert second.kv_journal is not None and bytes(second.kv_journal[100:107]) == b"written"
    assert bytes(second.kv_journal[:NAME_BYTES]).hex() == again.now


def test_memory_without_a_journal_is_not_that_of_an_engine_with_one(directory: Path, make: Make) -> None:
    warm, cold, other = (
        make(directory, "a", warm_kv=True),
        make(directory, "a"),
        make(directory, "a", warm_kv=True),
    )
    for memory in (warm, cold, other):
        memory.pin_kv(GEOMETRY)
    for epoch, memory in enumerate((warm, cold, other), start=1):
        memory.wake(epoch, timeout_s=10.0)
        assert (memory.held_kv is None) == (memory is cold) == (memory.kv_journal is None)
        assert memory is cold or (memory.held_kv is not None and memory.held_kv.is_fresh)
        memory.close()


def test_a_journal_that_is_too_large_is_left_out_and_the_wake_goes_on(
    directory: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    memory = make(directory, "a", warm_kv=True)
    memory.pin_kv(replace(GEOMETRY, num_pages=1 << 24))
    assert "would have 1.75 GiB, and the memory service keeps 1.00 GiB at most" in caplog.text
    memory.wake(1, timeout_s=10.0)
    assert is_leased(memory) and memory.held_kv is not None and memory.held_kv.is_fresh
    assert memory.kv_journal is not None and memory.kv_journal.nbytes < journal_bytes(1 << 24, 16)


def test_all_ranks_ask_with_the_epoch_that_rank_0_has_claimed(
    directory: Path, make: Make, tmp_path: Path
) -> None:
    with kv_engines(directory, "before") as (before,):
        for _ in range(4):
            before.call("claim")  # the service counts on from here, whatever the lock says

    def wake(rank: int) -> bool:
        groups = connect(TPInfo(rank=rank, size=2), rendezvous=tmp_path / "rendezvous", device=CPU)
        memory = make(directory, "a", groups)
        memory.wake(1, timeout_s=10.0)
        return is_leased(memory)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wake, range(2))) == [True, True]
        with gms.target(directory, tag="watch") as client:
            assert [(row["rank"], row["epoch"]) for row in client.status()["kv"]] in (
                [(0, 5), (1, 5)],
                [(1, 5), (0, 5)],
            )


def test_the_end_of_the_process_before_is_waited_for(directory: Path, make: Make) -> None:
    """It is stopped, and holds the memory: the service kills it, and the memory is the successor's then."""
    memory = make(directory, "b")
    with kv_engines(directory, "a") as (old,):
        old.call("claim")
        old.call("ask", 1, 5, 0, 0.0)
        old.call("write", "left")
        old.process.send_signal(signal.SIGSTOP)
        memory.wake(2, timeout_s=20.0)
        assert old.process.wait(gms.DEADLINE_S) == -signal.SIGKILL
    assert is_leased(memory)


def test_a_refusal_ends_the_wake(directory: Path, make: Make) -> None:
    memory = make(directory, "a")
    claim = memory._claim
    with kv_engines(directory, "b") as (newer,):
        # Another engine claims just before this one asks.
        memory._claim = lambda until: min(claim(until), newer.call("claim"))  # type: ignore[method-assign]
        with pytest.raises(MemoryServiceError, match="epoch 2; this one must end") as caught:
            memory.wake(1, timeout_s=5.0)
    assert caught.value.code == "stale_epoch"


def num_memfds() -> int:
    """How many memfds this process has, the service's included."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
    return found


@pytest.mark.parametrize("part", ["window.clear", "renew_name", "vmm.map"])
def test_a_lease_that_fails_leaves_nothing_behind(
    directory: Path, make: Make, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    memory = make(directory, "a", warm_kv=True)
    memory.pin_kv(GEOMETRY)
    kv = memory._leasable
    assert kv is not None
    window, before = kv._ranges["kv_cache"].window, num_memfds()

    def fails(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        raise OSError("as if the system refused it")

    places = {"window.clear": (window, "clear"), "renew_name": (service_kv, "renew_name")}
    monkeypatch.setattr(*places.get(part, (kv._vmm, "map")), fails)
    with pytest.raises(OSError, match="as if"):
        memory.wake(1, timeout_s=10.0)
    assert num_memfds() == before + 2, "the service's own slab and journal"
    assert window.mapped_bytes == 0 and (kv.kv_journal, kv.held_kv, kv.is_leased) == (None, None, False)
    assert (row_of(directory) or {})["phase"] == "shaped", "the service has it back"


def test_a_service_that_comes_back_in_time_gives_the_memory(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_memory, "AWAY_S", gms.DEADLINE_S)  # it may start slowly here
    directory = tmp_path / "d"
    with gms.running(directory) as service:
        memory = make(directory, "a")
        gms.end(service, signal.SIGKILL)
        lost = threading.Event()
        memory._claim, claim = lambda until: lost.set() or claim(until), memory._claim  # type: ignore
        waking = threading.Thread(target=memory.wake, args=(1, 2 * gms.DEADLINE_S))
        waking.start()
        assert lost.wait(gms.DEADLINE_S)
        with gms.running(directory):
            waking.join(gms.DEADLINE_S)
            assert is_leased(memory) and not waking.is_alive()
            assert (row_of(directory) or {})["epoch"] in (1, 2), (
                "an offer of weights may have told the first one"
            )


def test_without_the_service_the_kv_cache_is_the_engines_own(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_memory, "AWAY_S", 0.3)
    directory = tmp_path / "d"
    with gms.running(directory) as service:
        memory, other = make(directory, "a"), make(directory, "b")
        gms.end(service, signal.SIGKILL)
        began = time.monotonic()
        memory.wake(1, timeout_s=10.0)
        assert 0.3 <= time.monotonic() - began < 5.0
        assert not is_leased(memory)
        kv_of(memory).fill_(3)

        def none(self: MemfdVMM, size: int) -> Slab:
            raise SlabMemoryError("none is left")

        monkeypatch.setattr(MemfdVMM, "private", none)
        with pytest.raises(SlabMemoryError, match="are missing"):
            other.wake(2, timeout_s=0.5)
        monkeypatch.undo()
        other.close()
        with gms.running(directory), kv_engines(directory, "c") as (successor,):
            gms.until(lambda: epoch_of(directory) >= 1, "the engine has told its epoch")
            assert row_of(directory) is None
            assert successor.call("ask", successor.call("claim"), 5, 0, 0.0) is True
            assert bool((kv_of(memory) == 3).all())


def test_a_slow_service_keeps_no_second_kv_cache_for_an_engine_that_has_taken_its_own(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_memory, "AWAY_S", 0.1)
    monkeypatch.setattr(client_kv, "TAKEOVER_REPLY_S", 0.2)
    vmm = SlowVMM()
    with serving(tmp_path / "d", {"cpu": vmm}) as directory:
        first, second = make(directory, "a"), make(directory, "a")
        first.wake(1, timeout_s=10.0)
        first.close()
        vmm.may_say.clear()  # from now on the service answers no ask for KV memory
        second.wake(2, timeout_s=0.5)
        assert not is_leased(second)
        kv_of(second).fill_(3)
        gms.until(lambda: row_of(directory) is None, "what the engine before has left is freed")
        ended = num_events(directory, "session_ended")
        vmm.may_say.set()  # now the ask is answered that was given up
        gms.until(lambda: num_events(directory, "session_ended") > ended, "the session of that ask is over")
        assert row_of(directory) is None and num_events(directory, "kv_granted") == 1
        assert bool((kv_of(second) == 3).all())
        second.close()


def num_events(directory: Path, kind: str) -> int:
    with gms.target(directory, tag="watch") as client:
        return [event.kind for event in client.events()].count(kind)


def epoch_of(directory: Path) -> int:
    with gms.target(directory, tag="watch") as client:
        return int(client.status()["cohorts"].get("default", {"epoch": 0})["epoch"])


def test_a_lost_answer_is_asked_for_again(
    directory: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make(directory, "a")
    client = memory._session()
    ask_kv, asked = client.ask_kv, list[int]()

    def loses(*args: Any, **options: Any) -> Any:
        grant = ask_kv(*args, **options)
        asked.append(1)
        if len(asked) == 1:
            close(grant.descriptors)
            raise client._lost("as if the answer had never come")
        return grant

    monkeypatch.setattr(client, "ask_kv", loses)
    memory.wake(1, timeout_s=10.0)
    assert is_leased(memory) and len(asked) == 2
    assert (row_of(directory) or {})["phase"] == "leased"


@pytest.mark.parametrize(
    ("options", "device", "kind"),
    [
        ({"shadow_mode": True}, "cuda:0", ServiceKVMemory),
        ({"shadow_mode": True, "kv_owner": "gms"}, "cuda:0", ServiceKVMemory),
        ({"shadow_mode": True, "kv_owner": "private"}, "cuda:0", ReleasableMemory),
        ({}, "cuda:0", PrivateMemory),
        ({"shadow_mode": True, "enable_laps_scheduler": True}, "cuda:0", PrivateMemory),
        ({"shadow_mode": True, "role": "decode"}, "cuda:0", SharedKVMemory),
        ({"shadow_mode": True}, "cpu", PrivateMemory),
        ({"shadow_mode": True, "kv_owner": "gms"}, "cpu", ServiceKVMemory),
        ({"shadow_mode": True, "warm_kv": True}, "cpu", ServiceKVMemory),
    ],
)
def test_whose_the_kv_cache_is(options: dict[str, Any], device: str, kind: type) -> None:
    config = EngineConfig.create({}, gms_dir="/run/gms", **options)
    assert type(kv_memory(config, torch.device(device))) is kind
    owner, why = choose_kv_owner(config, device.partition(":")[0])
    assert owner == ("gms" if kind is ServiceKVMemory else "private") and why


def test_what_an_engine_has_left_in_the_kv_cache_reaches_no_output(directory: Path, tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    options = {"gms_dir": str(directory), "engine_id": "a", **STANDS_BY}
    outputs = []
    with gms.target(directory, engine="keeps the cohort"):
        for epoch in (1, 2):
            runner = making.make_runner(tmp_path, **options)
            try:
                runner.wake(epoch, 10.0)
                assert bool(runner.kv.data.isnan().all()) == (epoch == 2)
                outputs.append(Planner(runner).generate(making.prompt(30), 12, chunk=7).output)
                runner.kv.data.fill_(torch.nan)
            finally:
                runner.close()
    assert outputs[0] == outputs[1]
