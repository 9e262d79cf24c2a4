"""Meeting a trainer's store: the one address that is allowed and listens, waited for in a way that can end.

torch's client of a store waits for a reply of whoever accepts its connection without any limit, and cannot be
told to stop. So its constructor gets a few seconds at a time, and what it waits for after that ends when its
socket is shut down.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
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
_CONNECT_S = 1.0  # for one address, before the next is tried
_STORE_S = 5.0  # for torch to connect to somebody who listens
Address = tuple[str, int]


def resolve(group: Group, allowed: Sequence[str]) -> list[Address]:
    """The addresses of the group's store that are ``allowed``: by names, addresses or networks; none: any.

    Raises:
        WeightSyncError: the name has no address, or none that is allowed.
    """
    found = _addresses(group.master_address, group.master_port)
    if not allowed or group.master_address in allowed:
        return found
    networks = [network for entry in allowed for network in _networks(entry)]
    found = [each for each in found if any(_ip(each[0]) in network for network in networks)]
    if not found:
        raise WeightSyncError(
            f"master_address {group.master_address!r} is not allowed: the server was started with "
            f"--weights-master-allow {','.join(allowed)}",
            param="master_address",
        )
    return found


def connect(addresses: Sequence[Address], deadline: float, stopped: threading.Event) -> socket.socket:
    """A connection to the first address where somebody listens, as soon as that is so.

    Raises:
        TimeoutError: nobody does at the deadline, or it was stopped.
    """
    # torch would wait for somebody to listen too, but with a stack trace on standard error at each try.
    while True:
        for address in addresses:
            if stopped.is_set():
                raise TimeoutError
            with suppress(OSError):
                patience = min(_CONNECT_S, remaining(deadline).total_seconds())
                return _kept_alive(socket.create_connection(address, timeout=patience))
        if time.monotonic() + _CONNECT_RETRY_S >= deadline or stopped.wait(_CONNECT_RETRY_S):
            raise TimeoutError


def join_store(group: Group, rank: int, peer: Address, deadline: float, stopped: threading.Event) -> Store:
    """The store at ``peer``, where this rank is counted as one that has come.

    Raises:
        TimeoutError: it did not answer until the deadline, or it was stopped.
    """
    host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
    while True:
        timeout = min(remaining(deadline), timedelta(seconds=_STORE_S))
        try:
            store, _, _ = next(rendezvous(f"tcp://{host}:{peer[1]}", rank, group.world_size, timeout=timeout))
        except dist.DistError:  # whatever it is, torch has tried again and again
            if stopped.wait(_CONNECT_RETRY_S):
                raise TimeoutError from None
            continue
        store.set_timeout(remaining(deadline))
        return cast(Store, store)


def shut_down(peer: Address) -> None:
    """Shut down all connections of this process to ``peer``: no wait for an answer from there goes on."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy_of(int(name)) as connection:  # closed meanwhile, or no connection
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                host, port, *_ = connection.getpeername()
                if port == peer[1] and _ip(host) == _ip(peer[0]):  # torch's own are of IPv6
                    connection.shutdown(socket.SHUT_RDWR)


def _copy_of(descriptor: int) -> socket.socket:
    """The same socket under a number of its own, which cannot become another's meanwhile."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def remaining(deadline: float) -> timedelta:
    """Until the deadline, of the monotonic clock.

    Raises:
        TimeoutError: it has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return timedelta(seconds=seconds)


def _addresses(host: str, port: int) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise WeightSyncError(
            f"master_address {host[:255]!r} is no address: {error}.", param="master_address"
        ) from error
    return list(dict.fromkeys((str(address[0]), int(address[1])) for *_, address in found))


def _networks(entry: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """What an entry of the option stands for; a name that has no address stands for nothing."""
    try:
        return [ipaddress.ip_network(entry, strict=False)]
    except ValueError:
        with suppress(WeightSyncError):
            return [ipaddress.ip_network(_ip(address)) for address, _ in _addresses(entry, 0)]
        return []


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes says nothing
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return link
