"""Which prefill engines a client's request, or a leg, may have a decode engine connect to.

Without a rule, whoever may send a request could have the engine open connections to any address that its host
reaches: a server-side request forgery. Names are compared as text, and never resolved for the comparison,
because their owner could let them point elsewhere a moment later.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from segue.errors import ConfigError, InvalidRequestError, short_repr
from segue.options import parse_list

OPTION = "--disaggregation-bootstrap-hosts"
LOOPBACK = "localhost,127.0.0.0/8,::1"
FAKE_HOST = "2.2.2.2"  # no engine: SGLang's balancers send it in their warm-up requests

_ENTRY = re.compile(r"(?:\[([^\]]+)\]|([^:]+)):(\d+)")  # an entry with a port


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedHost:
    """One entry of the option."""

    name: str | None  # in lower case; None: the entry is a network
    network: IPv4Network | IPv6Network | None
    port: int | None  # None: any


class BootstrapHosts:
    """The entries of the option, or by default what is on the engine's own host."""

    def __init__(self, text: str | None, own_host: str) -> None:
        """Take the option's ``text``; None: loopback addresses, and ``own_host``, where the engine listens.

        Raises:
            ConfigError: an entry cannot match any host.
        """
        is_wildcard = own_host in ("", "0.0.0.0", "::")
        self._allows_any = text == "*"
        if text is None:
            text = LOOPBACK if is_wildcard else f"{LOOPBACK},{own_host}"
        self._entries = [] if self._allows_any else parse_entries(text, OPTION)

    def check(self, host: str, port: int) -> None:
        """Let a client name this host and port.

        Raises:
            InvalidRequestError: the operator has not allowed it.
        """
        if not self._allows(host, port):
            raise _refusal(f"bootstrap_host={short_repr(host)}, bootstrap_port={port}", "bootstrap_host")

    def check_peer(self, peer: str) -> None:
        """Let a leg name a prefill engine by this ``HOST:PORT``: whoever may send requests may send legs.

        Raises:
            InvalidRequestError: the operator has not allowed it.
        """
        host, _, port = peer.rpartition(":")
        if not self._allows(host.removeprefix("[").removesuffix("]"), int(port)):
            raise _refusal(f"peer={short_repr(peer)}", "peer")

    def _allows(self, host: str, port: int) -> bool:
        name = host.rstrip(".").lower()
        address = _address(name)
        return self._allows_any or any(
            entry.port in (None, port)
            and (entry.name == name or (entry.network is not None and _is_in(address, entry.network)))
            for entry in self._entries
        )


def parse_entries(text: str, name: str) -> list[AllowedHost]:
    """Returns the entries of an option like "10.0.0.0/8,prefill-1.lan,[fd00::1]:8998"; "*" has none.

    Raises:
        ConfigError: an entry is neither a host name, nor an address, nor a network.
    """
    return [] if text == "*" else [_parse(entry, name) for entry in parse_list(text, name)]


def _refusal(what: str, param: str) -> InvalidRequestError:
    text = f"name a prefill engine that {OPTION} allows, or start this engine with the host in it"
    return InvalidRequestError(f"{what}: this engine may not connect there; {text}", param=param)


def _parse(entry: str, option: str) -> AllowedHost:
    host, port = entry.lower(), None
    if (found := _ENTRY.fullmatch(host)) is not None:
        host, port = found[1] or found[2], int(found[3])
    try:
        network = ipaddress.ip_network(host, strict=False)
    except ValueError:
        network = None
    is_host = network is not None or re.fullmatch(r"[\w.-]+", host) is not None
    if not is_host or (port is not None and not 0 < port < 65536):
        raise ConfigError(
            f"{option}: {entry!r} is neither a host name, like prefill-1.lan, nor an address or network, "
            "like 10.0.0.0/8; each may have a port from 1 to 65535, like prefill-1.lan:8998",
            param=option,
        )
    return AllowedHost(name=host.rstrip(".") if network is None else None, network=network, port=port)


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """Returns the address that a text is; None: it is a name, even if the C library takes it for one."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_in(address: IPv4Address | IPv6Address | None, network: IPv4Network | IPv6Network) -> bool:
    return address is not None and address.version == network.version and address in network
