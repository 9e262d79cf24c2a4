"""Weight updaters on tiny checkpoints, and a trainer in a thread that broadcasts to them over gloo."""

from __future__ import annotations

import base64
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from segue.checkpoint.load import load_weights
from segue.checkpoint.source import resolve
from segue.distributed.info import TPInfo
from segue.memory.rank_memory import PrivateMemory, RankMemory
from segue.messages.weight_operations import Bucket, Group, Manifest, UpdateFromDisk
from segue.messages.weight_update import Join, Load, RankReply, Receive, Received, Stage
from segue.model_runner.executor import ComputeStream, make_stream
from segue.models import weight_map
from segue.models.decoder import Decoder, build_model
from segue.weight_update.rank import WeightUpdater
from segue.weight_update.served import ServedWeights
from tests.checkpoint import tiny
from tests.support.ports import free_port

DEADLINE_S = 60.0
State = dict[str, Tensor]


@dataclass
class Rank:
    """One rank of an engine, without the steps."""

    model: Decoder
    served: ServedWeights
    updater: WeightUpdater
    stream: ComputeStream
    messages: queue.Queue[RankReply | Received]
    received: list[Received] = field(default_factory=list)
    calls: int = 0

    def send(self, kind: type[Any], **fields: Any) -> int:
        self.calls += 1
        if isinstance(fields.get("payload"), bytes):
            fields["payload"] = base64.b64encode(fields["payload"]).decode()
        if kind is Load:
            names = ("model_path", "load_format")
            fields["request"] = UpdateFromDisk(**{name: fields.pop(name) for name in names})
        self.updater.handle(kind(call=self.calls, **fields))
        return self.calls

    def reply(self, call: int) -> RankReply:
        while True:
            message = self.messages.get(timeout=DEADLINE_S)
            if isinstance(message, RankReply):
                assert message.call == call and message.rank == self.served.tp.rank
                return message
            self.received.append(message)

    def ask(self, kind: type[Any], **fields: Any) -> RankReply:
        return self.reply(self.send(kind, **fields))

    def do(self, kind: type[Any], **fields: Any) -> dict[str, Any]:
        """Ask, and expect no errors."""
        reply = self.ask(kind, **fields)
        assert reply.errors == []
        return reply.fields

    def wait_received(self) -> Received:
        while not (self.received and self.received[-1].done):
            message = self.messages.get(timeout=DEADLINE_S)
            assert isinstance(message, Received)
            self.received.append(message)
        return self.received[-1]


@contextmanager
def rank_of(
    path: Path, tp: TPInfo | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Iterator[Rank]:
    tp = tp or TPInfo()
    source = resolve(
        str(path),
        options.pop("load_format", "auto"),
        Path("/nonexistent"),
        quantization=options.pop("quantization", "auto"),
    )
    device = torch.device(options.pop("device", "cpu"))
    model = build_model(source.config, dtype=dtype, collectives=tiny.Rank(tp))
    memory: RankMemory = options.pop("memory", None) or PrivateMemory(device)
    arena = load_weights(model, source.config, source, tp, memory, dtype)
    model.build_derived()
    stream = make_stream(device)
    served = ServedWeights(
        arena=arena,
        weight_map=weight_map.build(source.config, tp),
        config=source.config,
        tp=tp,
        memory=memory,
        dtype=dtype,
        submit=stream.submit,
        **{"rebuild": model.build_derived, "packer": model.packer, **options},
    )
    messages: queue.Queue[RankReply | Received] = queue.Queue()
    updater = WeightUpdater(served, messages.put)
    try:
        yield Rank(model, served, updater, stream, messages)
    finally:
        updater.close()
        stream.close()


def manifest_of(state: State, *, num_buckets: int = 3, group: str = "g", **options: Any) -> Manifest:
    names = list(state)
    size = max(1, -(-len(names) // num_buckets))
    buckets = [
        Bucket(
            names=part,
            dtypes=[str(state[name].dtype) for name in part],
            shapes=[list(state[name].shape) for name in part],
        )
        for part in (names[start : start + size] for start in range(0, len(names), size))
    ]
    return Manifest(group_name=group, buckets=buckets, **options)


class Trainer:
    """Rank 0 of a group that `ranks` join."""

    def __init__(self, ranks: Sequence[Rank], name: str = "g") -> None:
        self.group = Group(
            name=name,
            master_address="127.0.0.1",
            master_port=free_port(),
            rank_offset=1 - ranks[0].served.tp.rank,
            world_size=1 + len(ranks),
            backend="gloo",
        )
        self._ready: dict[int, list[Tensor]] = {}
        self._begin(self._meet)
        calls = [(rank, rank.send(Join, group=self.group, timeout_s=DEADLINE_S)) for rank in ranks]
        for rank, call in calls:
            assert rank.reply(call).errors == []
        self.join()

    def prepare(self, state: State, manifest: Manifest) -> None:
        """Make the tensors now that :meth:`broadcast` will send."""
        self._ready[id(state)] = list(broadcasts_of(state, manifest))

    def broadcast(self, state: State, manifest: Manifest) -> None:
        """Begin to broadcast; `join` waits for the end."""
        self._begin(lambda: self._broadcast(state, manifest))

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _meet(self) -> None:
        address = f"tcp://127.0.0.1:{self.group.master_port}"
        timeout, name = timedelta(seconds=DEADLINE_S), self.group.name
        store, _, _ = next(
            dist.rendezvous(address, rank=0, world_size=self.group.world_size, timeout=timeout)
        )
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._backend = dist.ProcessGroupGloo(store, 0, self.group.world_size, timeout)

    def _broadcast(self, state: State, manifest: Manifest) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for tensor in self._ready.pop(id(state), None) or broadcasts_of(state, manifest):
            self._backend.broadcast([tensor], options).wait()

    def _begin(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()


def broadcasts_of(state: State, manifest: Manifest) -> Iterator[Tensor]:
    """Yields the bytes of each broadcast, in order."""
    for bucket in manifest.buckets:
        tensors = [state[name].contiguous().reshape(-1).view(torch.uint8) for name in bucket.names]
        if manifest.flattened:
            yield torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
        else:
            yield from tensors


def transfer(
    ranks: Sequence[Rank], trainer: Trainer, state: State, manifest: Manifest, session: int = 1
) -> list[Received]:
    """Stage and receive on all ranks; returns the last message of each."""
    for rank in ranks:
        rank.received.clear()
        rank.do(Stage, session=session, manifest=manifest)
    trainer.broadcast(state, manifest)
    for rank, call in [(rank, rank.send(Receive, session=session)) for rank in ranks]:
        assert rank.reply(call).errors == []
    trainer.join()
    return [rank.wait_received() for rank in ranks]
