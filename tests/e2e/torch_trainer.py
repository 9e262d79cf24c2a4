"""A trainer that uses torch and HTTP, and nothing of Segue: it repeats the calls of existing clients.

It reads lines like ``["slime", URL, WEIGHTS]`` and sends the tensors in a file of ``torch.save`` to an
engine. When it is connected to the engine, it prints ``connected`` and waits for another line; then it sends
the tensors and prints ``done``.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=40)
NUM_BUCKETS = 5
Named = list[tuple[str, torch.Tensor]]


class Engine:
    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Returns status and text of a POST, or of a GET if there is no body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT.total_seconds()) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Returns the answer to a POST; fails on a bad status, as the clients do."""
        status, text = self.call(path, body)
        assert status == 200, f"{path}: {status} {text}"
        answer: dict[str, Any] = json.loads(text)
        return answer


class Call(threading.Thread):
    """A POST that runs in a thread while the trainer does something else."""

    def __init__(self, engine: Engine, path: str, **body: Any) -> None:
        super().__init__()
        self.engine, self.path, self.body = engine, path, body
        self.answer: dict[str, Any] | None = None
        self.start()

    def run(self) -> None:
        self.answer = self.engine.post(self.path, **self.body)

    def result(self) -> dict[str, Any]:
        self.join(TIMEOUT.total_seconds())
        assert self.answer is not None and self.answer["success"], f"{self.path}: {self.answer}"
        return self.answer


def meet(engine: Engine, name: str, *, port_as_text: bool = False) -> Any:
    """Asks the engine to join a group, and joins the group at the same time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    joining = Call(
        engine,
        "/init_weights_update_group",
        master_address="127.0.0.1",
        master_port=str(port) if port_as_text else port,
        rank_offset=1,
        world_size=2,
        group_name=name,
        backend="gloo",
    )
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name, timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    joining.result()
    return group


def wait_for_line() -> None:
    print("connected", flush=True)
    sys.stdin.readline()


def described(bucket: Named) -> dict[str, Any]:
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def broadcast(group: Any, bucket: Named) -> None:
    works = [dist.broadcast(tensor, 0, group=group, async_op=True) for _, tensor in bucket]
    for work in works:
        work.wait()


def slime(engine: Engine, buckets: list[Named]) -> None:
    """Sends as slime does: two pipeline ranks, each with a group and half of the buckets; reconnects once."""
    for turn in range(2):
        groups = {name: meet(engine, name) for name in ("slime-pp_0", "slime-pp_1")}
        if turn == 0:
            wait_for_line()
        engine.post("/pause_generation")
        deadline = time.monotonic() + 30
        while engine.call("/flush_cache")[0] != 200:
            assert time.monotonic() < deadline, "the cache could not be flushed"
        for index, bucket in enumerate(buckets):
            name = f"slime-pp_{index % 2}"
            update = Call(
                engine,
                "/update_weights_from_distributed",
                **described(bucket),
                group_name=name,
                flush_cache=False,
                weight_version="7",
            )
            broadcast(groups[name], bucket)
            update.result()
        engine.post("/continue_generation")
        for name, group in groups.items():
            leaving = Call(engine, "/destroy_weights_update_group", group_name=name)
            dist.destroy_process_group(group)
            leaving.result()


def areal(engine: Engine, buckets: list[Named]) -> None:
    """Sends as AReaL does: a pause that keeps requests, updates that abort them, and the port as text."""
    group = meet(engine, "update_weight_group", port_as_text=True)
    wait_for_line()
    engine.post("/pause_generation", mode="retract")
    for bucket in buckets:
        update = Call(
            engine,
            "/update_weights_from_distributed",
            **described(bucket),
            group_name="update_weight_group",
            abort_all_requests=True,
        )
        broadcast(group, bucket)
        update.result()
    engine.post("/continue_generation")


def prepared(engine: Engine, buckets: list[Named]) -> None:
    """Prepares the engine with the manifest of all buckets, sends all of them, and completes the update."""
    group = meet(engine, "weight_sync_group")
    wait_for_line()
    ready = engine.post(
        "/prepare_weights_update",
        num_buckets=len(buckets),
        buckets=[described(bucket) for bucket in buckets],
        group_name="weight_sync_group",
    )
    assert ready["status"] == "ready", ready
    for bucket in buckets:
        for _, tensor in bucket:
            dist.broadcast(tensor, src=0, group=group)
    done = engine.post("/complete_weights_update", group_name="weight_sync_group", flush_cache=False)
    assert (done["success"], done["num_buckets_received"]) == (True, len(buckets)), done


def main() -> None:
    for line in sys.stdin:
        client, url, path = json.loads(line)
        weights = list(torch.load(path).items())
        buckets = [weights[start::NUM_BUCKETS] for start in range(NUM_BUCKETS)]
        {"slime": slime, "areal": areal, "prepared": prepared}[client](Engine(url), buckets)
        print("done", flush=True)


if __name__ == "__main__":
    main()
