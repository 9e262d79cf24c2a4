"""A trainer that uses torch alone, without Segue: it does what SGLang's clients do, on orders from a socket.

``python trainer.py SOCKET`` imports torch once. Each connection to the socket starts a trainer, a process of
its own, which reads one JSON object per line and answers each with another. It ends with its connection.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

LOADED: dict[str, torch.Tensor] = {}
SECONDS = 900  # no process of this file lives longer


def host(port: int, name: str, world_size: int, backend: str = "gloo", device: int | None = None) -> Any:
    """SGLang's and OpenRLHF's ``init_custom_process_group``, as rank 0."""
    timeout = timedelta(seconds=100)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
        device_id=None if device is None else torch.device("cuda", device),
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def content(name: str, dtype: str, shape: list[int], device: str = "cpu") -> torch.Tensor:
    """Returns a tensor of the loaded checkpoint; else one whose bytes depend on the name only."""
    if name in LOADED:
        return LOADED[name].to(device)
    kind = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    values = (torch.arange(num_bytes, dtype=torch.int32, device=device) * 31 + sum(name.encode())) % (
        2 if dtype == "bool" else 251
    )
    return values.to(torch.uint8).view(kind).view(shape)


def messages(buckets: list[Any], flattened: bool, device: str = "cpu") -> list[torch.Tensor]:
    """Returns the broadcasts for these buckets of (name, dtype, shape)."""
    made = []
    for bucket in buckets:
        tensors = [content(*tensor, device) for tensor in bucket]
        if flattened:
            parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
            tensors = [torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)]
        made += tensors
    return made


def send(group: Any, tensors: list[torch.Tensor]) -> float:
    """Broadcast the tensors; returns the seconds that it took."""
    began = time.perf_counter()
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def serve(connection: socket.socket) -> None:
    groups: dict[str, Any] = {}
    made: list[torch.Tensor] = []
    lines = connection.makefile("rw")
    while line := lines.readline():
        order = json.loads(line)
        do = order.pop("do")
        answer: dict[str, Any] = {}
        try:
            if do == "host":
                groups[order["name"]] = host(**order)
            elif do == "make":
                made = messages(**order)
            elif do == "send":
                time.sleep(order.get("after", 0.0))
                answer["seconds"] = send(groups[order["name"]], made)
            elif do == "load":
                LOADED.update(load_file(order["path"]))
            elif do == "destroy":
                dist.destroy_process_group(groups.pop(order["name"]))
        except Exception as error:
            answer["error"] = repr(error)
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


def limit_life() -> None:
    """Make this process end with its parent, however the parent ends, and at the deadline."""
    signal.alarm(SECONDS)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    torch.set_num_threads(1)
    limit_life()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                limit_life()
                listener.close()
                with connection:
                    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
                    with suppress(ConnectionError):
                        serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
