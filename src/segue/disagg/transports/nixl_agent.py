"""The part of the NIXL library that moves KV pages: one agent per rank, with its registered pool.

NIXL's progress thread is not used. It has no CUDA context, which UCX needs, and with the settings of NIXL's
Python package it takes a whole core (measured: 0.9 of one while idle). So some thread must call the agent
again and again while pages move. Over TCP that holds for the reader too, whose CPU stores the pages.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from segue.disagg.layout import PageShape, PieceSpan
from segue.disagg.transports.export import shape_of
from segue.errors import ConfigError, TransportError
from segue.extras import NIXL
from segue.kvcache.pool import KVPool

# UCX gives a TCP connection up within this time, unless these variables are set: pages of a lost writer are
# used again after 30 s (`LOST_S`), and by then nothing of it may be under way. By default, data that nobody
# acknowledges is sent again for a quarter of an hour.
UCX_DEFAULTS = {
    "UCX_TCP_USER_TIMEOUT": "10s",
    "UCX_TCP_KEEPIDLE": "10s",
    "UCX_TCP_KEEPINTVL": "2s",
    "UCX_TCP_KEEPCNT": "3",
}
MIN_PAUSE_S, MAX_PAUSE_S = 50e-6, 1e-3  # between two calls while pages move
BUSY_S = 20e-6  # of the CPU: a call that takes more has moved pages; one that finds nothing takes 5 µs
Transfer = Any  # NIXL's handle of pages that are under way


class PoolBlob(msgspec.Struct, frozen=True, array_like=True):
    """What a writer needs to know of a pool that is registered with a NIXL agent."""

    metadata: bytes  # NIXL's, with the agent's name and addresses
    address: int  # of page 0
    memory: str  # NIXL's name of the kind of memory: DRAM or VRAM
    device: int  # number of the GPU on its host; 0: the CPU
    num_pages: int  # without the scratch page, which follows them
    shape: PageShape


class RemotePool(msgspec.Struct, frozen=True):
    """A part of each page of another rank's pool, to which an agent can write."""

    name: str  # of its agent
    parts: Any  # NIXL's handle of these parts, one per page


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedPieces:
    """Memory for pieces that are registered with an agent: what is sent is no page of its pool."""

    data: Tensor  # uint8 [slot, bytes of a piece]
    pieces: Any  # NIXL's handle of the slots
    memory: Any  # NIXL's handle of the memory


def has_nixl() -> bool:
    """Whether NIXL is installed."""
    return NIXL.is_installed


