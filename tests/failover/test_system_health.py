from __future__ import annotations

import pytest

from segue.config import HealthStatus
from segue.failover.system_health import SystemHealth


@pytest.mark.parametrize("starting", ["ready", "notready"])
def test_with_nothing_else_the_status_of_the_system_decides(starting: HealthStatus) -> None:
    health = SystemHealth(starting)
    assert health.get_health_status() == (starting == "ready", {})
    health.set_health_status("ready")
    assert health.get_health_status() == (True, {})
    health.set_endpoint("generate", "notready")
    assert health.get_health_status() == (True, {"generate": "notready"}), "it is neither listed nor checked"


def test_endpoints_with_a_health_check_come_before_the_system() -> None:
    health = SystemHealth("ready")
    health.add_health_check("generate")
    assert health.get_health_status() == (False, {}), "an endpoint that nobody has registered is not ready"
    health.set_endpoint("generate", "ready")
    health.set_health_status("notready")
    assert health.get_health_status() == (True, {"generate": "ready"})
    health.add_health_check("clear")
    assert not health.get_health_status()[0], "all of them must be ready"


def test_listed_endpoints_come_before_all_else() -> None:
    health = SystemHealth("ready", ["generate"])
    health.add_health_check("clear")
    health.set_endpoint("clear", "ready")
    assert not health.get_health_status()[0]
    health.set_endpoint("generate", "ready")
    health.set_endpoint("clear", "notready")
    assert health.get_health_status() == (True, {"clear": "notready", "generate": "ready"})
    health.set_endpoint("generate", "notready")
    assert not health.get_health_status()[0]


def test_without_states_a_shadow_is_ready_from_the_end_of_its_start_and_then_by_its_endpoint() -> None:
    """The scheme without an explicit state: nothing is listed, and the status is set after the start."""
    health = SystemHealth("notready")
    seen = [health.get_health_status()[0]]
    health.set_health_status("ready")  # loaded: it stands by
    seen.append(health.get_health_status()[0])
    health.add_health_check("generate")  # it wakes
    seen.append(health.get_health_status()[0])
    health.set_endpoint("generate", "ready")
    seen.append(health.get_health_status()[0])
    assert seen == [False, True, False, True]
