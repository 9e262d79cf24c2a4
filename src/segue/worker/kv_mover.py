"""Makes what moves the KV of a rank, from the options and the rank's device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from segue.config import EngineConfig
from segue.disagg.checksums import checksums_of
from segue.disagg.mover import Mover, PageReceiver
from segue.disagg.page_sender import PageSender
from segue.disagg.preparer import PagePreparer
from segue.disagg.transports.base import ExportedPool, Transport
from segue.disagg.transports.choice import TRAITS, kinds_to_offer
from segue.disagg.transports.cuda_ipc import DevicePages, warm_up
from segue.disagg.transports.export import PoolExport
from segue.disagg.transports.nixl import NixlTransport
from segue.disagg.transports.nixl_agent import has_nixl
from segue.disagg.transports.nixl_export import NixlExport
from segue.disagg.transports.pieces import head_mover
from segue.disagg.transports.push import PushTransport
from segue.disagg.transports.shm import HostPages
from segue.memory.device_shared import reachable_uuids
from segue.messages.kv import KVEvent, RankAddress, TransportOffer
from segue.model_runner.runner import ModelRunner


def make_mover(
    config: EngineConfig, runner: ModelRunner, run_dir: Path, send: Callable[[KVEvent], None]
) -> tuple[Mover, RankAddress]:
    """Returns what moves the KV of a rank, in either direction, and how others reach its pool."""
    device = runner.device
    has_key = config.pd_key is not None
    kinds = kinds_to_offer(config.pd_transport, device.type, has_key=has_key, has_nixl=has_nixl())
    if "cuda_ipc" in kinds:
        runner.on_stream(partial(warm_up, runner.kv))
    uuids = [] if device.type == "cpu" else reachable_uuids(device)
    path, rank = str(run_dir / f"kv{runner.tp.rank}"), runner.tp.rank
    checksums = checksums_of(runner.kv)
    receiver: PageReceiver | None = None
    unwatched: ExportedPool | None = None
    offers = []
    for kind in kinds:
        pool: ExportedPool
        if TRAITS[kind].proves_gone:
            assert runner.kv_descriptor is not None
            receiver = PageReceiver(partial(PoolExport, runner.kv, runner.kv_descriptor, path), send)
            pool = receiver.pool
        else:
            pool = unwatched = NixlExport(runner.kv)
        offers.append(TransportOffer(kind=kind, blob=pool.blob))
    sender = PageSender(
        {kind: partial(_make_transport, kind, runner) for kind in kinds},
        rank=rank,
        tp=runner.tp.size,
        queue_behind=runner.queue_behind,
        send=send,
        checksums=checksums if config.pd_checksum else None,
    )
    preparer = PagePreparer(head_mover(runner.kv), checksums, send, rank=rank)
    mover = Mover(sender, receiver, unwatched, preparer)
    return mover, RankAddress(path=path, device=uuids[0] if uuids else "", offers=offers, reaches=uuids)


def _make_transport(kind: str, runner: ModelRunner, on_ready: Callable[[], None]) -> Transport:
    """Returns what pushes a rank's pages by a kind of transport."""
    match kind:
        case "shm":
            return PushTransport(runner.kv, HostPages(runner.kv), on_ready)
        case "cuda_ipc":
            return PushTransport(runner.kv, DevicePages(runner.kv), on_ready)
        case _:
            return NixlTransport(runner.kv, on_ready)
