"""Connecting to a trainer's store at an allowed address, with a way to stop.

torch's client of a store waits without limit for a reply from the peer that accepts its connection, and
cannot be told to stop. So its constructor gets a few seconds at a time, and later waits are ended by shutting
down its socket.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from segue.errors import WeightSyncError
from segue.messages.weight_operations import Group

_CONNECT_RETRY_S = 0.1
_CONNECT_S = 1.0  # per address, before the next one is tried
_STORE_S = 5.0  # per try of torch to connect to a peer that listens
Address = tuple[str, int]


class Stopped(Exception):
    """The attempt to connect was given up."""


def resolve(group: Group, allowed: Sequence[str]) -> list[Address]:
    """Returns the addresses of the group's store that are ``allowed``.

    ``allowed`` has host names, addresses and networks; if it is empty, every address is allowed.

    Raises:
        WeightSyncError: the host has no address, or none that is allowed.
    """
    found = _addresses(group.master_address, group.master_port)
    if not allowed or group.master_address in allowed:
        return found
    networks = [network for entry in allowed for network in _networks(entry)]
    found = [each for each in found if any(_ip(each[0]) in network for network in networks)]
    if not found:
        raise WeightSyncError(
            f"master_address {group.master_address!r} is not allowed: the server was started with "
            f"--weights-master-allow {','.join(allowed)}. Use one of these, or start it with another list",
            param="master_address",
        )
    return found


def connect(addresses: Sequence[Address], stopped: threading.Event) -> socket.socket:
    """Wait until one of the addresses accepts connections, and return a connection to it.

    Raises:
        Stopped: ``stopped`` was set before.
    """
    # torch would wait for a listener too, but prints a stack trace to standard error at each try.
    while not stopped.is_set():
        for address in addresses:
            with suppress(OSError):  # nobody listens there yet
                return _with_keepalive(socket.create_connection(address, timeout=_CONNECT_S))
        stopped.wait(_CONNECT_RETRY_S)
    raise Stopped


def join_store(group: Group, rank: int, peer: Address, stopped: threading.Event) -> Store:
    """Returns the store at ``peer``, which counts this rank as joined.

    Raises:
        Stopped: ``stopped`` was set before the store has answered.
    """
    where = f"tcp://{bracketed(peer[0])}:{peer[1]}"
    while not stopped.is_set():
        with suppress(dist.DistError):  # of any kind: torch has retried it itself
            store, _, _ = next(rendezvous(where, rank, group.world_size, timeout=timedelta(seconds=_STORE_S)))
            return cast(Store, store)
        stopped.wait(_CONNECT_RETRY_S)
    raise Stopped


def bracketed(address: str) -> str:
    """Returns an address as it is written in a URL: an IPv6 address in brackets."""
    return f"[{address}]" if ":" in address else address


def shut_down(peer: Address) -> None:
    """Shut down all connections of this process to ``peer``, which ends all waits for its answers."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _duplicate(int(name)) as connection:  # closed meanwhile, or not a socket
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                host, port, *_ = connection.getpeername()
                if port == peer[1] and _ip(host) == _ip(peer[0]):  # torch's connections use IPv6
                    connection.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Returns the same socket under a descriptor of its own, which no other thread can close and reuse."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _addresses(host: str, port: int) -> list[Address]:
    """Returns the addresses of a host, each once, in the resolver's order.

    Raises:
        WeightSyncError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise WeightSyncError(
            f"master_address {host[:255]!r} has no address: {error}. Give a host name or an IP address",
            param="master_address",
        ) from error
    return list(dict.fromkeys((str(address[0]), int(address[1])) for *_, address in found))


def _networks(entry: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the networks of one entry of the allowed list; none for a name that has no address."""
    try:
        return [ipaddress.ip_network(entry, strict=False)]
    except ValueError:
        with suppress(WeightSyncError):
            return [ipaddress.ip_network(_ip(address)) for address, _ in _addresses(entry, 0)]
        return []


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address without its zone, and an IPv4 address that is written as IPv6 as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _with_keepalive(link: socket.socket) -> socket.socket:
    """Returns the connection, made non-blocking; the kernel then notices a silent host within 25 s."""
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # to notice a host that vanishes
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return link
