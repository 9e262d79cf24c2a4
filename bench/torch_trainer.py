"""A trainer that knows torch and the calls over HTTP, and nothing of Segue: it sends as fast as it can.

It makes the calls of a trainer that prepares an engine, broadcasts every tensor by itself, and completes the
update. It knows of no limit to its speed and asks for no state of the engine.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from bench.launch import free_port
from bench.streams import json_request

GROUP = "torch_trainer"
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class TorchUpdate:
    """What one update took."""

    began: float  # by `time.monotonic`, before the first call
    received: float  # when all broadcasts had ended
    ended: float  # at the last answer
    timings: dict[str, float]  # the engine's own, in seconds

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TorchTrainer:
    """Sends tensors to an engine of one rank, in a group of its own that exists within the ``with`` block."""

    def __init__(
        self, url: str, weights: dict[str, torch.Tensor], num_buckets: int, *, on_first: Callable[[], None]
    ) -> None:
        """Take the tensors, all on one CUDA device; ``on_first`` is called when the first bucket is there."""
        self._url, self._on_first = url, on_first
        named = list(weights.items())
        size = -(-len(named) // num_buckets)
        self._buckets = [named[start : start + size] for start in range(0, len(named), size)]

    def __enter__(self) -> TorchTrainer:
        """Join a group with the engine: rank 0 is here, and the engine is rank 1."""
        port = free_port()
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        joining = threading.Thread(
            target=self._post, args=("init_weights_update_group", body | {"group_name": GROUP})
        )
        joining.start()
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=TIMEOUT))
        self._group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend("nccl"),
            c10d.PrefixStore(GROUP, store),
            group_name=GROUP,
            timeout=TIMEOUT,
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
        joining.join()
        return self

    def __exit__(self, *_: object) -> None:
        leaving = threading.Thread(
            target=self._post, args=("destroy_weights_update_group", {"group_name": GROUP})
        )
        leaving.start()
        dist.destroy_process_group(self._group)
        leaving.join()

    def send(self) -> TorchUpdate:
        """Send all tensors, and return when the engine has them in use."""
        began = time.monotonic()
        described = [
            {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            for bucket in self._buckets
        ]
        ready = self._post(
            "prepare_weights_update",
            {"num_buckets": len(described), "buckets": described, "group_name": GROUP},
        )
        assert ready["status"] == "ready", ready
        for number, bucket in enumerate(self._buckets):
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=self._group)
            if number == 0:
                torch.cuda.synchronize(tensor.device)
                self._on_first()
        torch.cuda.synchronize(self._buckets[0][0][1].device)
        received = time.monotonic()
        done = self._post("complete_weights_update", {"group_name": GROUP, "flush_cache": False})
        assert done["success"], done
        return TorchUpdate(began, received, time.monotonic(), done["timings"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = json_request(f"{self._url}/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=TIMEOUT.total_seconds()) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
