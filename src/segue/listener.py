"""The socket of an HTTP server. Binding and listening are apart: a server may wait until it is to serve."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from urllib.parse import urlsplit

from segue.errors import ConfigError

BACKLOG = 2048  # connections that the kernel completes before the server accepts them


def bind(host: str, port: int, *, port_option: str = "--port") -> socket.socket:
    """Take the port; called before a model loads, so that a port in use is reported at once.

    ``port_option`` is the option that sets the port, for error messages.

    Raises:
        ConfigError: the port is in use or needs privileges, or the address is not one of this machine.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a possible host name
        if listener is not None:
            listener.close()
        raise _refusal(error, host, port, port_option) from None
    return listener


def listen(listener: socket.socket, *, port_option: str = "--port") -> None:
    """Have the kernel accept connections.

    Raises:
        ConfigError: another process listens on the port since it was bound.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _refusal(error, host, port, port_option) from None


def sibling(listener: socket.socket) -> socket.socket:
    """Return a further socket at the address of a bound one that itself never listens.

    Among siblings that listen, the kernel spreads new connections evenly and at random; those of a process
    that ends go to the others from then on. Processes that are no siblings, and those of other users, cannot
    take the port meanwhile.

    Raises:
        OSError: the kernel allows no further socket there.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other = socket.socket(listener.family, listener.type, listener.proto)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(listener.getsockname())
    except OSError:
        other.close()
        raise
    return other


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The base URL of a bound socket, at which a server speaks ``scheme``."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def with_host_of(url: str, other: str) -> str:
    """Return a URL with the host of another one, and its own port."""
    host = urlsplit(other).hostname or ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def own_address(host: str, port: int) -> str:
    """The address at which ``host`` can reach this machine, an IPv4 one if possible."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _refusal(error: Exception, host: str, port: int, option: str) -> ConfigError:
    """Return the error for a socket that could not be bound or listen, with what the user can do."""
    param = option.strip("-").replace("-", "_")
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        remedy = f"stop the process that listens there, or choose another with {option} (0 picks a free one)"
        return ConfigError(f"port {port} on {host} is in use; {remedy}", param=param)
    if number == errno.EACCES:
        return ConfigError(f"port {port} needs privileges; choose one above 1023 with {option}", param=param)
    text = f"cannot listen on host {host!r}: {getattr(error, 'strerror', error)}; check --host"
    return ConfigError(text, param="host")
