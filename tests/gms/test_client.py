"""Real processes that race for weights, die while they load, and ask for what is not theirs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from segue.errors import MemoryServiceError, WeightsMismatchError
from segue.gms.client import GmsClient
from segue.gms.manifest import WeightsManifest
from segue.memory.memfd import MemfdVMM
from segue.memory.window import MemoryWindow
from tests.gms.running import DEADLINE_S, SLAB, manifest, refusal, running, target, until
from tests.support.child import start_child

POINTS = ("1%", "50%", "99%", "flip", "commit")  # where a loader dies


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("gms") / "d"
    with running(found):
        yield found


@contextmanager
def racing(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs schedules."""
    command = [sys.executable, "-m", "tests.gms.racer", str(directory)]
    process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate(timeout=60)


def schedule(seed: int) -> dict[str, Any]:
    """Engines that start at about the same time, and some of which die if it is they who load."""
    rng = random.Random(seed)
    tp = rng.choice((1, 1, 2))
    num_engines = rng.choice((2, 2, 2, 8))
    survivor = rng.randrange(num_engines)
    engines = []
    for number in range(num_engines):
        dies = None
        if number != survivor and rng.random() < 0.7:
            point = rng.choice(POINTS)
            dies = {"point": point, "rank": 0 if point == "commit" else rng.randrange(tp)}
        engines.append({"delay_s": rng.random() * 0.02, "dies": dies})
    name = f"race-{seed}"
    return {"model": name, "cohort": name, "tp": tp, "slabs": rng.choice((1, 3)), "engines": engines}


def check_race(directory: Path, racers: subprocess.Popen[str], seed: int) -> list[float]:
    """Run a schedule; returns the seconds until the death of each loader was noticed."""
    given = schedule(seed)
    assert racers.stdin is not None and racers.stdout is not None
    with target(directory, tag="watch", cohort=given["cohort"]) as client:
        before = client.events()[-1].number if client.events() else 0
        print(json.dumps(given), file=racers.stdin, flush=True)
        results: list[str] = json.loads(racers.stdout.readline())
        ends = [result.split() for result in results]
        assert [end for end in ends if end[0] == "loaded"] == [["loaded"]], (given, results)
        allowed = {"loaded", "imported", "died", "lost"}
        assert {end[0] for end in ends} <= allowed, (given, results)
        for number, end in enumerate(ends):
            assert end[0] in ("loaded", "imported") or given["engines"][number]["dies"], (given, results)
        state = client.status()
        (generation,) = (each for each in state["generations"] if given["cohort"] in each["cohorts"])
        assert generation["state"] == "committed"
        assert generation["bytes"] == given["tp"] * given["slabs"] * SLAB  # nothing of the dead is left
        events = client.events(before)
    deaths = [float(end[1]) for end in ends if end[0] == "died"]
    dropped = [event.at for event in events if event.kind == "dropped"]
    return [min(at - death for at in dropped if at >= death) for death in deaths]


