"""The addresses of workers' connections: ``HOST:PORT``, ``[IPv6]:PORT`` or ``unix:PATH``."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from contextlib import suppress

from segue import listener
from segue.errors import ConfigError, KVLinkLostError

UNIX = "unix:"
MAX_UNIX_PATH = 107  # bytes that the kernel takes
PORT_OPTION = "--disaggregation-bootstrap-port"

# What `socket.connect` takes, with the address family.
SocketAddress = tuple[socket.AddressFamily, str | tuple[str, int] | tuple[str, int, int, int]]


def parse(address: str) -> tuple[str, int] | str:
    """Returns host and port of an address, or the path of a unix socket.

    Raises:
        ConfigError: it has none of the three forms.
    """
    if address.startswith(UNIX):
        path = address.removeprefix(UNIX)
        if 0 < len(os.fsencode(path)) <= MAX_UNIX_PATH and "\0" not in path:
            return path
        raise ConfigError(
            f"address {address!r}: a unix path must have 1 to {MAX_UNIX_PATH} bytes; choose another"
        )
    host, colon, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    is_port = colon and port.isascii() and port.isdecimal() and int(port) <= 65535
    if not (is_port and host) or (":" in host) != in_brackets:
        raise ConfigError(f"address {address!r} must be HOST:PORT, [IPv6]:PORT or unix:PATH; change it")
    return host, int(port)


def listen(address: str) -> socket.socket:
    """Returns a non-blocking socket that listens on an address.

    The file of a unix socket is for this user only. One that a killed process left behind is replaced.

    Raises:
        ConfigError: the address is malformed, in use, or not one of this machine.
    """
    where = parse(address)
    if isinstance(where, str):
        sock = _bind_unix(where)
        sock.listen(listener.BACKLOG)
    else:
        sock = listener.bind(*where, port_option=PORT_OPTION)
        try:
            listener.listen(sock, port_option=PORT_OPTION)
        except ConfigError:
            sock.close()
            raise
    sock.setblocking(False)
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if _is_stale(path):
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        sock.close()
        remedy = "stop the process that listens there, or choose another path"
        raise ConfigError(f"cannot listen on {UNIX}{path}: {error.strerror}; {remedy}") from None
    return sock


def _is_stale(path: str) -> bool:
    """Whether there is a unix socket on which nobody listens."""
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if stat.S_ISSOCK(os.stat(path).st_mode):
            return probe.connect_ex(path) == errno.ECONNREFUSED
    return False


def close_listener(sock: socket.socket) -> None:
    """Close a listening socket, and remove its file if it is a unix socket."""
    if sock.family == socket.AF_UNIX:
        with suppress(FileNotFoundError):
            os.unlink(sock.getsockname())
    sock.close()


def address_of(sock: socket.socket) -> str:
    """Returns the address that a socket is bound to; port 0 has become the one that the kernel picked."""
    if sock.family == socket.AF_UNIX:
        return f"{UNIX}{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: str, *, numeric: bool = False) -> list[SocketAddress]:
    """Returns the socket addresses that an address stands for, the preferred one first.

    A host name may take seconds to resolve. ``numeric``: return no address for one, at once.

    Raises:
        ConfigError: the address is malformed.
        KVLinkLostError: the name is not known.
    """
    where = parse(address)
    if isinstance(where, str):
        return [(socket.AF_UNIX, where)]
    flags = socket.AI_NUMERICHOST if numeric else 0
    try:
        found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a possible host name
        if numeric:
            return []
        reason = getattr(error, "strerror", None) or error
        raise KVLinkLostError(f"host {where[0]!r} of {address} is not known ({reason}); check it") from None
    return [(family, name) for family, _, _, _, name in found]  # type: ignore[misc]


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connected socket are on this machine by their addresses: loopback or unix."""
    if sock.family == socket.AF_UNIX:
        return True
    return all(_is_loopback(name[0]) for name in (sock.getsockname(), sock.getpeername()))


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
