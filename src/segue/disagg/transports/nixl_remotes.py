"""The pools that a writer has opened by NIXL: each is open once, however many peers share it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from segue.disagg.layout import PieceSpan
from segue.disagg.transports.nixl_agent import NixlAgent, PoolBlob, RemotePool
from segue.errors import TransportError

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenPool:
    """A pool of another rank, of whose pages one part is written."""

    blob: PoolBlob
    span: PieceSpan
    pool: RemotePool | None = None  # None: it has to be opened
    num_peers: int = 0
    num_transfers: int = 0  # that are under way
    has_failed: bool = False  # nothing more is sent until it is opened again


class OpenPools:
    """All pools of other ranks that an agent knows; only the agent's thread calls its methods."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._pools: dict[bytes, OpenPool] = {}  # by NIXL's metadata

    def join(self, blob: PoolBlob, span: PieceSpan) -> OpenPool:
        """Open a pool for one more peer, to write this part of its pages.

        Raises:
            TransportError: NIXL refuses, or the connection has failed and pushes to it have not ended, or
                another peer writes another part of these pages.
        """
        remote = self._pools.get(blob.metadata) or OpenPool(blob=blob, span=span)
        if remote.span != span:
            raise TransportError(
                f"a KV pool is open for {remote.span.num_bytes} bytes of each page, from byte "
                f"{remote.span.start} on, and not for {span.num_bytes} from byte {span.start} on; one "
                "process has one --tp, so restart the decode worker"
            )
        self.reopen(remote)
        self._pools[blob.metadata] = remote
        remote.num_peers += 1
        return remote

    def leave(self, remote: OpenPool) -> None:
        """Take a peer away, whose pushes have ended; the last one's end closes the connection."""
        remote.num_peers -= 1
        if not remote.num_peers:
            del self._pools[remote.blob.metadata]
            self._close(remote)

    def reopen(self, remote: OpenPool) -> RemotePool:
        """Return an open pool; one whose connection has failed is opened anew.

        Raises:
            TransportError: NIXL refuses, or the connection has failed and pushes to it have not ended.
        """
        if remote.has_failed:
            if remote.num_transfers:
                raise TransportError(
                    f"the connection to a decode worker has failed, and {remote.num_transfers} earlier "
                    "pushes to it have not ended; wait until they have"
                )
            self._close(remote)
            remote.has_failed = False
        if remote.pool is None:
            remote.pool = self._agent.connect(remote.blob, remote.span)
        return remote.pool

    def _close(self, remote: OpenPool) -> None:
        pool, remote.pool = remote.pool, None
        try:
            if pool is not None:
                self._agent.disconnect(pool)
        except TransportError as error:
            logger.warning("%s", error.message)
