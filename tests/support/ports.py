"""Ports for programs that cannot choose one themselves."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_CHOICE = random.SystemRandom()  # processes of one run must not draw the same ports


def free_port() -> int:
    """Returns a port that nobody has, and that the kernel gives to nobody before it is used.

    It is below those that the kernel chooses from, for connections and for listeners that ask for any port.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = _CHOICE.randrange(max(1024, low // 2), low) if low > 2048 else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
