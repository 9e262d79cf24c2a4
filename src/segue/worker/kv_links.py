"""Rank 0's connections to the workers that it hands KV to or gets KV from.

The scheduler's `TransferMachine` decides what is sent, and the thread of `Links` sends and receives it.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from segue.config import EngineConfig
from segue.disagg.handshake import common_transports
from segue.disagg.links import Links
from segue.disagg.machine import TransferMachine
from segue.disagg.mover import Mover, PageReceiver, PageSender
from segue.disagg.transports.shm import ShmExport, ShmTransport
from segue.errors import ConfigError, KVProtocolError
from segue.logs import logger
from segue.messages.kv import Hello, KVEvent, KVIdentity, RankAddress, TransportOffer
from segue.messages.kv_link import LinkClosed, LinkEvent, LinkMessage, LinkOpened
from segue.model_runner.runner import ModelRunner
from segue.version import __version__


class KVLinks:
    """The connections of a worker, and the machine whose messages they carry."""

    def __init__(
        self,
        config: EngineConfig,
        hello: Callable[[], Hello],
        machine: TransferMachine,
        send: Callable[[LinkEvent], None],
    ) -> None:
        """Accept connections if this worker prefills; ``send`` takes events, from any thread.

        Raises:
            ConfigError: the address of ``--host`` and ``--disaggregation-bootstrap-port`` cannot be used.
        """
        host = f"[{config.host}]" if ":" in config.host else config.host
        listen = f"{host}:{config.disaggregation_bootstrap_port}" if config.role == "prefill" else None
        key = config.pd_key.encode() if config.pd_key else None
        self._hello = hello()
        self._machine = machine
        self._dialed: dict[int, str] = {}  # connections that are being opened, not accepted -> address
        self._names: dict[int, str] = {}  # of the workers behind open connections
        self._links = Links(listen, hello, key, send)
        self.address = self._links.address
        if self.address is not None:
            logger.info("decode engines get KV at %s", self.address)

    def on_event(self, event: LinkEvent, now: float) -> None:
        """Take an event of the connections."""
        match event:
            case LinkOpened():
                decodes = "decode" in self._hello.work
                ends = (event.hello, self._hello) if decodes else (self._hello, event.hello)
                transport = common_transports(*ends)[0]
                address = self._dialed.pop(event.peer, None)
                self._names[event.peer] = event.hello.engine_id
                self._machine.on_opened(event.peer, event.session, address, event.hello, transport, now)
                logger.info("connected to %s, to hand over KV by %s", event.hello.engine_id, transport)
            case LinkMessage():
                self._machine.on_message(event.peer, event.message, now)
            case LinkClosed():
                name = self._names.pop(event.peer, None)
                if (address := self._dialed.pop(event.peer, None)) is not None:
                    self._machine.on_unreachable(address, now)
                else:  # the machine may know it already, as it has asked for it
                    self._machine.on_closed(event.peer, now)
                logger.warning("the connection to %s is closed: %s", name or address, event.reason)

    def flush(self, now: float) -> None:
        """Send what the machine has to say, and open and close connections as it wants."""
        peers = self._machine.peers
        messages, peers.messages = peers.messages, []
        for number, message in messages:
            try:
                self._links.send(number, message)
            except KVProtocolError as error:
                peers.closes.append((number, error.message))
        closes, peers.closes = peers.closes, []
        for number, reason in closes:
            self._links.disconnect(number, reason)
        connects, peers.connects = peers.connects, []
        for address in connects:
            try:
                self._dialed[self._links.connect(address)] = address
            except ConfigError as error:
                logger.warning("%s", error.message)
                self._machine.on_unreachable(address, now)

    def close(self) -> None:
        """Close all connections."""
        self._links.close()


def make_mover(
    config: EngineConfig, runner: ModelRunner, run_dir: Path, send: Callable[[KVEvent], None]
) -> tuple[Mover, RankAddress]:
    """Returns what moves the KV of a rank, and how others reach its pool."""
    path, offer, receiver, sender = "", b"", None, None
    if config.role == "decode":
        assert runner.kv_descriptor is not None
        path, descriptor = str(run_dir / f"kv{runner.tp.rank}"), runner.kv_descriptor
        receiver = PageReceiver(lambda gone: ShmExport(runner.kv, descriptor, path, gone), send)
        offer = receiver.pool.blob
    else:
        sender = PageSender(
            lambda ready: ShmTransport(runner.kv, ready),
            rank=runner.tp.rank,
            tp=runner.tp.size,
            await_step=runner.await_step,
            send=send,
        )
    address = RankAddress(path=path, device="", offers=[TransportOffer(kind="shm", blob=offer)])
    return Mover(sender, receiver), address


def make_hello(
    config: EngineConfig, runner: ModelRunner, ranks: list[RankAddress], identity: Callable[[], KVIdentity]
) -> Callable[[], Hello]:
    """Returns the function that says what this worker is; the identity of its KV changes with its weights."""
    model = runner.model_config
    name, boot_id = uuid.uuid4().hex, ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    shape = msgspec.json.encode(msgspec.to_builtins(model, enc_hook=str), order="sorted")
    cpu = torch.backends.cpu.get_cpu_capability()
    numerics = [torch.__version__, cpu, torch.get_num_threads(), config.attention_backend, runner.tp.size]

    def hello() -> Hello:
        return Hello(
            engine_id=f"{config.role}-{os.getpid()}-{name[:8]}",
            incarnation=name,
            boot_id=boot_id,
            work=["decode" if config.role == "decode" else "prefill"],
            model=hashlib.sha256(shape).hexdigest(),
            tokenizer="",
            dtype=str(runner.dtype).removeprefix("torch."),
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=runner.limits.page_size,
            tp=runner.tp.size,
            num_pages=runner.limits.num_pages,
            max_seq_len=runner.limits.max_seq_len,
            deterministic=config.deterministic,
            numerics=f"segue {__version__} {numerics}",
            identity=identity(),
            ranks=ranks,
        )

    return hello
