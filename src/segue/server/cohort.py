"""An engine's place among the engines that can serve in each other's place."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

from segue.config import EngineConfig
from segue.discovery.opening import open_discovery
from segue.discovery.record import EngineRecord
from segue.errors import ConfigError, DiscoveryError, FailoverDirectoryError, MemoryServiceError
from segue.failover.control_note import ControlNotes
from segue.failover.epochs import claim_epoch
from segue.failover.lock import CohortLock
from segue.failover.standby import has_standby, remove_unheld, sign_of
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
from segue.launch.in_thread import in_thread
from segue.logs import logger

SERVICE_S = 0.5  # for the memory service to say which epoch it knows; an engine takes over without it too


def directory_of(config: EngineConfig) -> Path:
    """Return the failover directory of an engine that stands by.

    Raises:
        ConfigError: the options name none.
    """
    if config.failover_dir is None:
        raise ConfigError(
            "shadow_mode=True: engines that take each other's place need a directory that they share; "
            "give --failover-dir",
            param="failover_dir",
        )
    return Path(config.failover_dir)


class CohortMember:
    """The lock of the cohort, the sign that this engine waits for it, and the record that it serves.

    It belongs to one event loop.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Check the failover directory, and open discovery.

        Raises:
            ConfigError: the options name no directory, or one that cannot be used, or discovery cannot be
                opened.
        """
        self.directory = directory_of(config)
        self.cohort = config.cohort
        self.engine_id = config.engine_id or _default_id()
        self.control_notes = ControlNotes(self.directory, self.cohort)
        self.lock = CohortLock(self.directory, self.cohort)
        self._service: GmsTarget | None = None  # the memory service, which knows epochs too
        if config.shares_weights and config.gms_dir is not None:
            self._service = GmsTarget(
                directory=config.gms_dir,
                tag="front",
                cohort=self.cohort,
                engine=self.engine_id,
                token=config.gms_token,
                connect_s=0.0,
            )
        self._sign = sign_of(self.directory, self.cohort, self.engine_id)
        self._discovery = open_discovery(
            config.discovery,
            config.discovery_target,
            ttl_s=config.discovery_ttl_s,
            directory=self.directory,
        )

    @property
    def holder(self) -> str:
        """Who has the lock, for an error message."""
        note = self.lock.note()
        if note is None:
            return "an engine that has claimed no epoch yet"
        return f"engine {note.engine} (process {note.pid}, epoch {note.epoch}, {note.url})"

    @property
    def has_standby(self) -> bool:
        """Whether another engine waits to take over."""
        return has_standby(self.directory, self.cohort)

    async def wait_for_lock(self) -> None:
        """Show that this engine waits, and return once it has the lock."""
        await in_thread(self._sign.acquire)
        await in_thread(partial(remove_unheld, self.directory))
        await in_thread(self.lock.acquire)
        self._sign.discard()

    async def claim(self, url: str) -> int:
        """Returns a new epoch for this engine, which has the lock and will serve at a URL.

        Raises:
            LockLostError: the file of the lock was deleted or made anew.
        """
        known = 0
        if self._service is not None:
            with suppress(TimeoutError):
                known = await asyncio.wait_for(in_thread(partial(_epoch_of, self._service)), SERVICE_S)
        return await claim_epoch(self.lock, self._discovery, self.engine_id, url, at_least=known)

    def leave_epoch(self, url: str) -> None:
        """Tell whoever takes over of this engine's epoch: the lock's file was deleted or made anew."""
        try:
            self.lock.leave_epoch(self.engine_id, url)
        except (OSError, FailoverDirectoryError) as error:
            logger.warning("the epoch %d cannot be left at %s: %s", self.lock.epoch, self.lock.path, error)

    async def put(self, record: EngineRecord) -> None:
        """Have routers find this engine.

        Raises:
            DiscoveryError: no backend can be reached.
        """
        await self._discovery.put(record)

    async def remove(self) -> None:
        """Have routers no longer find this engine; where a backend cannot be reached, its record lapses."""
        with suppress(DiscoveryError):
            await self._discovery.remove(self.cohort, self.engine_id)

    async def close(self) -> None:
        """Remove the record, and release the lock: no worker of this engine may run any more."""
        self.lock.release()
        self._sign.discard()
        with suppress(DiscoveryError):
            await self._discovery.close()


def _epoch_of(service: GmsTarget) -> int:
    """Returns the highest epoch that the memory service knows of; 0 if it is away."""
    try:
        with GmsClient(service) as client:
            return client.opened.epoch
    except MemoryServiceError:
        return 0


def _default_id() -> str:
    """Returns a name for this engine: that of the host, and the process id."""
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower()).strip("-")[:40].strip("-")
    return f"{host or 'engine'}-{os.getpid()}"
