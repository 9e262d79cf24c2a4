"""The service's side of the holder: hands copies of descriptors in, and adopts them after a restart.

What is committed survives the service's process: slabs, manifests, epochs and notes. A lease to write does
not; its engine sees that the connection has ended, and loads again. Nor does KV memory: the engine that
writes to it keeps it by its mappings, and the next engine gets other memory, which nobody writes to.
"""

from __future__ import annotations

import os
import socket

import msgspec

from segue.errors import SharedMemoryError
from segue.gms.lock_state import Cohort, WeightsGeneration
from segue.gms.manifest import decode_manifest
from segue.gms.service import MemoryService
from segue.gms.store import RankSlabs
from segue.gms.transport import (
    HOLDER_SOCKET,
    GmsFrameError,
    close,
    new_socket,
    packed,
    receive,
    send,
    unpacked,
)
from segue.logs import logger
from segue.memory import shared
from segue.memory.memfd import check_slab

TIMEOUT_S = 1.0  # a holder that takes no message for so long counts as lost
LEDGER = "ledger"


class HeldRank(msgspec.Struct, frozen=True, array_like=True):
    """A rank of a committed generation."""

    generation: int
    rank: int
    device: str
    sizes: list[int]


class HeldGeneration(msgspec.Struct, frozen=True, array_like=True):
    """A committed generation."""

    number: int
    key: str
    is_loaded: bool
    cohort: str
    version: str
    model_path: str | None


class HeldCohort(msgspec.Struct, frozen=True, array_like=True):
    """A cohort."""

    name: str
    current: int | None
    epoch: int
    version: str | None = None  # None: kept by an older service; it is the generation's


class Ledger(msgspec.Struct, frozen=True):
    """What the holder's descriptors are."""

    lineage: str
    serial: int
    cohorts: list[HeldCohort]
    generations: list[HeldGeneration]
    ranks: list[HeldRank]
    notes: list[tuple[str, str, bytes]]  # cohort, name, value


class HolderLink:
    """The connection to the holder of a directory, which need not be there. See `service.Keeper`."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, HOLDER_SOCKET)
        self._socket: socket.socket | None = None
        self._kept: set[str] = set()  # names, without the ledger's
        self._ledger = b""

    def close(self) -> None:
        """End the connection; the holder keeps what it has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def open(self, service: MemoryService) -> int:
        """Connect if need be. A service that has nothing yet adopts what the holder has.

        Returns the number of generations that were adopted.
        """
        if self._socket is not None:
            if not shared.is_closed(self._socket):
                return 0
            self.close()
        connection = new_socket()
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            return 0
        self._socket, self._kept, self._ledger = connection, set(), b""
        found = self._take_all()
        try:
            if service.state.serial == 0 and LEDGER in found:
                self._kept = set(found) - {LEDGER}
                return _adopt(service, found)
            for name in found:  # the names mean other things by now
                send(connection, b"F" + name.encode())
        except OSError as error:
            self._lost(error)
        finally:
            close(list(found.values()))
        return 0

    def _lost(self, error: OSError) -> None:
        logger.warning("the holder of descriptors is lost (%s); start `segue gms hold` again", error)
        self.close()

    def save(self, service: MemoryService) -> None:
        """See `service.Keeper`: slabs come before the ledger that names them, and go after it."""
        self.open(service)
        ledger = _ledger_of(service)
        data = msgspec.msgpack.encode(ledger)
        if self._socket is None or data == self._ledger:
            return
        try:
            names: set[str] = set()
            for held in ledger.ranks:
                slabs = service.store.ranks[held.generation, held.rank]
                place = f"{held.generation}/{held.rank}"
                for number, descriptor in enumerate(slabs.descriptors):
                    self._keep(f"slab/{place}/{number}", descriptor, names)
                self._keep_data(f"manifest/{place}", slabs.manifest, names)
            self._keep_data(LEDGER, data, set())
            self._ledger = data
            for name in self._kept - names:
                send(self._socket, b"F" + name.encode())
            self._kept = names
        except OSError as error:
            self._lost(error)

    def _keep(self, name: str, descriptor: int, names: set[str]) -> None:
        names.add(name)
        if name not in self._kept:
            assert self._socket is not None
            send(self._socket, b"K" + name.encode(), [descriptor])

    def _keep_data(self, name: str, data: bytes, names: set[str]) -> None:
        if name in self._kept:
            names.add(name)
            return
        descriptor = packed(data)
        try:
            self._keep(name, descriptor, names)
        finally:
            close([descriptor])

    def _take_all(self) -> dict[str, int]:
        """Return copies of all descriptors that the holder has, by their names."""
        assert self._socket is not None
        found: dict[str, int] = {}
        try:
            send(self._socket, b"A")
            while True:
                frame, descriptors = receive(self._socket)
                if frame[:1] != b"K" or len(descriptors) != 1:
                    close(descriptors)
                    break
                found[frame[1:].decode()] = descriptors[0]
        except (OSError, GmsFrameError) as error:
            logger.warning("the holder does not give its descriptors (%s); nothing is adopted", error)
            close(list(found.values()))
            self.close()
            return {}
        return found


