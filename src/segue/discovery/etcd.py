"""Discovery by etcd: each record has a lease, which its engine renews for as long as it lives.

The library is etcd3gw, which speaks HTTP with etcd 3.4 and later, and is installed by ``segue[etcd]``. Its
calls wait, so a thread makes them. Records are listed again and again: the library's watch does not tell
when its connection has ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from segue.discovery.base import RETRY_S, OnRecords, Polling
from segue.discovery.record import EngineRecord, pack_record, unpack_record
from segue.errors import ConfigError, DiscoveryError
from segue.extras import ETCD
from segue.logs import logger
from segue.options import check_name, check_url

POLL_S = 0.1
CALL_S = 2.0  # for etcd to answer
RENEWALS = 3  # of a lease in its time to live
ENGINES, EPOCHS = "/segue/engines/", "/segue/epochs/"
Answer = TypeVar("Answer")


@dataclass(slots=True)
class _LeasedRecord:
    """A record of this process, and the lease that it has in etcd."""

    record: EngineRecord
    lease: Any  # None: etcd has lost it


class EtcdDiscovery:
    """Records in etcd; see `segue.discovery.base.DiscoveryBackend`."""

    def __init__(self, url: str, ttl_s: float) -> None:
        """Use the etcd server at a URL; nothing is sent yet.

        Args:
            url: of the server.
            ttl_s: how long the record of an engine that has died stays.

        Raises:
            ConfigError: the URL is none of a server, or etcd3gw is not installed.
        """
        check_url(url, "discovery_target")
        try:
            import requests
            from etcd3gw.client import Etcd3Client
            from etcd3gw.exceptions import Etcd3Exception
        except ImportError as error:
            text = f"discovery='etcd' needs the library etcd3gw ({error}); {ETCD.remedy}"
            raise ConfigError(text, param="discovery") from None
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._url, self._ttl_s = url, ttl_s
        self._client = Etcd3Client(parts.hostname or "", port, parts.scheme, timeout=CALL_S, api_path="/v3/")
        # The last two are of an answer that is not etcd's.
        self._errors = (Etcd3Exception, requests.RequestException, ValueError, KeyError)
        self._thread = ThreadPoolExecutor(1, "segue-etcd")
        self._polling = Polling(POLL_S)
        self._put: dict[str, _LeasedRecord] = {}  # by key
        self._keeping: asyncio.Task[None] | None = None

    async def put(self, record: EngineRecord) -> None:
        """Put an engine's record in place of its last one, and keep it alive from now on."""
        key = _engine_key(record.cohort, record.engine)
        lease = await self._call(lambda: self._write(key, record))
        self._put[key] = _LeasedRecord(record, lease)
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    async def remove(self, cohort: str, engine: str) -> None:
        """Remove an engine's record."""
        key = _engine_key(cohort, engine)
        self._put.pop(key, None)
        await self._call(lambda: self._client.delete(key))

    async def list(self) -> Sequence[EngineRecord]:
        """Returns the records whose leases have not ended, sorted by cohort and engine."""
        found = await self._call(lambda: self._client.get_prefix(ENGINES))
        records = [record for data, _ in found if (record := unpack_record(data)) is not None]
        return sorted(records, key=lambda record: (record.cohort, record.engine))

    async def watch(self, on_records: OnRecords) -> None:
        """Call ``on_records`` with all records, at once and whenever they change."""
        await self._polling.watch(self, on_records)

    async def claim_epoch(self, cohort: str, epoch: int) -> bool:
        """Claim an epoch; lower ones are forgotten, which nobody can claim any more."""
        prefix = _epoch_prefix(cohort)

        def claim() -> bool:
            if not self._client.create(f"{prefix}{epoch}", "claimed"):
                return False
            known = self._epochs(prefix)
            is_highest = epoch == max(known, default=epoch)
            for each in known:
                if each < epoch or (each == epoch and not is_highest):
                    self._client.delete(f"{prefix}{each}")
            return is_highest

        return await self._call(claim)

    async def highest_epoch(self, cohort: str) -> int:
        """Returns the highest epoch that was ever claimed here."""
        prefix = _epoch_prefix(cohort)
        return await self._call(lambda: max(self._epochs(prefix), default=0))

    def nudge(self) -> None:
        """Look for changes at once."""
        self._polling.nudge()

    async def close(self) -> None:
        """Remove the records of this process; where etcd cannot be reached, their leases end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        with suppress(DiscoveryError):
            for key in list(self._put):
                del self._put[key]
                await self._call(partial(self._client.delete, key))
        self._client.session.close()
        self._thread.shutdown(wait=False)

    async def _keep(self) -> None:
        """Renew the leases until this is cancelled. A record whose lease has ended is put again."""
        problem = ""
        while True:
            await asyncio.sleep(RETRY_S if problem else self._ttl_s / RENEWALS)
            try:
                for key, kept in list(self._put.items()):
                    await self._renew(key, kept)
                problem = ""
            except DiscoveryError as error:
                if str(error) != problem:
                    logger.warning("%s; this engine's record may end there until it is back", error)
                problem = str(error)

    async def _renew(self, key: str, kept: _LeasedRecord) -> None:
        if kept.lease is not None and await self._call(kept.lease.refresh) <= 0:
            kept.lease = None
        if kept.lease is None and self._put.get(key) is kept:
            kept.lease = await self._call(lambda: self._write(key, kept.record))

    def _write(self, key: str, record: EngineRecord) -> Any:
        """Write a record with a new lease, and return the lease."""
        lease = self._client.lease(math.ceil(self._ttl_s))
        self._client.put(key, pack_record(record), lease)
        return lease

    def _epochs(self, prefix: str) -> Sequence[int]:
        """Returns the claimed epochs that have a key, the highest one among them."""
        names = [
            bytes(entry["key"]).decode().removeprefix(prefix) for _, entry in self._client.get_prefix(prefix)
        ]
        return [int(name) for name in names if name.isdecimal()]

    async def _call(self, call: Callable[[], Answer]) -> Answer:
        """Make a call in the thread; raises DiscoveryError if it fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except self._errors as error:
            text = f"discovery by etcd at {self._url} failed: {error or type(error).__name__}"
            raise DiscoveryError(text) from None


def _engine_key(cohort: str, engine: str) -> str:
    check_name(cohort, "cohort")
    check_name(engine, "engine_id")
    return f"{ENGINES}{cohort}/{engine}"


def _epoch_prefix(cohort: str) -> str:
    check_name(cohort, "cohort")
    return f"{EPOCHS}{cohort}/"
