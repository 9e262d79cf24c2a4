"""The resources of updates: the peak memory of one, and no leaks after many."""

import gc
import json
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from segue.checkpoint import dummy
from segue.memory.arena import Arena, TensorSpec
from segue.memory.peak import PeakMeter
from segue.memory.rank_memory import PrivateMemory
from segue.messages.weight_update import Commit
from segue.models.weight_map import WeightMap
from segue.weight_update.staging_memory import StagingMemory
from segue.weight_update.transport.base import plan, receive_buffer_size
from tests.checkpoint import tiny
from tests.conftest import WaitUntil
from tests.models.reference import hf_config
from tests.weight_update.test_rank import checkpoint
from tests.weight_update.updating import Trainer, manifest_of, rank_of, transfer

MIB = 1 << 20


def resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(arena: Arena, table: WeightMap, seed: int, dtype: torch.dtype) -> Iterator[int]:
    for slab in arena.slabs:
        yield slab.zero_().numel()


def peak_of_an_update(directory: Path, flattened: bool) -> tuple[int, int]:
    """Returns the peak bytes of an update, and the most that it may take."""
    dummy.fill = fill
    meter = PeakMeter(torch.device("cpu"))
    with rank_of(directory, load_format="dummy") as rank:
        table = rank.served.weight_map
        state = {name: torch.full(table.shapes[name], 0.5, dtype=torch.bfloat16) for name in table.names}
        manifest = manifest_of(state, num_buckets=8, flattened=flattened)
        trainer = Trainer([rank])
        trainer.prepare(state, manifest)
        gc.collect()
        meter.start()
        (received,) = transfer([rank], trainer, state, manifest)
        assert received.error is None
        rank.do(Commit, session=1)
        peak = meter.stop()
        staging = rank.served.arena.num_bytes
        assert staging > 180 * MIB
        assert bool((rank.served.arena.view("norm.weight") == 0.5).all())
        receive_buffers = 2 * receive_buffer_size(plan(manifest, None, torch.device("cpu")))
        packed = rank.model.build_derived()  # before the commit, beside the served ones
        return peak, staging + receive_buffers + packed + 64 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("flattened", [False, True])
def test_the_peak_is_staging_two_buckets_and_packed_copies(flattened: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tiny.make(
            "llama",
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
        )
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model), default=str))
    # In a process of its own: memory that other tests leave to be freed would count.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        peak, allowed = alone.submit(peak_of_an_update, tmp_path, flattened).result()
    print(f"{peak >> 20} of {allowed >> 20} MiB")
    assert peak <= allowed


def test_fifty_updates_leak_nothing(tmp_path: Path, wait_until: WaitUntil) -> None:
    old, state = checkpoint("qwen3", tmp_path / "old", 0)
    with rank_of(old) as rank:
        trainer = Trainer([rank])
        manifest = manifest_of(state)
        before, held = resources(), 0
        for number in range(1, 71):
            transfer([rank], trainer, state, manifest, number)
            rank.do(Commit, session=number)
            if number == 20:
                gc.collect()
                before, held = resources(), resident()
        gc.collect()
        wait_until(lambda: resources() <= before, what="files and threads as before")
        assert resident() <= held + 2 * MIB


def test_memory_that_is_in_use_is_never_unmapped() -> None:
    specs = [TensorSpec(name="w", shape=(8,), dtype=torch.bfloat16)]
    memory = StagingMemory(PrivateMemory(torch.device("cpu")), specs)
    for in_use in (False, True):
        staging = memory.take(specs, "auto", 0)
        slab = weakref.ref(staging.arena.slabs[0])
        memory.give_back(staging, in_use=in_use)
        del staging
        gc.collect()
        assert (slab() is not None) is in_use


def test_a_rank_that_is_closed_waits_for_a_thread_that_is_just_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's thread starts one behind the adoption of another engine's weights, whatever ends then."""
    is_starting, may_start, worked = threading.Event(), threading.Event(), []
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "segue-weights":
            is_starting.set()
            assert may_start.wait(10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    path, _ = checkpoint("llama", tmp_path / "model", 0)
    with rank_of(path) as rank:
        stream = threading.Thread(target=rank.updater._start, args=(lambda: worked.append("before"),))
        stream.start()
        assert is_starting.wait(10)
        threading.Timer(0.05, may_start.set).start()  # meanwhile the rank is being closed
    assert worked == ["before"]
    stream.join(10)
    rank.updater._start(lambda: worked.append("after"))
    assert worked == ["before"] and not rank.updater._threads
