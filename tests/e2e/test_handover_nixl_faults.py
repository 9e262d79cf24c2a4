"""A prefill and a decode engine in processes of their own hand KV over by NIXL; one is killed or cut off."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.disagg.lease import LOST_S
from segue.disagg.transports.nixl_agent import has_nixl
from tests.e2e import test_handover_faults as by_shared_memory
from tests.e2e.served import Served
from tests.e2e.test_handover_faults import TwoEngines, load, results

pytestmark = [
    pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed"),
    pytest.mark.usefixtures("nixl_over_tcp"),
    pytest.mark.slow,  # pages of a lost writer wait 30 s
]


class UnequalEngines(TwoEngines):
    """A prefill engine of two ranks: each sends a piece of every page of the decode engine."""

    def start(self, role: str, *options: str) -> Served:
        """Start an engine. Ranks add in another order, so the bits of the two cannot be equal."""
        self.options = [each for each in self.options if each != "--deterministic"]
        return super().start(role, f"--tp={2 if role == 'prefill' else 1}", *options)


@pytest.fixture(scope="module", params=[TwoEngines, UnequalEngines], ids=["equal ranks", "unequal ranks"])
def engines(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TwoEngines]:
    changes: dict[str, Any] = {"pd-transport": "nixl"}
    engines: TwoEngines = request.param(tiny_model, tmp_path_factory.mktemp("logs"), **changes)
    yield engines
    engines.close()


# With the engines above; with unequal ranks, pages are given up while their heads are put in order.
test_requests_are_aborted_at_any_moment = by_shared_memory.test_requests_are_aborted_at_any_moment
test_an_engine_is_paused_while_requests_are_under_way = (
    by_shared_memory.test_an_engine_is_paused_while_requests_are_under_way
)


def test_the_link_is_cut_and_comes_back(engines: TwoEngines) -> None:
    requests = load(engines, 30)
    for count in (1, 5, 12):
        engines.until(
            "requests are handed over",
            lambda count=count: (
                engines.state(engines.decode)["handover"]["num_adopted"] >= count
                or all(second.done() for (_, second), _ in requests)
            ),
        )
        engines.proxy.cut()
    firsts, seconds = results(engines, requests)
    assert set(firsts) == set(seconds) == {"length"}
    engines.check_alive()
    engines.check_all_home()


def test_a_killed_decode_engine_leaves_nothing_behind(engines: TwoEngines) -> None:
    requests = load(engines, 40)
    engines.until("a lease is granted", lambda: engines.state(engines.prefill)["handover"]["num_sent"] > 0)
    engines.kill(engines.decode)
    firsts, _ = results(engines, requests)
    assert set(firsts) == {"length"}
    engines.decode = engines.start("decode")
    engines.check_alive()


def leases(engines: TwoEngines) -> dict[str, int]:
    found: dict[str, int] = engines.state(engines.decode)["handover"]["leases"]
    return found


def test_pages_of_a_prefill_engine_that_was_killed_while_it_wrote_come_home(engines: TwoEngines) -> None:
    requests: list[Any] = []
    while not leases(engines).get("granted"):  # until the prefill engine is stopped where it may write
        engines.resume(engines.prefill)
        requests += (sent := load(engines, 8))
        engines.until(
            "leases are granted, or were",
            lambda sent=sent: leases(engines).get("granted") or all(each.done() for (_, each), _ in sent),
        )
        engines.stop(engines.prefill)
    killed_at = time.monotonic()
    engines.kill(engines.prefill)
    engines.until("its leases are quarantined", lambda: leases(engines).get("quarantined"))
    _, seconds = results(engines, requests)
    assert set(seconds) == {"length"}, "the decode engine computes the prompts itself"
    engines.until("the pages come home", lambda: not leases(engines), timeout=40.0)
    assert time.monotonic() - killed_at > LOST_S - 1, "somebody may still have written to them"
    engines.prefill = engines.start("prefill", f"--disaggregation-bootstrap-port={engines.kv_port}")
    engines.check_alive()
    engines.check_all_home()


def test_workers_that_hand_over_nothing_leave_the_cores_alone(engines: TwoEngines) -> None:
    def used() -> float:
        """Seconds of all threads of both workers."""
        pids = [*engines.prefill.workers(), *engines.decode.workers()]
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    begin = used()
    time.sleep(2.0)
    assert used() - begin < 0.2


def test_the_log_is_not_flooded(engines: TwoEngines) -> None:
    assert "Traceback" not in engines.log()
    assert len(engines.log().splitlines()) < 500
