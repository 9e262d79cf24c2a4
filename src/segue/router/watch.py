"""One connection per worker for its reports: it tells at once when a worker dies, and soon when it hangs."""

from __future__ import annotations

import asyncio
import time

import msgspec

from segue.messages.fleet import FLEET_PROTOCOL, WorkerRecord, WorkerReport
from segue.router.deadline import within
from segue.router.entry import WorkerEntry
from segue.router.fleet import SILENT_S
from segue.router.foreign import poll
from segue.router.membership import Membership
from segue.router.upstream_connection import Headers, UpstreamConnection, UpstreamError

RETRY_S = 0.25  # from the end of a connection to the next try
LINE_BYTES = 1 << 20  # the most of one line
NOT_FOUND = 404  # no engine of Segue answers so
ROUTER_HEADER = "segue-router"  # by which a router names itself where an engine reports
_decode = msgspec.json.Decoder(WorkerRecord | WorkerReport).decode


async def watch(membership: Membership, entry: WorkerEntry, headers: Headers) -> None:
    """Read a worker's reports until this is cancelled; when a connection ends, another one is opened.

    Whoever waits for a reply of a worker that hangs gets an error, because the reply may never come. The
    end of the connection alone ends no reply: a worker that drains closes it before its last reply ends.
    """
    while True:
        try:
            request = entry.upstream.request(b"GET", b"/watch", headers, b"")
            connection = await within(SILENT_S, request)
            try:
                if connection.status != NOT_FOUND:
                    await _read(membership, entry, connection)
            finally:
                entry.upstream.done(connection)
            if connection.status == NOT_FOUND:
                _check_other(membership, connection)
                await poll(membership, entry, headers)
        except TimeoutError:
            text = f"it has sent no report for {SILENT_S:g} s"
            membership.lose(entry, text)
            entry.cut("timeout", text)
        except UpstreamError as error:
            membership.lose(entry, str(error))
        await asyncio.sleep(RETRY_S)


def _check_other(membership: Membership, connection: UpstreamConnection) -> None:
    """Raise UpstreamError if the router has asked itself: it would send itself requests without end."""
    name = dict(connection.headers).get(ROUTER_HEADER.encode())
    if name == membership.router_id.encode():
        raise UpstreamError("answered", "this URL leads to the router itself; give the URLs of engines")


async def _read(membership: Membership, entry: WorkerEntry, connection: UpstreamConnection) -> None:
    """Take the lines of one connection.

    Raises:
        UpstreamError: the worker has ended, refuses to be watched, or sends something else.
        TimeoutError: it has been silent for too long.
    """
    if connection.status != 200:
        raise UpstreamError("answered", _refusal(connection.status))
    rest = b""
    while True:
        if not (data := await within(SILENT_S, connection.read())):
            raise UpstreamError("cut", "the worker ends its reports: it is shutting down, or its engine died")
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LINE_BYTES:
            raise UpstreamError("cut", f"a line of its reports has more than {LINE_BYTES} bytes")
        for line in lines:
            _take(membership, entry, connection, line)


def _take(membership: Membership, entry: WorkerEntry, connection: UpstreamConnection, line: bytes) -> None:
    """Take one line; raises UpstreamError if it is not one of this version's.

    The server of an engine goes on reporting while its scheduler hangs. The replies of such an engine may
    never come, as those of one that is silent.
    """
    try:
        message = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamError("cut", f"a line of its reports cannot be read ({error})") from None
    if isinstance(message, WorkerReport):
        membership.report(entry, message, time.monotonic())
        if message.heartbeat_age_s > SILENT_S:
            text = f"its scheduler has sent no heartbeat for {SILENT_S:g} s"
            entry.cut("timeout", text, spared=connection)
    elif message.protocol != FLEET_PROTOCOL:
        raise UpstreamError(
            "cut",
            f"it speaks version {message.protocol} of the reports, and the router {FLEET_PROTOCOL}; use the "
            "same version of Segue for both",
        )
    elif (other := membership.same_engine(entry, message)) is not None:
        text = f"this URL leads to the same engine as {other.url}, which gets its requests"
        raise UpstreamError("answered", f"{text}; name each engine once")
    else:
        membership.introduce(entry, message)


def _refusal(status: int) -> str:
    """Returns why a worker sends no reports, by the status of its answer."""
    if status in (401, 403):
        return f"/watch was answered {status}: give its admin key by --worker-admin-key"
    if status == 503:
        return "/watch was answered 503: its engine is still starting, or has died"
    return f"/watch was answered {status}: check the URL"
