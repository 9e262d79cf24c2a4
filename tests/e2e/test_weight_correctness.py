"""An updated engine equals an engine that was started with the new weights, bit for bit."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import segue
from segue.checkpoint.gguf import weights as gguf_weights
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from tests.e2e.syncing import (
    GREEDY,
    PROMPTS,
    Syncing,
    split,
    syncing,
    tensors_of,
    write_checkpoints,
)
from tests.weight_update.conftest import trainer_address as trainer_address

pytestmark = pytest.mark.timeout(300)


class EngineSyncing(Syncing):
    """`Syncing` with a `segue.Engine` in place of servers."""

    def __init__(self, engine: segue.Engine, trainers: str) -> None:
        super().__init__([], trainers)
        self.engine = engine
        self.clients = [None]  # type: ignore[list-item]

    def ask(self, path: str, client: Any = None, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self.engine, path[1:])(**body)
        return answer

    def close(self) -> None:
        self.clients = []
        super().close()

    def checksum(self, client: Any = None) -> int:
        total: int = self.engine.weights_checker()["total"]
        return total

    def replies(self, client: Any = None) -> list[Any]:
        return [
            (reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
            for reply in self.engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
        ]


def engine_of(checkpoint: Path, tp: int, dtype: str) -> segue.Engine:
    return segue.Engine(
        str(checkpoint),
        embedded=tp == 1,
        tp=tp,
        dtype=dtype,
        deterministic=True,
        num_kv_tokens=1024,
        log_level="error",
    )


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "tp", "dtype"),
    [
        ("llama-tied", 1, "bfloat16"),
        ("qwen3-moe", 2, "float32"),
        slow("llama", 1, "float32"),
        slow("qwen3", 1, "bfloat16"),
        slow("qwen3-moe", 1, "float32"),
        slow("llama", 2, "bfloat16"),
        slow("llama-tied", 2, "float32"),
        slow("llama-biases", 2, "float32"),
        slow("qwen2", 2, "bfloat16"),
        slow("qwen3", 2, "float32"),
    ],
)
def test_an_updated_engine_equals_a_new_one(
    kind: str, tp: int, dtype: str, tmp_path: Path, trainer_address: str
) -> None:
    old, new = write_checkpoints(tmp_path, kind)
    with engine_of(new, tp, dtype) as engine:
        fresh = EngineSyncing(engine, trainer_address)
        right = (fresh.replies(), fresh.checksum())
        fresh.close()
    with engine_of(old, tp, dtype) as engine:
        sync = EngineSyncing(engine, trainer_address)
        before = sync.replies()
        assert before != right[0]
        for flattened in (False, True):
            sync.new_trainer(new)
            sync.meet(ranks=tp)
            assert sync.update(new, flattened=flattened)["success"]
            assert (sync.replies(), sync.checksum()) == right
            assert sync.ask("/destroy_weights_update_group", group_name="g")["success"]
            assert sync.ask("/update_weights_from_disk", model_path=str(old))["success"]
            assert sync.replies() == before
        sync.close()


def rounds(trainer_address: str, tmp_path: Path, count: int) -> None:
    """Runs updates of 73 buckets; some trainers begin to broadcast at once, others after a delay."""
    (checkpoint,) = write_checkpoints(tmp_path, "llama", 1, num_hidden_layers=8)
    tensors = tensors_of(checkpoint)
    buckets = split(tensors, 73)
    assert len(tensors) >= 73 and all(buckets)
    with syncing(
        trainer_address, checkpoint, options=["--dtype", "float32", "--num-kv-tokens", "1024"]
    ) as sync:
        sync.new_trainer(checkpoint)
        sync.meet()
        checksum = sync.checksum()
        for index in range(count):
            assert sync.prepare(buckets)["status"] == "ready"
            sync.send(buckets, after=0.0 if index % 10 else 0.5 if count < 50 else 5.0)
            done = sync.complete()
            assert done["success"] and done["num_buckets_received"] == 73, done
            assert "error" not in sync.sent()
        assert sync.checksum() == checksum


def test_six_updates_of_73_buckets(trainer_address: str, tmp_path: Path) -> None:
    rounds(trainer_address, tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_updates_of_73_buckets(trainer_address: str, tmp_path: Path) -> None:
    rounds(trainer_address, tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_update_waits_eleven_minutes_for_its_trainer(trainer_address: str, tmp_path: Path) -> None:
    old, new = write_checkpoints(tmp_path, "llama-tied")
    with syncing(trainer_address, old, options=["--dtype", "float32", "--num-kv-tokens", "1024"]) as sync:
        sync.new_trainer(new)
        sync.meet()
        buckets = split(tensors_of(new), 3)
        assert sync.prepare(buckets)["status"] == "ready"
        before = sync.replies()
        sync.send(buckets, after=660.0)
        threading.Event().wait(650.0)  # polling instead would take a core
        assert sync.status()["state"] == "prepared"
        sync.until(state="received")
        assert sync.complete()["success"]
        assert sync.replies() != before


def streams_during(sync: Syncing, num_tokens: int, work: Any) -> tuple[list[float], list[int]]:
    """Reads 16 streams while ``work`` runs; returns the seconds between events, and each stream's tokens.

    The streams are submitted while generation is paused, so that none ends before the last one is known.
    """
    gaps: list[float] = []
    first_events = threading.Semaphore(0)
    body = {
        "input_ids": PROMPTS[0],
        "sampling_params": GREEDY | {"max_new_tokens": num_tokens},
        "stream": True,
    }

    def read() -> int:
        count, last = 0, 0.0
        with sync.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if not last:
                        first_events.release()
                    elif started:
                        gaps.append(now - last)
                    last, count = now, json.loads(line[6:])["meta_info"]["completion_tokens"]
        return count

    started = False
    sync.ask("/pause_generation", mode="in_place")
    readers = [sync.threads.submit(read) for _ in range(16)]
    deadline = time.monotonic() + 60
    while sync.http.get("/server_info").json()["internal_states"][0]["waiting_queue_size"] < 16:
        assert time.monotonic() < deadline, "the streams do not arrive"
        time.sleep(0.01)
    sync.ask("/continue_generation")
    for _ in readers:
        assert first_events.acquire(timeout=60), "a stream does not run"
    started = True
    work()
    return gaps, [reader.result(120) for reader in readers]


def test_streams_complete_during_updates(trainer_address: str, tmp_path: Path) -> None:
    old, new = write_checkpoints(tmp_path, "llama-tied", max_position_embeddings=1024)
    with syncing(trainer_address, old, options=["--dtype", "float32", "--num-kv-tokens", "16384"]) as sync:
        sync.new_trainer(new)
        sync.meet()
        _, tokens = streams_during(sync, 200, lambda: [sync.update(new) for _ in range(2)])
        assert tokens == [200] * 16


@pytest.mark.slow
def test_an_update_delays_tokens_little(trainer_address: str) -> None:
    """The longest gap between tokens is at most three median gaps and the commit."""
    source = resolve(None, "auto", EngineConfig().cache_dir)
    assert source.gguf is not None
    weights = gguf_weights.convert(source.gguf, source.directory, source.config, torch.bfloat16)
    with syncing(trainer_address, source.gguf, options=["--num-kv-tokens", "8192"]) as sync:
        sync.new_trainer(weights)
        sync.meet()
        commits: list[float] = []
        gaps, tokens = streams_during(
            sync, 200, lambda: commits.append(sync.update(weights, buckets=16)["timings"]["commit_s"])
        )
        assert tokens == [200] * 16
        allowed = 3 * median(gaps) + commits[0]
        print(
            f"{len(gaps)} gaps: median {median(gaps) * 1e3:.0f} ms, longest {max(gaps) * 1e3:.0f} ms; "
            f"allowed {allowed * 1e3:.0f} ms, of which the commit {commits[0] * 1e3:.0f} ms"
        )
        assert max(gaps) <= allowed
