"""What a client may have a decode engine connect to."""

from __future__ import annotations

import re

import pytest

from segue.bootstrap_hosts import BootstrapHosts, parse_entries
from segue.errors import ConfigError, InvalidRequestError


def allows(option: str | None, host: str, port: int = 8998, own_host: str = "127.0.0.1") -> bool:
    try:
        BootstrapHosts(option, own_host).check(host, port)
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"]
)
def test_by_default_a_client_may_name_this_host(host: str) -> None:
    assert allows(None, host) and allows(None, host, own_host="0.0.0.0")


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.5",
        "169.254.169.254",  # where clouds keep credentials
        "fd00::1",
        "prefill-1.lan",
        "localhost.example",
        "127.0.0.1.nip.io",  # a name that resolves to a loopback address today
        "127.1",  # these four are loopback addresses for the C library, and names here
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "0.0.0.0",
        "::",
        "",
        "unix:/run/x",
        "::ffff:10.0.0.5",
    ],
)
def test_by_default_a_client_may_name_no_other_host(host: str) -> None:
    assert not allows(None, host) and not allows(None, host, own_host="0.0.0.0")


def test_prefill_engines_at_the_engines_own_address_are_allowed() -> None:
    assert allows(None, "10.0.0.5", own_host="10.0.0.5") and allows(None, "gpu-1", own_host="gpu-1")
    assert not allows(None, "10.0.0.6", own_host="10.0.0.5")


@pytest.mark.parametrize(
    ("option", "host", "port"),
    [
        ("10.0.0.0/8", "10.1.2.3", 1),
        ("prefill-1.lan,10.0.0.5", "Prefill-1.LAN", 8998),
        ("prefill-1.lan:8998", "prefill-1.lan", 8998),
        ("10.0.0.0/8:8998", "10.1.2.3", 8998),
        ("[fd00::1]:8998", "fd00::1", 8998),
        ("fd00::/8", "fd00::7", 8998),
        ("*", "anything.example", 22),
    ],
)
def test_the_option_allows_names_addresses_and_networks(option: str, host: str, port: int) -> None:
    assert allows(option, host, port)


@pytest.mark.parametrize(
    ("option", "host", "port"),
    [
        ("10.0.0.0/8", "127.0.0.1", 8998),  # the option takes the place of the default
        ("10.0.0.5:8998", "10.0.0.5", 22),
        ("[fd00::1]:8998", "fd00::1", 22),
        ("prefill-1.lan", "prefill-1.lan.example", 8998),
    ],
)
def test_the_option_allows_nothing_else(option: str, host: str, port: int) -> None:
    assert not allows(option, host, port)


def test_a_refusal_names_value_rule_and_remedy() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        BootstrapHosts("10.0.0.5", "127.0.0.1").check("169.254.169.254", 80)
    assert raised.value.message == (
        "bootstrap_host='169.254.169.254', bootstrap_port=80: this engine may not connect there; name a "
        "prefill engine that --disaggregation-bootstrap-hosts allows, or start this engine with the host in "
        "it"
    )
    assert raised.value.param == "bootstrap_host" and "10.0.0.5" not in raised.value.message


@pytest.mark.parametrize(
    "text", ["a,,b", "10.0.0.0/40", "a b", "x:0", "10.0.0.1:70000", "http://x", "[fd00::1"]
)
def test_an_entry_that_can_match_nothing_is_a_mistake(text: str) -> None:
    with pytest.raises(ConfigError, match="option"):
        parse_entries(text, "option")


@pytest.mark.parametrize(
    ("peer", "is_allowed"),
    [
        ("10.0.0.5:8998", True),
        ("10.0.0.5:8999", False),
        ("prefill-1.lan:1", True),
        ("[fd00::1]:8998", True),
        ("[fd01::1]:8998", False),
        ("169.254.169.254:80", False),
    ],
)
def test_the_prefill_engine_of_a_leg_is_checked_by_its_address(peer: str, is_allowed: bool) -> None:
    hosts = BootstrapHosts("10.0.0.5:8998,prefill-1.lan,fd00::/16", "127.0.0.1")
    if is_allowed:
        hosts.check_peer(peer)
        return
    with pytest.raises(InvalidRequestError, match=f"peer='{re.escape(peer)}': this engine may not") as raised:
        hosts.check_peer(peer)
    assert raised.value.param == "peer"
