"""Limits on what a client may cost the server before its request has been checked."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Self

from segue.config import MIB

MAX_CONNECTIONS = 8192  # where descriptors allow it: twice the default of `--max-queued-requests`
SPARE_CONNECTIONS = 32
BODY_BYTES = 64 * MIB
RESERVED_DESCRIPTORS = 96  # listener, event loop, pipes and sockets to the workers, files: about 60 are open


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of a server: times in seconds, sizes in bytes, rates in bytes per second."""

    max_connections: int
    spare_connections: int = SPARE_CONNECTIONS  # beyond `max_connections`, for health routes only

    head_bytes: int = 1 << 16  # of a request's line and headers
    head_fields: int = 128  # headers per request; each takes about 200 bytes of memory, however short it is
    pipelined_requests: int = 16  # received while another request is being answered
    head_s: float = 10.0  # from the first byte of a head, or the begin of the connection, to the head's end
    idle_s: float = 65.0  # between two requests on a connection

    body_silence_s: float = 30.0  # without a byte of the body
    body_rate: float = 1024.0  # average of a body, counted from the end of the grace time
    body_grace_s: float = 5.0
    drain_s: float = 3.0  # for the rest of an unread body, so that the client reads the answer
    body_bytes: int = BODY_BYTES  # of all requests that are incomplete, or not yet read by the application
    crowded_rate: float = float(MIB)  # average of a body while `body_bytes` is reached
    crowded_grace_s: float = 2.0

    reply_silence_s: float = 60.0  # over which a client must read a finished reply at `reply_rate`
    stream_silence_s: float = 300.0  # the same for a stream that is not finished
    reply_rate: float = 1024.0  # average of a reply over each of the two times above

    evict_after_s: float = 0.25  # after which a connection without a complete head gives way to a new one
    stalled_after_s: float = 1.0  # silence after which a connection gives way to a new one
    sweep_s: float = 1.0  # between two checks of all connections

    @classmethod
    def of_this_process(cls, max_body_mib: int) -> Self:
        """Returns the limits for this process's descriptors and four bodies of ``max_body_mib`` at once."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = MAX_CONNECTIONS * 2
        room = descriptors - RESERVED_DESCRIPTORS - SPARE_CONNECTIONS
        return cls(
            max_connections=min(MAX_CONNECTIONS, max(room, descriptors // 4)),
            body_bytes=max(BODY_BYTES, 4 * max_body_mib * MIB),
        )


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the need of :data:`MAX_CONNECTIONS`, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_CONNECTIONS + RESERVED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