def races(directory: Path, seeds: range) -> None:
    seconds: list[float] = []
    with racing(directory) as racers:
        for seed in seeds:
            seconds += check_race(directory, racers, seed)
    assert len(seconds) > len(seeds) // 4  # enough of them have died while they loaded
    middle = sorted(seconds)[len(seconds) // 2]
    print(
        f"{len(seconds)} deaths of loaders, noticed after {middle * 1e3:.1f} ms, {max(seconds) * 1e3:.1f} ms"
    )
    assert middle < 0.1 and max(seconds) < 5  # a busy machine may delay the service


def test_exactly_one_of_several_engines_loads(directory: Path) -> None:
    races(directory, range(20))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exactly_one_of_several_engines_loads_in_many_races(tmp_path: Path) -> None:
    with running(tmp_path / "d"):
        races(tmp_path / "d", range(1000, 1200))


def load(client: GmsClient, model: str = "m", num_slabs: int = 1, version: str = "") -> int:
    """Load weights of zeros; returns their generation."""
    grant = client.ask(manifest(num_slabs, model=model), "rw")
    for descriptor in client.allocate(grant.lease, [SLAB] * num_slabs):
        os.close(descriptor)
    assert client.seal(grant.lease, manifest(num_slabs, model=model, digests=(0,) * num_slabs)) == []
    return client.commit(grant.lease, version)


def test_other_weights_are_refused_with_the_field_and_both_values(directory: Path) -> None:
    with target(directory, cohort="identity") as loader, target(directory, cohort="identity") as other:
        load(loader)
        for given, field, have, want in (
            (manifest(model="another"), "model", "'m'", "'another'"),
            (manifest(2), "slab_sizes", None, None),
            (manifest(tp_size=2), "tp_size", "1", "2"),
        ):
            with pytest.raises(WeightsMismatchError) as caught:
                other.ask(given)
            assert caught.value.param is not None and field in caught.value.param
            if have is not None:
                assert f"is {have}, and this engine has {want}" in caught.value.message


def test_cohorts_share_what_was_loaded_from_files(directory: Path) -> None:
    with target(directory, cohort="p") as first, target(directory, cohort="d") as second:
        generation = load(first, model="shared")
        grant = second.ask(manifest(model="shared"))
        assert (grant.mode, grant.generation) == ("ro", generation)
        state = second.status()
        (found,) = (each for each in state["generations"] if each["generation"] == generation)
        assert found["cohorts"] == ["p", "d"] and found["bytes"] == SLAB


def test_weights_outlive_their_loader(directory: Path) -> None:
    with target(directory, cohort="outlive") as loader:
        generation = load(loader, model="outlive")
    with target(directory, cohort="outlive") as reader:
        assert reader.ask(manifest(model="outlive"), "ro").generation == generation


def test_more_slabs_than_a_message_holds_are_given(directory: Path) -> None:
    with target(directory, cohort="many") as loader:
        generation = load(loader, model="many", num_slabs=130)
        sizes, descriptors = loader.export(generation, 0)
        assert sizes == [SLAB] * 130 and len(set(descriptors)) == 130
        for descriptor in descriptors:
            os.close(descriptor)


def test_what_is_mapped_for_writing_cannot_be_sealed(directory: Path) -> None:
    vmm = MemfdVMM()
    window = MemoryWindow(vmm, SLAB)
    with target(directory, cohort="mapped") as loader:
        grant = loader.ask(manifest(model="mapped"))
        (descriptor,) = loader.allocate(grant.lease, [SLAB])
        slab = vmm.adopt(descriptor, SLAB)
        os.close(descriptor)
        window.map(0, slab, writable=True)
        sealed = manifest(model="mapped", digests=(0,))
        held = loader.status()["devices"]["cpu"]
        assert refusal(lambda: loader.seal(grant.lease, sealed)).code == "in_use"
        assert refusal(lambda: loader.commit(grant.lease)).code == "lease", "it is over"
        assert loader.status()["devices"]["cpu"] == held, "what may still be written to is not given away"
        window.close()
        vmm.close(slab)
    with target(directory, tag="watch") as watch:
        until(lambda: watch.status()["devices"]["cpu"] == held - SLAB, "the end of the quarantine")


def test_an_update_shares_the_slabs_that_it_leaves_as_they_are(directory: Path) -> None:
    with target(directory, cohort="shares") as active:
        first = load(active, model="shares", num_slabs=3)
        held = active.status()["devices"]["cpu"]
        want = manifest(3, model="shares", digests=(0, 7, 2))
        grant = active.ask(want, "rw", update_epoch=0)
        os.close(active.allocate(grant.lease, [SLAB])[0])
        for places in ([], [0, 1], [3]):
            assert sealing(active, grant.lease, want, places) == "slabs", places
        active.seal(grant.lease, want, places=[1])
        second = active.commit(grant.lease, "v2", "/new")
        old, new = (inodes(active, number) for number in (first, second))
        assert [one == other for one, other in zip(old, new, strict=True)] == [True, False, True]
        assert active.status()["devices"]["cpu"] == held + SLAB
        active.unpin(first)
        assert active.status()["devices"]["cpu"] == held
        with target(directory, cohort="shares") as other:
            found = other.ask(manifest(3, model="shares"))
            assert (found.generation, found.weight_version, found.model_path) == (second, "v2", "/new")
            assert refusal(lambda: active.rename(second, 1, "v3")).code == "stale_epoch"
            active.rename(second, 0, "v3")
            assert other.note("x") is None  # so that the notice is read
            assert [each.weight_version for each in other.notices] == ["v3"]  # type: ignore[union-attr]


def sealing(client: GmsClient, lease: int, want: WeightsManifest, places: list[int] | None) -> str:
    """The code with which a rank's slabs are refused."""
    return refusal(lambda: client.seal(lease, want, places)).code


def inodes(client: GmsClient, generation: int) -> list[int]:
    _, descriptors = client.export(generation, 0)
    found = [os.fstat(descriptor).st_ino for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return found


def test_notices_come_to_a_thread_that_waits_for_them(directory: Path) -> None:
    with target(directory, cohort="notices") as active, target(directory, cohort="notices") as shadow:
        load(active, model="notices")
        found: list[object] = []
        shadow.listen(found.append)
        generation = shadow.ask(manifest(model="notices")).generation
        ended: list[bool] = []

        def watch() -> None:
            while shadow.take_notices():
                pass
            ended.append(True)

        thread = threading.Thread(target=watch)
        thread.start()
        for version in "ab":
            active.rename(generation, 0, version)
        until(lambda: len(found) == 2, "both notices")
        assert shadow.note("x") is None, "calls go on meanwhile"
        shadow.close()
        thread.join(60)
        assert ended == [True]


def test_a_connection_that_is_given_up_has_ended_for_all(directory: Path) -> None:
    """A call has had no answer in time. Who waits for notices must see it, so as to connect again."""
    client = target(directory)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(client.take_notices()), daemon=True)
    thread.start()
    with target(directory, tag="watch") as other:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "it waits")
        client._lost("as if it had not answered in time")
        until(lambda: len(other.status()["sessions"]) == 1, "the service sees the end")
    thread.join(DEADLINE_S)
    assert found == [False]


