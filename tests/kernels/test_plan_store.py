"""Stored tables and the cache of plans: which devices they serve, and what damage does."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from segue.kernels.plan_store import (
    PlanCache,
    lookup,
    merge,
    source_digest,
    stored_plans,
    table_of,
)
from tests.kernels.test_gemm_plan import H200, L40S

VERSIONS = {"torch": "2.11", "triton": "3.6", "kernels": "abc"}
PLAN = {"tma": False, "block_m": 16}
PLANS = {"4096x4096": {"8": {"split": PLAN, "whole": None}}}


@pytest.fixture
def cache(tmp_path) -> PlanCache:
    return PlanCache.of(tmp_path, H200, VERSIONS)


# Stored tables.


def write_table(path: Path, **changes) -> Path:
    table = {"capability": "9.0", "num_sms": 132, "memory_gib": 140, "device": "NVIDIA H200", "plans": PLANS}
    path.write_text(json.dumps([table | changes]))
    return path


def test_a_table_serves_a_device_of_another_name(tmp_path) -> None:
    table = write_table(tmp_path / "table.json")
    assert stored_plans(table, replace(H200, name="NVIDIA GH200 144G HBM3e", memory_bytes=141 << 30)) == PLANS


@pytest.mark.parametrize(
    "other",
    [
        replace(H200, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30),  # slower memory
        replace(H200, name="NVIDIA H200 MIG 3g.71gb", num_sms=60),
        replace(H200, capability=(10, 0)),
        L40S,
    ],
    ids=["memory", "SMs", "capability", "L40S"],
)
def test_a_table_does_not_serve_another_kind_of_device(tmp_path, other) -> None:
    table = write_table(tmp_path / "table.json")
    assert stored_plans(table, other) == {}
    same = other.capability == H200.capability
    assert stored_plans(table, other, any_size=True) == (PLANS if same else {})


def test_no_table_has_no_plans(tmp_path) -> None:
    assert stored_plans(tmp_path / "none.json", H200) == {}


def test_the_packaged_tables_serve_an_h200() -> None:
    import segue

    for name in ("gemm", "moe"):
        assert stored_plans(Path(segue.__path__[0]) / "kernels" / "triton" / f"{name}.json", H200)


def test_a_new_device_gets_a_table_of_its_own() -> None:
    tables: list[dict] = []
    table_of(tables, H200)["1x1"] = {}
    assert table_of(tables, replace(H200, name="another name")) == {"1x1": {}}
    assert table_of(tables, L40S) == {}
    assert [table["device"] for table in tables] == [H200.name, L40S.name]


def test_the_first_source_that_knows_a_gemm_decides() -> None:
    stored = {"4096x4096": {"8": {"whole": None}, "64": {"whole": {"stages": 6}}}}
    found = {"4096x4096": {"64": {"whole": {"stages": 3}, "gated": {"stages": 4}}}}
    sources = [(stored, "whole"), (found, "whole")]
    assert lookup(sources, "4096x4096", 8) is None  # measured: the library is faster
    assert lookup(sources, "4096x4096", 9) == {"stages": 6}
    assert lookup(sources, "4096x4096", 65) is None
    assert lookup(sources, "1x1", 1) is None
    assert lookup([(stored, "gated"), (found, "gated")], "4096x4096", 1) == {"stages": 4}


def test_few_rows_never_take_the_plan_that_only_many_rows_have() -> None:
    """Gate and up projections of up to 64 rows are gated, or left to the library; above they are split."""
    found = {"8192x1024": {"64": {"gated": None}, "96": {"split": PLAN}}}
    assert lookup([(found, "split")], "8192x1024", 64) is None
    assert lookup([(found, "split")], "8192x1024", 65) == PLAN


# The cache.


def test_plans_are_read_back(cache) -> None:
    assert cache.load() == {}
    cache.add(PLANS)
    assert cache.load() == PLANS
    assert not list(cache.path.parent.glob(".*.tmp"))


def test_plans_are_added_to_those_of_other_starts(cache) -> None:
    cache.add({"4096x4096": {"64": {"split": None}}})
    cache.add({"1024x1024": {"8": {"whole": PLAN}}})
    assert (
        cache.add(PLANS)
        == cache.load()
        == {
            "4096x4096": {"8": {"split": PLAN, "whole": None}, "64": {"split": None}},
            "1024x1024": {"8": {"whole": PLAN}},
        }
    )
    assert list(cache.load()["4096x4096"]) == ["8", "64"]  # `lookup` takes the first that is large enough


def test_the_newer_of_two_plans_is_kept() -> None:
    newer = {"1x1": {"8": {"split": PLAN}}}
    assert merge({"1x1": {"8": {"split": None}}}, newer) == newer


@pytest.mark.parametrize(
    ("device", "versions"),
    [
        (replace(H200, capability=(9, 1)), VERSIONS),
        (replace(H200, num_sms=114), VERSIONS),
        (replace(H200, name="NVIDIA H100"), VERSIONS),
        (H200, VERSIONS | {"torch": "2.12"}),
        (H200, VERSIONS | {"triton": "3.7"}),
        (H200, VERSIONS | {"kernels": "abd"}),
    ],
)
def test_other_devices_and_versions_have_files_of_their_own(tmp_path, cache, device, versions) -> None:
    cache.add(PLANS)
    assert PlanCache.of(tmp_path, device, versions).load() == {}


def truncate(text: str) -> str:
    return text[: len(text) // 2]


def flip_a_digit(text: str) -> str:
    return text.replace('"block_m": 16', '"block_m": 17')


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_digit,
        lambda text: "",
        lambda text: "null",
        lambda text: "[]",
        lambda text: '{"plans": {}}',
        lambda text: text.replace("plans", "plan"),
    ],
)
def test_a_damaged_file_is_not_used_and_replaced(cache, caplog, damage) -> None:
    cache.add(PLANS)
    cache.path.write_text(damage(cache.path.read_text()))
    assert cache.load() == {}
    assert "measured again" in caplog.text
    cache.add(PLANS)
    assert cache.load() == PLANS


def test_bytes_that_are_no_text_are_damage(cache) -> None:
    cache.path.parent.mkdir()
    cache.path.write_bytes(b"\xff\xfe\x00{")
    assert cache.load() == {}


def test_a_directory_that_cannot_be_written_costs_only_a_warning(tmp_path, caplog) -> None:
    (tmp_path / "plans").write_text("a file where the directory should be")
    cache = PlanCache.of(tmp_path, H200, VERSIONS)
    assert cache.add(PLANS) == PLANS
    assert "cannot be written" in caplog.text
    assert "--cache-dir" in caplog.text


def write_often(cache: PlanCache, writer: int) -> None:
    for number in range(20):
        cache.add({f"{writer}x{number}": PLANS["4096x4096"]})


def test_writers_at_the_same_time_lose_nothing(cache) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(cache, writer)) for writer in range(3)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        if cache.path.exists():
            json.loads(cache.path.read_text())  # whole at any time
    for process in writers:
        process.join()
        assert process.exitcode == 0
    assert len(cache.load()) == 60
    assert not list(cache.path.parent.glob(".*.tmp"))


def test_engines_that_start_together_measure_once(cache) -> None:
    """The second one waits for the first, and finds its plans."""
    found, holds, waits = [], Event(), Event()

    def second() -> None:
        holds.wait(20)
        waits.set()
        with cache.measuring(20):
            found.append(cache.load())

    thread = Thread(target=second)
    thread.start()
    with cache.measuring(0):
        holds.set()
        assert waits.wait(20)
        cache.add(PLANS)
    thread.join(20)
    assert found == [PLANS]


def test_the_wait_for_an_engine_that_measures_has_an_end(cache) -> None:
    entered = []
    with cache.measuring(0), cache.measuring(0.15):
        entered.append(True)
    assert entered


def test_without_locks_engines_measure_all_the_same(monkeypatch, cache) -> None:
    def flock(file, operation) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.measuring(20):
        assert cache.add(PLANS) == PLANS
    assert cache.load() == PLANS


def test_the_digest_is_of_names_and_contents(tmp_path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a"), two.write_text("b")
    before = source_digest([one, two])
    assert source_digest([two, one]) == before
    two.write_text("c")
    assert source_digest([one, two]) != before
    os.unlink(two)
    assert source_digest([one]) != before
