"""The reader's side of all transports whose pool is memory with a descriptor: of the host, or of a GPU."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from segue.disagg.layout import PageShape
from segue.disagg.transports.base import Writer
from segue.disagg.transports.writers import WriterWatch
from segue.errors import TransportError
from segue.kvcache.pool import KVPool


class PoolOffer(msgspec.Struct, frozen=True, array_like=True):
    """What a writer needs to know of an exported pool."""

    token: bytes  # 32 random bytes
    num_pages: int  # without the scratch page, which follows them
    shape: PageShape

    @property
    def num_bytes(self) -> int:
        """The bytes of the pool, the scratch page included."""
        return (self.num_pages + 1) * self.shape.page_bytes


class PoolExport:
    """A KV pool that others write to (`ExportedPool`)."""

    def __init__(
        self, pool: KVPool, descriptor: int, path: str, on_writer_gone: Callable[[Writer], None]
    ) -> None:
        """Let writers in at the unix socket `path`.

        Args:
            pool: the pool, in the memory of `descriptor`, from its first byte on.
            descriptor: that `shared.create` or `device_shared.create` has made for these bytes; the caller
                keeps it open.
            path: of the socket, which must not exist; its directory is the caller's.
            on_writer_gone: called from a thread, once per writer; must neither block nor raise.

        Raises:
            TransportError: the socket cannot be made.
        """
        offer = PoolOffer(secrets.token_bytes(32), pool.num_pages, shape_of(pool))
        self.blob = msgspec.msgpack.encode(offer)
        self._watch = WriterWatch(path, offer.token, descriptor, on_writer_gone)

    def writers(self) -> list[Writer]:
        """Return who may write to the pool: all that connected and are not proven to write no more."""
        return self._watch.writers()

    def ban(self, session: str) -> None:
        """Let nobody in any more for a session; who is among its `writers` now may still write."""
        self._watch.ban(session)

    def close(self) -> None:
        """Let nobody in any more. Processes that are `writers` now may still write to the memory."""
        self._watch.close()


def read_offer(path: str, blob: bytes) -> PoolOffer:
    """Return what `blob`, which came with the address `path`, says of a pool.

    Raises:
        TransportError: it says nothing of a pool.
    """
    try:
        return msgspec.msgpack.decode(blob, type=PoolOffer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(
            f"the offer of the KV pool at {path!r} cannot be read ({error}); both workers must run the same "
            "version of Segue"
        ) from error


def shape_of(pool: KVPool) -> PageShape:
    """Return the shape of a pool's pages."""
    *_, num_heads, head_dim = pool.data.shape
    return PageShape(
        num_layers=pool.num_layers,
        page_size=pool.page_size,
        num_heads=num_heads,
        head_bytes=head_dim * pool.data.element_size(),
    )
