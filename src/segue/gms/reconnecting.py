"""Keeps a rank's session with the memory service: one that is lost is opened again, with what the rank reads.

A rank has its mappings, so it needs no service in order to serve. When the service comes back it knows from
its holder what it had. If it does not, the rank offers its own descriptors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient
from segue.gms.manifest import WeightsManifest, difference
from segue.gms.transport import close
from segue.logs import logger

FIRST_PAUSE_S = 0.1  # between two tries; it doubles
LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What a rank reads."""

    generation: int
    manifest: WeightsManifest
    descriptors: list[int]  # of all its slabs; whoever has asked for them closes them
    is_loaded: bool  # from files; otherwise it came from a weight update
    weight_version: str = ""
    model_path: str | None = None


class HeldWeights(Protocol):
    """The weights that a rank reads; other threads may exchange them."""

    def kept(self) -> KeptWeights:
        """Return what is read now, with copies of the descriptors."""

    def renumber(self, number: int) -> None:
        """Note that the service has given another number to what is read."""


class SessionKeeper:
    """Watches a client's connection from a thread, and opens it again."""

    def __init__(
        self,
        client: GmsClient,
        held: HeldWeights,
        *,
        epoch: Callable[[], int],
        on_change: Callable[[bool], None],
        on_reopened: Callable[[], None],
        on_stale: Callable[[MemoryServiceError], None],
    ) -> None:
        """Begin to watch.

        Args:
            client: the session, which is open.
            held: what the rank reads.
            epoch: returns that of the engine; 0: it does not serve.
            on_change: called with True when the session is lost, and with False when it is there again.
            on_reopened: called once the session is there again, to tell the service further things.
            on_stale: called if the service has other weights than this rank, which therefore must not go on.
        """
        self._client = client
        self._held = held
        self._epoch = epoch
        self._on_change = on_change
        self._on_reopened = on_reopened
        self._on_stale = on_stale
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segue-gms-session", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, and end the session."""
        self._closed.set()
        self._client.close()
        self._thread.join()

    def _run(self) -> None:
        while True:
            while self._client.take_notices():
                pass
            if self._closed.is_set():
                return
            logger.warning(
                "the memory service in %s is lost; this engine has its weights mapped and goes on",
                self._client.target.directory,
            )
            self._on_change(True)
            try:
                if not self._reconnect():
                    return
            except MemoryServiceError as error:
                self._on_stale(error)
                return
            self._on_change(False)

    def _reconnect(self) -> bool:
        """Return True once the session is there again; False: it is not wanted any more.

        Raises:
            MemoryServiceError: the service has other weights.
        """
        pause_s = FIRST_PAUSE_S
        while not self._closed.wait(pause_s):
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                if self._resume():
                    logger.info("the memory service is there again")
                    return True
            except MemoryServiceError as error:
                if error.code in ("other", "access", "device"):
                    raise
        return False

    def _resume(self) -> bool:
        """Try to open the session, and to have the service know what this rank reads."""
        client, kept = self._client, self._held.kept()
        try:
            if client.is_lost:
                client.reopen([kept.generation], self._epoch())
            if kept.generation not in client.opened.lost_pins:
                check_equal(client.manifest(kept.generation, client.target.rank), kept.manifest)
            elif not (number := self._offer(kept)):
                return False
            else:
                self._held.renumber(number)
        finally:
            close(kept.descriptors)
        self._on_reopened()
        return True

    def _offer(self, kept: KeptWeights) -> int:
        """Offer what this rank reads; returns its new number, 0: other ranks are still missing."""
        return self._client.offer(
            kept.generation,
            kept.manifest,
            kept.descriptors,
            epoch=self._epoch(),
            is_loaded=kept.is_loaded,
            weight_version=kept.weight_version,
            model_path=kept.model_path,
        )


def check_equal(known: WeightsManifest, read: WeightsManifest) -> None:
    """Check that the service has what a rank reads.

    Raises:
        MemoryServiceError: it has other weights, with the code "other".
    """
    found = difference(known.identity, read.identity)
    what = "digests" if found is None else found.field
    if found is not None or known.digests != read.digests:
        error = MemoryServiceError(
            f"the memory service has other weights than this engine (they differ in {what}), so one of them "
            "is stale; the engine ends, and reads those of the service when it is started again"
        )
        error.code = "other"
        raise error
