"""A rank without weights and memory: it answers rank 0 at once, as a rank would."""

from __future__ import annotations

from collections.abc import Callable

from segue.messages.memory import MemoryCommand, MemoryMoved
from segue.messages.steps import RankEvent
from segue.messages.weight_operations import Manifest
from segue.messages.weight_update import (
    Commit,
    Inspect,
    Join,
    RankReply,
    Receive,
    Received,
    Stage,
    WeightCommand,
)

VALUES = {"shape": [1], "parts": [{"place": [[0, 1]], "float32": bytes(4)}]}


class FakeUpdater:
    """Every command succeeds, and a receive has all tensors of its manifest at once."""

    def __init__(self, send: Callable[[RankEvent], None], rank: int = 0) -> None:
        self._send = send
        self._rank = rank
        self._manifest: Manifest | None = None
        self.handled: list[WeightCommand] = []

    def handle(self, command: WeightCommand) -> None:
        self.handled.append(command)
        fields: dict[str, object] = {}
        match command:
            case Join():
                fields = {"is_new": True}
            case Stage():
                self._manifest = command.manifest
            case Commit():
                fields = {"touched": True}
            case Inspect():
                fields = {"checksums": {f"t{self._rank}": 1}, "num_bytes": 1, "differ": [], **VALUES}
        self._send(RankReply(rank=self._rank, call=command.call, fields=fields))
        if isinstance(command, Receive):
            assert self._manifest is not None
            self._send(
                Received(
                    rank=self._rank,
                    session=command.session,
                    num_buckets=len(self._manifest.buckets),
                    num_bytes=1,
                    done=True,
                )
            )


class FakeMemory:
    """Every command moves ten bytes per kind of memory."""

    def __init__(self, send: Callable[[RankEvent], None], rank: int = 0) -> None:
        self._send = send
        self._rank = rank
        self.handled: list[MemoryCommand] = []

    def handle(self, command: MemoryCommand) -> None:
        self.handled.append(command)
        fields = {"num_bytes": 10 * len(command.tags)}
        self._send(MemoryMoved(rank=self._rank, call=command.call, fields=fields))
