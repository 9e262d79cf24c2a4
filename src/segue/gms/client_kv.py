"""The calls of a client about KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from segue.errors import MemoryServiceError
from segue.gms import messages as wire
from segue.gms.client_connection import TAKEOVER_REPLY_S, ServiceConnection
from segue.gms.transport import close

KV_BYTES_PER_S = 1 << 30  # at which the service takes KV memory, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGrant:
    """KV memory that this process alone may write to. Whoever gets it closes the descriptors."""

    sizes: list[int]  # bytes of each slab
    descriptors: list[int]  # of the slabs
    journal: int | None  # a descriptor too
    is_fresh: bool  # nobody has prepared it before; on a device its contents are undefined then


class KVCalls(ServiceConnection):
    """The calls about KV memory; see :class:`segue.gms.client.GmsClient`."""

    def ask_kv(
        self,
        epoch: int,
        pool_bytes: int,
        *,
        slab_bytes: int,
        journal_bytes: int = 0,
        wait_s: float = 0.0,
        limit_s: float = inf,
    ) -> KVGrant:
        """Return the KV memory of this rank, in slabs of `slab_bytes`, of which the last one has the rest.

        Args:
            epoch: that the engine has claimed.
            pool_bytes: a multiple of the device's granularity, as are those of the slabs.
            slab_bytes: of each slab but the last one.
            journal_bytes: of a journal in the host's memory, beside the pool; 0: none.
            wait_s: how long the end of the process that wrote before, and memory, are waited for.
            limit_s: how long the answer is waited for at most. Without one the ask is withdrawn, so that the
                service keeps nothing for this process, and fails with the code "late".
        """
        message = wire.AskKV(
            call=self._next(),
            epoch=epoch,
            pool_bytes=pool_bytes,
            slab_bytes=slab_bytes,
            journal_bytes=journal_bytes,
            wait_s=wait_s,
        )
        given: list[int] = []
        timeout_s = wait_s + TAKEOVER_REPLY_S + (pool_bytes + journal_bytes) / KV_BYTES_PER_S
        parts = self._parts(message, wire.KVGranted, given, min(timeout_s, limit_s), self._withdraw)
        sizes = [size for part in parts for size in part.sizes]
        if len(given) != len(sizes) + bool(journal_bytes):
            close(given)
            raise self._lost(f"{len(given)} descriptors for {len(sizes)} slabs")
        journal = given.pop() if journal_bytes else None
        return KVGrant(sizes=sizes, descriptors=given, journal=journal, is_fresh=parts[0].is_fresh)

    def kv_prepared(self) -> None:
        """Say that the fresh KV memory of this session is prepared; else it is fresh for the next engine."""
        self._one(wire.KVPrepared(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)

    def withdraw_kv(self) -> None:
        """Say that this process uses no KV memory of the service, which frees what it has for it."""
        self._one(wire.WithdrawKV(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)

    def _withdraw(self) -> MemoryServiceError:
        """Withdraw an ask for KV memory that has no answer in time; returns its error. Holds the lock.

        A grant that is on its way comes before the answer to this call. It is not used: the service takes it
        back. If there is no answer, the service reads the call later.
        """
        call, late = self._next(), list[int]()
        try:
            self._send(wire.WithdrawKV(call=call), ())
            self._reply(call, wire.CallDone, late, TAKEOVER_REPLY_S)
        finally:
            close(late)
        directory = self.target.directory
        error = MemoryServiceError(f"the memory service in {directory} has not granted KV memory in time")
        error.code = "late"
        return error

    def release_kv(self) -> None:
        """Give the KV memory of this session back, which this process has unmapped."""
        self._one(wire.ReleaseKV(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)