def _ledger_of(service: MemoryService) -> Ledger:
    state = service.state
    ranks = [
        HeldRank(generation, rank, slabs.device, slabs.sizes)
        for (generation, rank), slabs in service.store.ranks.items()
        if generation in state.generations
    ]
    return Ledger(
        lineage=service.lineage,
        serial=state.serial,
        cohorts=[
            HeldCohort(name, each.current, each.epoch, each.version) for name, each in state.cohorts.items()
        ],
        generations=[
            HeldGeneration(n, each.key, each.is_loaded, each.cohort, each.version, each.model_path)
            for n, each in state.generations.items()
        ],
        ranks=ranks,
        # Those that keep a note put it again; if they have ended meanwhile, it must not hold any more.
        notes=[(*key, value) for key, value in service.notes.items() if key not in service.note_keepers],
    )


def _adopt(service: MemoryService, found: dict[str, int]) -> int:
    """Give a new service what the holder has; returns the number of generations."""
    try:
        ledger = msgspec.msgpack.decode(unpacked(found[LEDGER]), type=Ledger)
    except (GmsFrameError, msgspec.MsgspecError) as error:
        logger.warning("what the holder keeps cannot be read, and is not adopted: %s", error)
        return 0
    adopted = _restore(service, ledger, found)
    service.note_event("adopted", f"{adopted} generations from the holder")
    logger.info("adopted %d generations from the holder", adopted)
    return adopted


def _restore(service: MemoryService, ledger: Ledger, found: dict[str, int]) -> int:
    """Give a service the contents of a ledger; generations that are not whole are left out."""
    state = service.state
    service.lineage, state.serial = ledger.lineage, ledger.serial
    service.notes = {(cohort, name): value for cohort, name, value in ledger.notes}
    currents = {cohort.current for cohort in ledger.cohorts}
    for each in ledger.generations:
        ranks = [held for held in ledger.ranks if held.generation == each.number]
        try:
            if each.number not in currents:  # its readers go over to the current one
                continue
            for held in ranks:
                _check_rank(service, held, found)
        except (KeyError, SharedMemoryError, GmsFrameError, msgspec.MsgspecError) as error:
            logger.warning("generation %d is not adopted, as it is not whole: %s", each.number, error)
            continue
        state.generations[each.number] = WeightsGeneration(
            key=each.key,
            is_loaded=each.is_loaded,
            cohort=each.cohort,
            slabs=tuple(
                _adopt_rank(service, held, found) for held in sorted(ranks, key=lambda held: held.rank)
            ),
            version=each.version,
            model_path=each.model_path,
        )
    for cohort in ledger.cohorts:
        current = cohort.current if cohort.current in state.generations else None
        version = cohort.version
        if version is None:
            version = "" if current is None else state.generations[current].version
        state.cohorts[cohort.name] = Cohort(
            current=current, version=version, epoch=cohort.epoch, adopted_from=cohort.epoch
        )
    return len(state.generations)


def _adopt_rank(service: MemoryService, held: HeldRank, found: dict[str, int]) -> tuple[int, ...]:
    """Give a service the slabs of a rank, and return them as the lock knows them."""
    place = f"{held.generation}/{held.rank}"
    slabs = RankSlabs(
        device=held.device,
        sizes=held.sizes,
        descriptors=[os.dup(found[f"slab/{place}/{n}"]) for n in range(len(held.sizes))],
        manifest=unpacked(found[f"manifest/{place}"]),
    )
    for size, descriptor in zip(slabs.sizes, slabs.descriptors, strict=True):
        service.store.add(held.device, size, descriptor)
    service.store.ranks[held.generation, held.rank] = slabs
    return tuple(slabs.descriptors)


def _check_rank(service: MemoryService, held: HeldRank, found: dict[str, int]) -> None:
    """Check that the descriptors of a rank are there, and are what the ledger says."""
    if held.device not in service.store.vmms:
        raise SharedMemoryError(f"device {held.device} is not served any more")
    place = f"{held.generation}/{held.rank}"
    manifest = decode_manifest(unpacked(found[f"manifest/{place}"]))
    if manifest.identity.slab_sizes != held.sizes:
        raise SharedMemoryError(f"the manifest of rank {held.rank} is one of other slabs")
    for number, size in enumerate(held.sizes):
        if held.device == "cpu":
            check_slab(found[f"slab/{place}/{number}"], size)
