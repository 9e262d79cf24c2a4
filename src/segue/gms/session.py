"""A client that the memory service has admitted, and its connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from segue.gms import messages as wire
from segue.gms.manifest import WeightsManifest
from segue.gms.transport import close, packed


class GmsPort(Protocol):
    """The connection of a session."""

    def send(self, reply: wire.Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a message; one that the client does not take ends its session."""

    def has_left(self) -> bool:
        """Whether the client has closed the connection, even if messages of it are still unread."""


@dataclass(slots=True, kw_only=True)
class GmsSession:
    """A client that was admitted."""

    number: int
    pid: int
    hello: wire.OpenSession
    port: GmsPort
    epoch: int  # the highest that its engine has claimed; 0: none
    ask_call: int = 0  # the call that waits for weights; 0: none
    manifest: WeightsManifest | None = None  # that it has asked with
    since: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """What the engine's session is called in messages."""
        hello = self.hello
        return f"{hello.cohort}/{hello.engine} rank {hello.rank} (pid {self.pid})"

    def refuse(self, call: int, code: str, text: str) -> None:
        """Answer that a call is not done."""
        self.port.send(wire.CallRefused(call=call, code=code, text=text))

    def send_file(self, reply: wire.Reply, data: bytes) -> None:
        """Send a reply with a memfd of data that may be larger than a frame."""
        descriptor = packed(data)
        self.port.send(reply, [descriptor])
        close([descriptor])
