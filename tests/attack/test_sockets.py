"""Eleven hundred sockets that never finish a request, against a server that may open 1,024 files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attack.sockets import MIB, attack
from tests.server.test_lifecycle import ServerProcess
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.alone

TRIES = 3  # a stall of the server occurs in every try, a stall of the machine does not
LONGEST_S = 0.5
NUM_SOCKETS = (
    1_100  # an eighth of them is refused at once and waits to connect again: about 980 are open together
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seconds", "hard_limit"),
    [
        pytest.param(5.0, 1024, id="short"),
        pytest.param(60.0, 1024, id="long", marks=pytest.mark.slow),
        pytest.param(60.0, 4096, id="long, the soft limit may be raised", marks=pytest.mark.slow),
    ],
)
def test_health_is_answered_and_memory_is_bounded(tmp_path: Path, seconds: float, hard_limit: int) -> None:
    model = write_model(tmp_path / "tiny-model")
    with ServerProcess(model, {"FAKE_STEP_S": "0.01"}, open_files=(1024, hard_limit)) as server:
        host, port = server.ready().removeprefix("http://").split(":")
        longest = []
        for seed in range(TRIES):
            seen = attack(
                host, int(port), seconds, seed=seed, num_sockets=NUM_SOCKETS, pid=server.process.pid
            )
            assert seen.most_open >= 900
            assert len(seen.num_opened) == 8
            assert seen.failures == {}
            assert seen.memory_growth <= 200 * MIB
            longest.append(max(seen.health_s))
            if longest[-1] <= LONGEST_S:
                return
        raise AssertionError(f"/health took {[round(each, 2) for each in longest]} s")