class NixlAgent:
    """A NIXL agent and its pool. One thread, which also makes it, calls its methods."""

    def __init__(self, pool: KVPool) -> None:
        """Register a pool in the memory of the CPU or of a GPU.

        Raises:
            ConfigError: NIXL is not installed, or does not start.
        """
        if pool.data.is_cuda:
            torch.cuda.set_device(pool.data.device)  # UCX uses the thread's CUDA context
        library = _load()
        self._pool = pool
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = library.nixl_agent(f"segue-{uuid.uuid4().hex}", config)
            self._memory = "VRAM" if pool.data.is_cuda else "DRAM"
            self._device = pool.data.device.index or 0
            size = (pool.num_pages + 1) * pool.page_bytes
            self._agent.register_memory([(pool.data.data_ptr(), size, self._device, "")], self._memory)
            own = self._describe(pool.data.data_ptr(), pool.num_pages, pool.page_bytes, self._device)
            self._own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, self._memory)
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot use the KV cache ({error!r}); see its messages above, and check the variables "
                "UCX_TLS and UCX_NET_DEVICES, or start with --pd-transport shm"
            ) from error

    @property
    def blob(self) -> bytes:
        """What others need to write to the pool, for a `TransportOffer`."""
        blob = PoolBlob(
            metadata=self._agent.get_agent_metadata(),
            address=self._pool.data.data_ptr(),
            memory=self._memory,
            device=self._device,
            num_pages=self._pool.num_pages,
            shape=shape_of(self._pool),
        )
        return msgspec.msgpack.encode(blob)

    def connect(self, blob: PoolBlob, span: PieceSpan) -> RemotePool:
        """Make a part of each page of another rank's pool known.

        It returns at once, as the first transfer opens the connection.

        Raises:
            TransportError: NIXL refuses.
        """
        with _translated("the KV pool of a decode worker cannot be opened"):
            name = self._agent.add_remote_agent(blob.metadata)
            stride = blob.shape.page_bytes
            parts = self._describe(
                blob.address + span.start, blob.num_pages, stride, blob.device, size=span.num_bytes
            )
            handle = self._agent.prep_xfer_dlist(name, parts, blob.memory)
            return RemotePool(name.decode() if isinstance(name, bytes) else name, handle)

    def disconnect(self, remote: RemotePool) -> None:
        """Forget another rank's pool; no transfer to it may be under way."""
        with _translated("the connection to a decode worker cannot be closed"):
            remote.parts.release()
            self._agent.remove_remote_agent(remote.name)

    def stage(self, num_pieces: int, piece_bytes: int) -> StagedPieces:
        """Register memory for pieces, of the kind of the pool's.

        Raises:
            TransportError: there is no such memory, or NIXL refuses.
        """
        with _translated("no memory can be had for parts of KV pages"):
            device = self._pool.data.device
            data = torch.empty((num_pieces, piece_bytes), dtype=torch.uint8, device=device)
            regions = [(data.data_ptr(), data.nbytes, self._device, "")]
            memory = self._agent.register_memory(regions, self._memory)
            own = self._describe(data.data_ptr(), num_pieces, piece_bytes, self._device)
            try:
                pieces = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, self._memory)
            except BaseException:
                self._agent.deregister_memory(memory)  # torch is about to free it
                raise
            return StagedPieces(data=data, pieces=pieces, memory=memory)

    def unstage(self, staged: StagedPieces) -> None:
        """Give memory for pieces up; no transfer from it may be under way."""
        with _translated("memory for parts of KV pages cannot be given up"):
            staged.pieces.release()
            self._agent.deregister_memory(staged.memory)

    def post(
        self,
        remote: RemotePool,
        sources: Sequence[int],
        targets: Sequence[int],
        staged: StagedPieces | None = None,
    ) -> Transfer:
        """Begin to write pages, or staged pieces, to parts of pages; `has_ended` says when they have arrived.

        Raises:
            TransportError: the other rank cannot be reached. Nothing is written.
        """
        with _translated("pages cannot be sent"):
            own = self._own if staged is None else staged.pieces
            transfer = self._agent.make_prepped_xfer(
                "WRITE", own, np.array(sources, np.int32), remote.parts, np.array(targets, np.int32)
            )
            _check(self._agent.transfer(transfer))
            return transfer

    def has_ended(self, transfer: Transfer) -> bool:
        """Let NIXL work, and return whether all pages of a transfer are in the other rank's memory.

        Once it has returned True or raised, the transfer is over and may not be passed again. It is freed
        only then: NIXL cannot cancel a transfer, and writes pages of one that was freed too early.

        Raises:
            TransportError: the connection to the other rank is lost.
        """
        with _translated("pages could not be sent"):
            return _check(self._agent.check_xfer_state(transfer))

    def work(self) -> None:
        """Let NIXL do what other ranks have asked for."""
        with _translated("NIXL cannot go on"):
            self._agent.get_new_notifs()

    @staticmethod
    def _describe(address: int, count: int, stride: int, device: int, *, size: int | None = None) -> Any:
        """Return NIXL's description of parts of memory: `[count, 3]` of address, bytes and device.

        They begin every `stride` bytes, and have `size` bytes each, or as many as the stride.
        """
        parts = np.empty((count, 3), np.uint64)
        parts[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(stride)
        parts[:, 1], parts[:, 2] = stride if size is None else size, device
        return parts


class PollPace:
    """How long to wait between two calls of an agent: hardly at all while pages move, else ever longer."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        """``clock`` tells the seconds that the thread has computed."""
        self._longest_s = longest_s
        self._clock = clock
        self.pause_s = longest_s

    def quicken(self) -> None:
        """Wait hardly at all before the next call, because pages have begun to move."""
        self.pause_s = MIN_PAUSE_S

    def call(self, work: Callable[[], None]) -> None:
        """Call an agent, and learn from the time that it computes whether pages move.

        A slow call is made again: after 10 ms the processor's caches have forgotten NIXL, and a call that
        finds nothing takes 75 µs; the next one takes 5 µs.
        """
        for _ in range(2):
            began_at = self._clock()
            work()
            if self._clock() - began_at <= BUSY_S:
                self.pause_s = min(2 * self.pause_s, self._longest_s)
                return
        self.quicken()


def _load() -> Any:
    """Return the NIXL library. It sets up logging for itself, which this takes back."""
    for name, value in UCX_DEFAULTS.items():
        os.environ.setdefault(name, value)
    raises = logging.raiseExceptions
    failures = []
    for name in NIXL.modules:
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            failures.append(str(error))
            continue
        logging.raiseExceptions = raises
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return library
    raise ConfigError(
        f"NIXL cannot be imported ({'; '.join(failures)}); install it with {NIXL.remedy}, or use "
        "--pd-transport shm"
    )


def _check(state: str) -> bool:
    """Return whether a transfer has ended well; raises if it has failed."""
    if state == "ERR":
        raise RuntimeError("NIXL reports an error")
    return state == "DONE"


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no base class of their own, into TransportError."""
    try:
        yield
    except Exception as error:
        raise TransportError(
            f"{what}: {error}; see whether the other worker runs, and the network"
        ) from error