def test_an_update_makes_a_generation_beside_the_current_one(directory: Path) -> None:
    with target(directory, cohort="update") as active, target(directory, cohort="update") as shadow:
        first = load(active, model="update")
        assert shadow.ask(manifest(model="update")).generation == first
        epoch = active.claim()
        want = manifest(model="update")
        assert refusal(lambda: active.ask(want, "rw", update_epoch=epoch - 1)).code == "stale_epoch"
        grant = active.ask(want, "rw", update_epoch=epoch)
        assert grant.parent == first
        os.close(active.allocate(grant.lease, [SLAB])[0])
        active.seal(grant.lease, manifest(model="update", digests=(1,)))
        second = active.commit(grant.lease)
        assert shadow.note("x") is None  # so that the notice is read
        assert [notice.generation for notice in shadow.notices] == [second]  # type: ignore[union-attr]
        active.unpin(first)
        assert refusal(lambda: active.ask(want, "rw", wait_s=0.1, update_epoch=epoch)).code == "pinned"
        shadow.pin(second)
        shadow.unpin(first)
        assert all(each["generation"] != first for each in shadow.status()["generations"])
        older = active.ask(want, "rw", update_epoch=epoch)
        assert shadow.claim(seen=epoch) > epoch  # the shadow takes over, and the old engine's update is over
        assert refusal(lambda: active.commit(older.lease)).code == "lease"


def test_an_update_is_no_news_for_another_cohort_that_reads_the_same_weights(directory: Path) -> None:
    with (
        target(directory, cohort="one") as active,
        target(directory, cohort="one") as shadow,
        target(directory, cohort="two") as other,
    ):
        first = load(active, model="two cohorts")
        assert [each.ask(manifest(model="two cohorts")).generation for each in (shadow, other)] == [first] * 2
        grant = active.ask(manifest(model="two cohorts"), "rw", update_epoch=0)
        os.close(active.allocate(grant.lease, [SLAB])[0])
        active.seal(grant.lease, manifest(model="two cohorts", digests=(1,)))
        second = active.commit(grant.lease)
        assert [each.note("x") for each in (shadow, other)] == [None] * 2  # so that notices are read
        assert [notice.generation for notice in shadow.notices] == [second]  # type: ignore[union-attr]
        assert not other.notices
        # So it can update the weights that it reads, and its cohort's alone.
        assert other.ask(manifest(model="two cohorts"), "rw", update_epoch=0).parent == first


def test_a_version_is_that_of_the_cohort_that_has_given_it(directory: Path) -> None:
    with (
        target(directory, cohort="named") as active,
        target(directory, cohort="named") as shadow,
        target(directory, cohort="left alone") as other,
    ):
        want = manifest(model="renamed")
        generation = load(active, model="renamed", version="0")
        assert [each.ask(want).weight_version for each in (shadow, other)] == ["0", "0"]
        active.rename(generation, 0, "v7")
        assert [each.note("x") for each in (shadow, other)] == [None] * 2  # so that notices are read
        assert [notice.weight_version for notice in shadow.notices] == ["v7"]  # type: ignore[union-attr]
        assert not other.notices
        for cohort, version in {"named": "v7", "left alone": "0", "of later": "0"}.items():
            with target(directory, cohort=cohort) as later:
                found = later.ask(want)
                assert (found.generation, found.weight_version) == (generation, version), cohort
        (row,) = (each for each in active.status()["generations"] if each["generation"] == generation)
        assert row["version"] == "v7, 0"


def test_a_note_that_sessions_keep_ends_with_the_last_of_them(directory: Path) -> None:
    with target(directory, cohort="kept") as watch:
        with target(directory, cohort="kept") as second:
            with target(directory, cohort="kept") as first:
                assert first.put_note("sizes", b"a", keeps=True) == b"a"
                assert second.put_note("sizes", b"b", keeps=True) == b"a"
            until(lambda: "session_ended" in [each.kind for each in watch.events()], "the first has gone")
            assert watch.note("sizes") == b"a"
        until(lambda: watch.note("sizes") is None, "the note is still there")


def test_a_note_is_kept_as_first_written(directory: Path) -> None:
    with target(directory, cohort="notes") as first, target(directory, cohort="notes") as second:
        assert first.put_note("geometry", b"a") == b"a"
        assert second.put_note("geometry", b"b") == b"a"
        assert second.put_note("geometry", b"b", expect=b"a") == b"b"
        assert first.note("geometry") == b"b"


def test_who_waits_too_long_is_refused(directory: Path) -> None:
    with target(directory, cohort="slow") as loader, target(directory, cohort="slow") as other:
        loader.ask(manifest(model="slow"))
        assert refusal(lambda: other.ask(manifest(model="slow"), wait_s=0.3)).code == "timeout"
        until(lambda: loader.status()["waiting"] == [], "a refused session waits")


def test_a_service_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryServiceError, match="segue gms serve --gms-dir"):
        from segue.gms.client_connection import GmsTarget

        GmsClient(GmsTarget(directory=str(tmp_path), connect_s=0))
