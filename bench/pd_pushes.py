"""Times pushes of KV pages between two pools of one process, for `bench.pd`."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from tempfile import TemporaryDirectory
from typing import Any

import torch

from segue.disagg.layout import plan
from segue.disagg.transports.base import Done, PagePair
from segue.disagg.transports.cuda_ipc import DevicePages
from segue.disagg.transports.export import PoolExport
from segue.disagg.transports.push import PushTransport
from segue.disagg.transports.shm import HostPages
from segue.kvcache.pool import KVPool, KVShape
from segue.memory.rank_memory import SharedKVMemory
from segue.models.config import ModelConfig

MIB = 1 << 20
REPEATS = 32  # of each push; the first quarter does not count
SIZES = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)  # bytes of a push


def pushes(shape: KVShape, source: str, target: str) -> dict[str, Any]:
    """Time pushes of pages between two pools of this process, in another order than that of memory."""
    found: dict[str, Any] = {}
    pool = KVPool(shape, torch.ones(shape.num_bytes, dtype=torch.uint8, device=source))
    memory = SharedKVMemory(torch.device(target))
    reader = KVPool(shape, memory.take_kv(shape.num_bytes))
    pages = HostPages(pool) if source == "cpu" else DevicePages(pool)
    assert memory.kv_descriptor is not None
    ended = threading.Event()
    with TemporaryDirectory(prefix="segue-") as directory:
        export = PoolExport(reader, memory.kv_descriptor, f"{directory}/kv", lambda _: None)
        transport = PushTransport(pool, pages, ended.set)
        (route,) = plan(1, 1, shape.num_kv_heads)
        peer = transport.connect(f"{directory}/kv", export.blob, route, "bench", time.monotonic())
        for size in SIZES:
            count = min(max(1, size // shape.page_bytes), shape.num_pages)
            order = random.Random(size).sample(range(shape.num_pages), count)
            pairs = [PagePair(source=page, target=order[-1 - i]) for i, page in enumerate(order)]
            times = []
            for _ in range(REPEATS):
                ended.clear()
                begin = time.perf_counter()
                transport.push(peer, pairs, lambda: None)
                ended.wait()
                times.append(time.perf_counter() - begin)
                assert all(isinstance(event, Done) for event in transport.poll()), "a push failed"
            best = statistics.median(times[REPEATS // 4 :])
            num_bytes = count * shape.page_bytes
            found[str(size)] = {
                "pages": count,
                "MiB": round(num_bytes / MIB, 1),
                "ms": round(1e3 * best, 3),
                "GB/s": round(num_bytes / best / 1e9, 2),
            }
        transport.close()
        export.close()
        os.close(memory.kv_descriptor)
    return found


def shape_of_model(model: ModelConfig, page_size: int) -> KVShape:
    """Return the shape of a pool, with one rank's pages, that holds the largest push."""

    def shape(num_pages: int) -> KVShape:
        return KVShape(
            num_pages=num_pages,
            num_layers=model.num_layers,
            page_size=page_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.bfloat16,
        )

    return shape(SIZES[-1] // shape(0).page_bytes + 1)
