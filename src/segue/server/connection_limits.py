"""What a client may cost the server before its request is known to be good."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from segue.config import MIB

MAX_CONNECTIONS = 8192  # where descriptors allow it: twice as many as requests that wait by default
SPARE_CONNECTIONS = 32
BODY_BYTES = 64 * MIB
RESERVED_DESCRIPTORS = 96  # listener, event loop, pipes and sockets to the workers, files: about 60 are open


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Times in seconds, sizes in bytes, rates in bytes per second."""

    max_connections: int
    spare_connections: int = SPARE_CONNECTIONS  # above the maximum, for health routes alone

    head_bytes: int = 1 << 16  # a request's line and headers
    head_fields: int = 128  # headers of a request; each costs some 200 bytes of memory, however short it is
    pipelined_requests: int = 16  # that came behind one which is being answered
    head_s: float = 10.0  # from the first byte of a head, or from the connection's begin, to the head's end
    idle_s: float = 65.0  # between two requests of a connection

    body_silence_s: float = 30.0  # without a byte of the body
    body_rate: float = 1024.0  # of a body on average, counted from the end of the grace on
    body_grace_s: float = 5.0
    drain_s: float = 3.0  # for the rest of a body that was answered unread, so that the answer is seen
    body_bytes: int = BODY_BYTES  # of all requests that are not complete, or not yet taken
    crowded_rate: float = float(MIB)  # of a body on average while ``body_bytes`` is reached
    crowded_grace_s: float = 2.0

    reply_silence_s: float = 60.0  # in which a client takes next to nothing of a finished reply
    stream_silence_s: float = 300.0  # likewise of a stream that goes on
    reply_rate: float = 1024.0  # of a reply on average, over each of the times above

    evict_after_s: float = 0.25  # without a complete head, until a connection gives way to a new one
    stalled_after_s: float = 1.0  # silence after which a body gives way to a new connection
    sweep_s: float = 1.0  # between two looks at all connections

    @classmethod
    def of_this_process(cls, max_body_mib: int) -> Self:
        """As many connections as there are descriptors for; four of the largest bodies at once."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = MAX_CONNECTIONS * 2
        room = descriptors - RESERVED_DESCRIPTORS - SPARE_CONNECTIONS
        return cls(
            max_connections=min(MAX_CONNECTIONS, max(room, descriptors // 4)),
            body_bytes=max(BODY_BYTES, 4 * max_body_mib * MIB),
        )


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files as far as :data:`MAX_CONNECTIONS` needs and the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_CONNECTIONS + RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
