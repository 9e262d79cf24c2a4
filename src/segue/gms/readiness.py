"""Whether the memory service and its holder answer: what a probe asks of them.

A process that was stopped or that hangs still has its socket, and the kernel takes connections for it. So a
probe asks for an answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.gms.transport import HOLDER_SOCKET, GmsFrameError, close, new_socket, receive, send

PROBE = "ready"  # the engine's name in the sessions of probes


def check_service(directory: str, token: str | None, timeout_s: float) -> list[str]:
    """Return the devices that the service serves; none if all of its sessions are in use: it answers, too.

    The probe only looks: a session of an engine would be an event each time, and count as one of a cohort.

    Raises:
        MemoryServiceError: it does not answer within ``timeout_s`` seconds, or refuses a client.
    """
    target = GmsTarget(
        directory=directory,
        tag="watch",
        token=token,
        engine=PROBE,
        connect_s=timeout_s,
        reply_s=timeout_s,
    )
    try:
        with GmsClient(target) as client:
            return client.opened.devices
    except MemoryServiceError as error:
        if error.code != "limit":
            raise
        return []


def check_holder(directory: str, timeout_s: float) -> None:
    """Have the holder of a directory answer.

    Raises:
        MemoryServiceError: it does not within ``timeout_s`` seconds, or does not run.
    """
    path = os.path.join(directory, HOLDER_SOCKET)
    with new_socket() as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            send(connection, b"P")
            frame, descriptors = receive(connection)
        except (OSError, GmsFrameError) as error:
            why = getattr(error, "strerror", None) or error
            raise _no_answer(path, directory, str(why)) from error
        close(descriptors)
        if frame != b"E":
            raise _no_answer(path, directory, "it closed the connection")


def failure_of(check: Callable[[], object]) -> str | None:
    """Return why a check fails, or None."""
    try:
        check()
    except MemoryServiceError as error:
        return error.message
    return None


def _no_answer(path: str, directory: str, why: str) -> MemoryServiceError:
    remedy = f"start one with `segue gms hold --gms-dir {directory}`, or end one that hangs"
    return MemoryServiceError(
        f"no holder of descriptors answers at {path} ({why}); {remedy}", param="gms_dir"
    )
