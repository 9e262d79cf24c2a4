"""A trainer that uses torch and HTTP, and nothing of Segue: it repeats the calls of existing clients.

It reads lines like ``["slime", URL, WEIGHTS]`` and sends the tensors in a file of ``torch.save`` to an
engine. When it is connected to the engine, it prints ``connected`` and waits for another line; then it sends
the tensors and prints ``done``.
"""

from __future__ import annotations

import json
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

from tests.support.ports import free_port

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


def meet(engine: Engine, name: str, *, port_as_text: bool = False, world_size: int = 2) -> Any:
    """Asks the engine to join a group, and joins the group at the same time."""
    port = free_port()
    joining = Call(
        engine,
        "/init_weights_update_group",
        master_address="127.0.0.1",
        master_port=str(port) if port_as_text else port,
        rank_offset=1,
        world_size=world_size,
        group_name=name,
        backend="gloo",
    )
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name, timeout=TIMEOUT
    )
    c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    joining.result()
    return group


def leave(engine: Engine, name: str, group: Any) -> None:
    """Asks the engine to leave a group, and leaves it at the same time."""
    leaving = Call(engine, "/destroy_weights_update_group", group_name=name)
    dist.destroy_process_group(group)
    leaving.result()


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


def send_as_slime(engine: Engine, groups: dict[str, Any], buckets: list[Named], version: str) -> None:
    """Updates as slime does (update_weight_from_distributed.py:104): buckets in turn over the groups."""
    engine.post("/pause_generation")  # :111, sglang_engine.py:423
    deadline = time.monotonic() + 30
    while engine.call("/flush_cache")[0] != 200:  # :112, sglang_engine.py:270
        assert time.monotonic() < deadline, "the cache could not be flushed"
    for index, bucket in enumerate(buckets):
        name = list(groups)[index % len(groups)]
        update = Call(  # :340, sglang_engine.py:397
            engine,
            "/update_weights_from_distributed",
            **described(bucket),
            group_name=name,
            flush_cache=False,
            weight_version=version,
        )
        broadcast(groups[name], bucket)
        update.result()
    engine.post("/continue_generation")  # :134, sglang_engine.py:430


def slime(engine: Engine, buckets: list[Named]) -> None:
    """Sends as slime does: two pipeline ranks, each with a group and half of the buckets; reconnects once."""
    for turn in range(2):
        groups = {name: meet(engine, name) for name in ("slime-pp_0", "slime-pp_1")}
        if turn == 0:
            wait_for_line()
        send_as_slime(engine, groups, buckets, "7")
        for name, group in groups.items():
            leave(engine, name, group)


def external(engine: Engine, buckets: list[Named]) -> None:
    """Starts, updates, checks and rolls out as slime does with an engine that it has not started.

    The comments name the calls' places in slime, at its commit 624b824, below slime/.
    """
    # external.py:74 (get_server_info), :86 (_infer_worker_type), :103 to :106
    info = json.loads(engine.call("/server_info")[1])
    assert info.get("disaggregation_mode") not in ("prefill", "decode") and not info.get("encoder_only")
    pp_size = int(info.get("pp_size") or info.get("pipeline_parallel_size") or 1)
    tp_size = int(info.get("tp_size") or info.get("tensor_parallel_size") or 1)
    num_gpus = int(info.get("num_gpus") or info.get("num_gpus_per_engine") or tp_size * pp_size)
    assert int(info["disaggregation_bootstrap_port"]) and int(info.get("moe_dp_size") or 1) == 1
    # sglang_engine.py:160 (_sanity_check_server_args); which fields, :573
    assert info.get("enable_memory_saver") is False
    # sglang_engine.py:223 (health_generate)
    assert engine.call("/health_generate")[0] == 200
    # ray/placement_group.py:247 and :248 (--check-weight-update-equal), sglang_engine.py:341
    engine.post("/weights_checker", action="snapshot")
    engine.post("/weights_checker", action="reset_tensors")
    # update_weight_from_distributed.py:269 (connect_rollout_engines_from_distributed): a rank per GPU
    group = meet(engine, "slime-pp_0", world_size=1 + num_gpus)
    send_as_slime(engine, {"slime-pp_0": group}, buckets, "1")
    # train.py:30
    engine.post("/weights_checker", action="compare")
    wait_for_line()
    # rollout/sglang_rollout.py:349, server_control.py:43 (abort_server_until_idle)
    deadline = time.monotonic() + 30
    while True:
        status, text = engine.call("/abort_request", {"abort_all": True})  # server_control.py:34
        assert status == 200, text
        if num_requests_from_load(json.loads(engine.call("/v1/loads?include=core")[1])) <= 0:  # :40
            break
        assert time.monotonic() < deadline, "the engine does not become idle"
    send_as_slime(engine, {"slime-pp_0": group}, buckets, "2")
    # sglang_engine.py:320 (get_weight_version)
    assert json.loads(engine.call("/get_weight_version")[1])["weight_version"] == "2"
    leave(engine, "slime-pp_0", group)


def num_requests_from_load(load: Any) -> int:
    """Reads a load as slime does (server_control.py:12): a total, or else what runs and what waits."""
    if isinstance(load, list):
        return sum(num_requests_from_load(item) for item in load)
    if "loads" in load:
        return num_requests_from_load(load["loads"])
    for key in ("num_reqs", "num_total_reqs", "total_reqs"):
        if isinstance(load.get(key), int):
            return int(load[key])
    return int(load.get("num_running_reqs", 0)) + int(load.get("num_waiting_reqs", 0))


def vllm(engine: Engine, buckets: list[Named]) -> None:
    """Sends by vLLM's names: a pause that keeps requests, and one update of several calls."""
    group = meet(engine, "weight_update_group")
    wait_for_line()
    size = json.loads(engine.call("/get_world_size")[1])["world_size"]
    assert size == 1, size
    assert engine.post("/pause?mode=keep") == {"status": "paused"}
    engine.post("/start_weight_update", is_checkpoint_format=True)
    for bucket in buckets:
        info = described(bucket)
        update = Call(
            engine, "/update_weights", update_info=info | {"dtype_names": info.pop("dtypes"), "packed": False}
        )
        broadcast(group, bucket)
        update.result()
    engine.post("/finish_weight_update", weight_version="9")
    assert json.loads(engine.call("/weight_info")[1]) == {"weight_version": "9"}
    assert engine.post("/resume") == {"status": "resumed"}
    leave(engine, "weight_update_group", group)


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


CLIENTS = {"slime": slime, "external": external, "areal": areal, "vllm": vllm, "prepared": prepared}


def main() -> None:
    for line in sys.stdin:
        client, url, path = json.loads(line)
        weights = list(torch.load(path).items())
        buckets = [weights[start::NUM_BUCKETS] for start in range(NUM_BUCKETS)]
        CLIENTS[client](Engine(url), buckets)
        print("done", flush=True)


if __name__ == "__main__":
    main()
