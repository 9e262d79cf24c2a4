"""Releasing and resuming memory with a real model: outputs stay equal, and memory goes back to the system."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

import segue
from segue.errors import (
    ConfigError,
    InvalidRequestError,
    MemoryResumeError,
    MemorySaverError,
    SlabMemoryError,
    WeightsReleasedError,
)
from segue.memory.memfd import MemfdVMM
from segue.memory.releasable import ReleasableMemory
from tests.model_runner.tiny import save_llama
from tests.support.fake_engine import assert_nothing_left
from tests.support.held_steps import hold_here

PROMPTS = [[5, 6, 7] * 30, [9] * 50, list(range(3, 60))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_kv_tokens": 1024,
    "enable_memory_saver": True,
    "log_level": "error",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, hidden_size=256, intermediate_size=768, num_hidden_layers=3, vocab_size=512)
    return directory


@pytest.fixture(scope="module")
def tensors(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[segue.Engine]:
    with segue.Engine(str(model), embedded=True, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def unoverlapped(model: Path) -> Iterator[segue.Engine]:
    with segue.Engine(str(model), embedded=True, disable_overlap=True, **OPTIONS) as engine:
        yield engine


@pytest.fixture(params=["engine", "unoverlapped"])
def either(request: pytest.FixtureRequest) -> segue.Engine:
    """An engine with either loop."""
    found: segue.Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    names = {"engine", "either"} & {*request.fixturenames}
    engines: list[segue.Engine] = [request.getfixturevalue(name) for name in names]
    yield
    for engine in engines:
        assert not engine.is_sleeping() and engine._runtime.trouble is None
        assert_nothing_left(engine)


def tokens(engine: segue.Engine, count: int = 12, **fields: Any) -> list[list[int]]:
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    replies = engine.generate(input_ids=PROMPTS, sampling_params=params, **fields)
    return [reply["output_ids"] for reply in replies]


def in_thread(work: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def state(engine: segue.Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def restore(engine: segue.Engine, model: Path) -> None:
    """Take all memory again, and load the weights."""
    engine.resume_memory_occupation()
    assert engine.update_weights_from_disk(str(model))["success"]


def resident(pid: str = "self", ranges: list[tuple[int, int]] | None = None) -> int:
    """Resident bytes of a process, or of what it has mapped at these addresses."""
    total, counts = 0, ranges is None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(each, 16) for each in found.groups())
            counts = ranges is None or any(low <= start and end <= high for low, high in ranges)
        elif line.startswith("Rss:") and counts:
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("num_cycles", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_cycles_change_no_token_and_give_the_memory_back(
    engine: segue.Engine, model: Path, num_cycles: int
) -> None:
    before, seen = tokens(engine, 4), list[int]()
    for cycle in range(num_cycles):
        held = resident()
        released = engine.release_memory_occupation()
        assert released["tags"] == ["kv_cache", "weights"] and engine.is_sleeping()
        assert state(engine)["released_memory"] == ["kv_cache", "weights"]
        # Of the KV only the pages that were written have memory; the weights have all of theirs.
        weights = engine._runtime.manager.ready.weight_bytes
        assert held - resident() >= 0.95 * weights, cycle
        seen.append(released["num_bytes"])
        restore(engine, model)
        assert tokens(engine, 4) == before, cycle
    assert len(set(seen)) == 1


def test_all_resident_bytes_of_the_windows_go_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[ReleasableMemory] = []
    init = ReleasableMemory.__init__

    def noted(self: ReleasableMemory, *args: Any, **fields: Any) -> None:
        init(self, *args, **fields)
        found.append(self)

    monkeypatch.setattr(ReleasableMemory, "__init__", noted)
    with segue.Engine(str(model), embedded=True, **OPTIONS) as engine:
        tokens(engine, 40)
        windows = [each.window for each in found[0]._ranges.values()]
        ranges = [(window.address, window.address + window.size) for window in windows]
        held, all_held = resident(ranges=ranges), resident()
        engine.release_memory_occupation()
        assert resident(ranges=ranges) == 0
        assert all_held - resident() >= 0.95 * held
        restore(engine, model)
        tokens(engine)
    assert not any(each.window.mapped_bytes for memory in found for each in memory._ranges.values())


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], None])
def test_requests_that_run_are_retracted_and_end_with_the_same_tokens(
    either: segue.Engine,
    model: Path,
    wait_until: Any,
    tags: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, gate = either, hold_here(tmp_path / "steps", monkeypatch)
    whole = tokens(engine, 80)
    engine.flush_cache()
    gate.close_after(79)
    running = in_thread(lambda: tokens(engine, 80))
    wait_until(lambda: state(engine)["running_batch_size"] == 3)
    engine.release_memory_occupation(tags)
    gate.open()
    held = state(engine)
    assert (held["running_batch_size"], held["waiting_queue_size"]) == (0, 3)
    assert held["engine_paused"] and held["pause_mode"] == "retract"
    assert state(engine)["num_generated_tokens"] == held["num_generated_tokens"]
    engine.continue_generation()  # of a pause that is not there: the memory still is away
    assert state(engine)["engine_paused"] and not running.done()
    if tags == ["kv_cache"]:
        engine.resume_memory_occupation(tags)
    else:
        restore(engine, model)
    assert running.result(60) == whole
    assert not state(engine)["engine_paused"]


def test_released_kv_empties_the_prefix_cache_and_weights_stay(engine: segue.Engine) -> None:
    before = tokens(engine)
    assert state(engine)["tree_cache_size"] > 0
    engine.release_memory_occupation(["kv_cache"])
    assert state(engine)["tree_cache_size"] == 0 and engine._runtime.trouble is None
    assert engine.get_weights_by_name("model.norm.weight")["success"]
    engine.resume_memory_occupation()
    assert tokens(engine) == before


def test_requests_wait_until_the_last_tensor_was_sent(
    engine: segue.Engine, tensors: dict[str, Tensor], wait_until: Any
) -> None:
    before = tokens(engine)
    engine.release_memory_occupation()
    waiting = in_thread(lambda: tokens(engine))
    wait_until(lambda: state(engine)["waiting_queue_size"] == 3)
    refused = engine.update_weights_from_tensor([*tensors.items()])
    assert not refused["success"] and "POST /resume_memory_occupation first" in refused["message"]
    read = engine.get_weights_by_name("model.norm.weight")
    assert not read["success"] and "is released" in read["message"]
    engine.resume_memory_occupation(["weights"])
    *first, last = tensors.items()
    for sent in (first[:5], first[5:]):  # in an order in which no part of a fused weight comes at once
        assert engine.update_weights_from_tensor(sent)["success"]
        trouble = engine._runtime.trouble
        assert isinstance(trouble, WeightsReleasedError) and not waiting.done()
    assert f"released or reset: 1, such as {last[0]!r}" in trouble.message
    engine.resume_memory_occupation(["kv_cache"])
    assert not waiting.done() and state(engine)["engine_paused"]
    assert engine.update_weights_from_tensor([last])["success"]
    assert waiting.result(60) == before


def test_a_request_that_waits_for_memory_can_be_aborted(engine: segue.Engine, wait_until: Any) -> None:
    engine.release_memory_occupation(["kv_cache"])
    waiting = in_thread(lambda: engine.generate(input_ids=[1, 2, 3], rid="gone"))
    wait_until(lambda: state(engine)["waiting_queue_size"] == 1)
    resumed = threading.Thread(target=engine.resume_memory_occupation)
    engine.abort_request("gone")
    resumed.start()
    assert waiting.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    resumed.join(60)


def test_what_is_released_already_is_released_once(engine: segue.Engine) -> None:
    assert engine.resume_memory_occupation()["tags"] == []
    assert engine.release_memory_occupation(["kv_cache"])["num_bytes"] > 0
    again = engine.release_memory_occupation(["kv_cache"])
    assert (again["success"], again["tags"], again["num_bytes"]) == (True, [], 0)
    engine.resume_memory_occupation(["kv_cache"])


def test_calls_from_many_threads_are_done_one_after_another(engine: segue.Engine) -> None:
    before = tokens(engine)
    moves = [engine.release_memory_occupation, engine.resume_memory_occupation] * 6
    generating = in_thread(lambda: [tokens(engine) for _ in range(5)])
    for future in [in_thread(lambda move=move: move(["kv_cache"])) for move in moves]:
        assert future.result(60)["success"]
    engine.resume_memory_occupation()
    assert generating.result(60) == [before] * 5


def test_on_a_cpu_sleep_of_level_1_keeps_the_weights_where_they_are(
    engine: segue.Engine, model: Path
) -> None:
    before = tokens(engine)
    assert engine.sleep()["tags"] == ["kv_cache"] and engine.is_sleeping()
    engine.wake_up()
    assert tokens(engine) == before
    assert engine.sleep(level=2)["tags"] == ["kv_cache", "weights"]
    engine.wake_up(tags=["kv_cache", "weights"])
    restore(engine, model)
    assert tokens(engine) == before


def test_unknown_tags_and_levels_are_named(engine: segue.Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"tags\[1\]='nope'"):
        engine.release_memory_occupation(["weights", "nope"])
    with pytest.raises(InvalidRequestError, match="level=3"):
        engine.sleep(3)
    assert engine.release_memory_occupation(["cuda_graph"])["tags"] == []  # there is nothing to release


def test_memory_that_cannot_be_taken_stays_released_until_there_is_some(
    engine: segue.Engine, model: Path
) -> None:
    before = tokens(engine)
    engine.release_memory_occupation()
    with pytest.MonkeyPatch.context() as patch:

        def fail(self: MemfdVMM, size: int) -> Any:
            raise SlabMemoryError(f"the host has too little memory for a slab of {size} bytes")

        patch.setattr(MemfdVMM, "private", fail)
        with pytest.raises(MemoryResumeError, match="too little memory for a slab"):
            engine.resume_memory_occupation()
    assert state(engine)["released_memory"] == ["kv_cache", "weights"]
    restore(engine, model)
    assert tokens(engine) == before


def test_an_engine_without_the_option_names_it(model: Path) -> None:
    options = OPTIONS | {"enable_memory_saver": False}
    with segue.Engine(str(model), embedded=True, **options) as engine:
        for move in (engine.release_memory_occupation, engine.resume_memory_occupation, engine.sleep):
            with pytest.raises(MemorySaverError, match="--enable-memory-saver"):
                move()
        assert tokens(engine)


def test_kv_that_others_write_is_not_released(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"role='decode': other engines write.*role='both'"):
        segue.Engine(str(model), role="decode", **OPTIONS)


def test_all_ranks_release_and_resume(model: Path) -> None:
    with segue.Engine(str(model), tp=2, **OPTIONS) as engine:
        before = tokens(engine, 40)
        pids = [str(pid) for pid in engine._runtime.worker_pids]
        held = [resident(pid) for pid in pids]
        engine.release_memory_occupation()
        weights = engine._runtime.manager.ready.weight_bytes
        fallen = [old - resident(pid) for old, pid in zip(held, pids, strict=True)]
        assert min(fallen) >= 0.95 * weights, "a rank has kept its memory"
        restore(engine, model)
        for tags in (None, ["weights"], ["kv_cache"]):
            running = in_thread(lambda: tokens(engine, 40))
            released = engine.release_memory_occupation(tags)
            assert released["num_bytes"] > 0
            if tags == ["kv_cache"]:
                engine.resume_memory_occupation(tags)
            else:
                restore(engine, model)
            assert running.result(60) == before
