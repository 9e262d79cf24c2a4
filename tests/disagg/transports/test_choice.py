"""Which transports a rank offers."""

from __future__ import annotations

import pytest

from segue.config import TransportChoice
from segue.disagg.transports.choice import TRAITS, kinds_to_offer, kinds_to_withhold
from segue.errors import ConfigError


@pytest.mark.parametrize(
    ("choice", "device", "has_key", "has_nixl", "kinds"),
    [
        ("auto", "cpu", True, True, ["shm", "nixl"]),
        ("auto", "cpu", True, False, ["shm"]),
        ("auto", "cpu", False, True, ["shm"]),
        ("auto", "cuda", True, True, ["cuda_ipc", "nixl"]),
        ("auto", "cuda", False, True, ["cuda_ipc"]),
        ("shm", "cpu", True, True, ["shm"]),
        ("cuda_ipc", "cuda", True, True, ["cuda_ipc"]),
        ("nixl", "cpu", False, False, ["nixl"]),
        ("nixl", "cuda", False, False, ["nixl"]),
    ],
)
def test_nixl_is_offered_on_demand_or_where_other_hosts_can_connect(
    choice: TransportChoice, device: str, has_key: bool, has_nixl: bool, kinds: list[str]
) -> None:
    assert kinds_to_offer(choice, device, has_key=has_key, has_nixl=has_nixl) == kinds
    assert set(kinds) <= set(TRAITS)
    withheld = kinds_to_withhold(choice, device, has_key=has_key, has_nixl=has_nixl)
    assert withheld.keys() == set(TRAITS) - set(kinds) and all(withheld.values())


def test_what_nixl_lacks_is_named() -> None:
    def reason(has_key: bool, has_nixl: bool) -> str:
        return kinds_to_withhold("auto", "cpu", has_key=has_key, has_nixl=has_nixl)["nixl"]

    assert "--pd-key" in reason(False, True) and "install" not in reason(False, True)
    assert "install 'segue[nixl]'" in reason(True, False) and "--pd-key" not in reason(True, False)
    assert kinds_to_withhold("nixl", "cpu", has_key=True, has_nixl=True)["shm"] == "--pd-transport names nixl"


@pytest.mark.parametrize(("choice", "device"), [("cuda_ipc", "cpu"), ("shm", "cuda")])
def test_a_transport_of_another_device_is_refused(choice: TransportChoice, device: str) -> None:
    with pytest.raises(ConfigError, match=f"{choice} does not move KV of --device {device}; use .* nixl"):
        kinds_to_offer(choice, device, has_key=True, has_nixl=True)
