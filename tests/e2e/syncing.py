"""Connects servers of a tiny model and a trainer process that uses only torch, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import safe_open

from tests.checkpoint import tiny
from tests.e2e.served import Served, serve
from tests.support.polling import rest
from tests.support.ports import free_port
from tests.support.shared_client import shared_client
from tests.weight_update.conftest import Trainer

DEADLINE_S = 60.0
PROMPTS = [[5, 17, 3, 11, 2], [8, 8, 8, 1], [30, 4, 21, 9, 9, 13, 2, 7]]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def write_checkpoints(directory: Path, kind: str, count: int = 2, **options: Any) -> list[Path]:
    """Writes checkpoints of one architecture with different weights."""
    paths = []
    for index in range(count):
        model, noise = tiny.make(kind, **options), torch.Generator().manual_seed(index)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
        paths.append(tiny.save(model, directory / f"{kind}-{index}"))
    return paths


def file_of(checkpoint: Path) -> Path:
    """Returns the weight file of a checkpoint directory, or the file itself."""
    return checkpoint / "model.safetensors" if checkpoint.is_dir() else checkpoint


def tensors_of(checkpoint: Path) -> list[tuple[str, str, list[int]]]:
    """Returns (name, dtype, shape) of all tensors in the file; a tied model's file has no head."""
    with safe_open(file_of(checkpoint), "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in found.items()]


def split(tensors: Sequence[Any], count: int) -> list[list[Any]]:
    """Splits tensors into ``count`` buckets of about equal numbers."""
    return [list(tensors[index::count]) for index in range(count)]


def described(buckets: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the buckets in the form of ``/prepare_weights_update``."""
    return [
        {
            "names": [name for name, _, _ in bucket],
            "dtypes": [dtype for _, dtype, _ in bucket],
            "shapes": [shape for *_, shape in bucket],
        }
        for bucket in buckets
    ]


@dataclass
class Syncing:
    """Servers, and the trainer that is connected to them."""

    servers: list[Served]
    trainers: str  # the address of the process that starts trainers
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))
    trainer: Trainer | None = None
    port: int = 0

    def __post_init__(self) -> None:
        self.clients = [shared_client(base_url=server.url, timeout=DEADLINE_S) for server in self.servers]

    @property
    def http(self) -> httpx.Client:
        return self.clients[0]

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.threads.shutdown()
        for client in self.clients:
            client.close()

    # --- the trainer ---

    def new_trainer(self, checkpoint: Path) -> Trainer:
        if self.trainer is not None:
            self.trainer.close()
        self.trainer = Trainer(self.trainers, DEADLINE_S)
        self.trainer.do("load", path=str(file_of(checkpoint)))
        return self.trainer

    def meet(self, name: str = "g", *, port: int = 0, ranks: int = 1) -> None:
        """Lets the trainer host a group, and every engine join it."""
        assert self.trainer is not None
        self.port = port or free_port()
        size = 1 + ranks * len(self.clients)
        self.trainer.begin("host", port=self.port, name=name, world_size=size)
        joins = [
            self.threads.submit(
                self.ask,
                "/init_weights_update_group",
                client,
                master_address="127.0.0.1",
                master_port=self.port,
                rank_offset=1 + ranks * index,
                world_size=size,
                group_name=name,
                backend="gloo",
            )
            for index, client in enumerate(self.clients)
        ]
        for join in joins:
            assert join.result(DEADLINE_S)["success"], join.result()
        answer = self.trainer.answer()
        assert "error" not in answer, answer

    def send(
        self, buckets: Sequence[Any], *, name: str = "g", flattened: bool = False, after: float = 0.0
    ) -> None:
        """Begins to broadcast; `sent` waits for the end."""
        assert self.trainer is not None
        self.trainer.do("make", buckets=buckets, flattened=flattened)
        self.trainer.begin("send", name=name, after=after)

    def sent(self) -> dict[str, Any]:
        assert self.trainer is not None
        return self.trainer.answer()

    # --- the engine ---

    def ask(self, path: str, client: httpx.Client | None = None, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = (client or self.http).post(path, json=body).json()
        return answer

    def later(self, path: str, **body: Any) -> Future[dict[str, Any]]:
        return self.threads.submit(self.ask, path, **body)

    def prepare(
        self, buckets: Sequence[Any], client: httpx.Client | None = None, **fields: Any
    ) -> dict[str, Any]:
        body = {"num_buckets": len(buckets), "buckets": described(buckets), "group_name": "g"} | fields
        return self.ask("/prepare_weights_update", client, **body)

    def complete(self, client: httpx.Client | None = None, **fields: Any) -> dict[str, Any]:
        return self.ask("/complete_weights_update", client, **({"group_name": "g"} | fields))

    def status(self, client: httpx.Client | None = None) -> dict[str, Any]:
        status: dict[str, Any] = (client or self.http).get("/weights_update_status").json()
        return status

    def until(self, timeout: float = DEADLINE_S, **facts: Any) -> dict[str, Any]:
        """Waits until the status agrees with ``facts``, and returns the status."""
        began = time.monotonic()
        while True:
            status = self.status()
            if all(status.get(name) == value for name, value in facts.items()):
                return status
            assert time.monotonic() < began + timeout, f"the status did not become {facts}: {status}"
            rest(began)

    def checksum(self, client: httpx.Client | None = None) -> int:
        total: int = (client or self.http).get("/weights_checker").json()["total"]
        return total

    def replies(self, client: httpx.Client | None = None) -> list[Any]:
        """Returns greedy tokens and their logprobs."""
        body = {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_logprob": True}
        replies = (client or self.http).post("/generate", json=body)
        assert replies.status_code == 200, replies.text
        return [
            (reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
            for reply in replies.json()
        ]

    def update(
        self, checkpoint: Path, *, buckets: int = 3, flattened: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Runs a whole update session with the current trainer."""
        parts = split(tensors_of(checkpoint), buckets)
        ready = self.prepare(parts, load_format="flattened_bucket" if flattened else None)
        assert ready["status"] == "ready", ready
        self.send(parts, flattened=flattened)
        done = self.complete(**fields)
        assert "error" not in self.sent()
        return done


@contextmanager
def syncing(trainers: str, *checkpoints: Path, options: Sequence[str] = ()) -> Iterator[Syncing]:
    """Starts one server per checkpoint, for one or two checkpoints."""
    servers = [serve("--model", str(path), *options) for path in checkpoints]
    with servers[0] as first:
        if len(servers) == 1:
            running = Syncing([first], trainers)
            try:
                yield running
            finally:
                running.close()
            return
        with servers[1] as second:
            running = Syncing([first, second], trainers)
            try:
                yield running
            finally:
                running.close()
