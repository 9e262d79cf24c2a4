"""Rank 0's connections to the workers that it hands KV to or gets KV from.

The scheduler's `TransferMachine` decides what is sent, and the thread of `Links` sends and receives it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import msgspec
import torch
from msgspec import structs

from segue.config import EngineConfig
from segue.disagg.handshake import common_transports
from segue.disagg.links import Links
from segue.disagg.machine import TransferMachine
from segue.errors import ConfigError, KVProtocolError
from segue.host import boot_id
from segue.kernels.cpu import ops as cpu
from segue.logs import logger
from segue.messages.fleet import Role
from segue.messages.kv import Hello, Pools, RankAddress
from segue.messages.kv_link import LinkCloseCode, LinkClosed, LinkEvent, LinkMessage, LinkOpened
from segue.model_runner.runner import ModelRunner
from segue.scheduler.scheduler import Scheduler
from segue.version import __version__

LASTING: tuple[LinkCloseCode, ...] = ("kv_mismatch", "kv_key")  # reasons that a later attempt will meet too
REFUSED_S = 30.0  # for which such a reason is taken to last
MAX_REFUSALS = 256  # addresses of which it is known that they cannot be reached
ROLE_CHANGED = "a role has changed during the handshake"  # why a connection is closed then

# What a worker of each role says that it does for others.
WORK: dict[Role, list[Literal["prefill", "decode"]]] = {
    "both": [],
    "prefill": ["prefill"],
    "decode": ["decode"],
}


class _Refusal(NamedTuple):
    """Why an address could not be reached, and when."""

    code: LinkCloseCode
    reason: str
    at: float


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
        self._listen_address = f"{host}:{config.disaggregation_bootstrap_port}"
        key = config.pd_key.encode() if config.pd_key else None
        self._hello = hello  # its ranks' blobs are told by `Pools` alone
        self._opened: dict[int, LinkOpened] = {}  # connections of decode workers that have not sent `Pools`
        self._machine = machine
        self._dialed: dict[int, str] = {}  # connections that are being opened, not accepted -> address
        self._names: dict[int, str] = {}  # of the workers behind open connections
        self._refusals: dict[str, _Refusal] = {}  # by address; the last one that was tried at the end
        self._links = Links(None, lambda: _without_blobs(hello()), key, send)
        self.address: str | None = None  # where decode workers connect; None: nowhere
        try:
            self.set_role(config.role)
        except ConfigError:
            self._links.close()
            raise

    def set_role(self, role: Role) -> str | None:
        """Accept connections if the worker prefills, and else none; returns the address.

        Raises:
            ConfigError: the address of ``--host`` and ``--disaggregation-bootstrap-port`` cannot be used.
        """
        if role == "prefill" and self.address is None:
            self.address = self._links.listen(self._listen_address)
            logger.info("decode engines get KV at %s", self.address)
        elif role != "prefill" and self.address is not None:
            self._links.stop_listening()
            self.address = None
        return self.address

    def on_event(self, event: LinkEvent, now: float) -> None:
        """Take an event of the connections."""
        match event:
            case LinkOpened():
                self._on_handshake(event, now)
            case LinkMessage(message=Pools() as pools) if (
                opened := self._opened.pop(event.peer, None)
            ) is not None:
                self._on_pools(opened, pools, now)
            case LinkMessage():
                self._machine.on_message(event.peer, event.message, now)
            case LinkClosed():
                self._opened.pop(event.peer, None)
                name = self._names.pop(event.peer, None)
                if (address := self._dialed.pop(event.peer, None)) is not None:
                    self._machine.on_unreachable(address, now)
                    self._note_refusal(address, event, now)
                else:  # the machine may know it already, as it has asked for it
                    self._machine.on_closed(event.peer, now)
                    logger.warning("the connection to %s is closed: %s", name, event.reason)

    def refused(self, now: float) -> dict[str, str]:
        """Returns the addresses of prefill workers that no KV can come from, and why, as far as it is known.

        One of the two workers has to be started differently, so requests need not try it again and again.
        """
        return {
            address: refusal.reason
            for address, refusal in self._refusals.items()
            if refusal.code in LASTING and now < refusal.at + REFUSED_S
        }

    def _note_refusal(self, address: str, event: LinkClosed, now: float) -> None:
        """Log that an address cannot be reached, unless nothing has changed since the last attempt.

        Every request that names the address is an attempt, and so is every second while a last word is due.
        """
        before = self._refusals.pop(address, None)
        is_news = before is None or before.code != event.code
        self._refusals[address] = _Refusal(event.code, event.reason, now)
        if len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        level = logging.WARNING if is_news else logging.DEBUG
        logger.log(level, "no connection to the prefill engine at %s: %s", address, event.reason)

    def _on_handshake(self, event: LinkOpened, now: float) -> None:
        """A connection is open. If KV leaves here, it can be used once `Pools` has come."""
        hello = self._hello()
        self._names[event.peer] = event.hello.engine_id
        if "prefill" in hello.work and event.peer not in self._dialed:  # the other side has dialed, to get KV
            self._opened[event.peer] = event
        elif _fit(event.hello, hello):
            self._links.send(event.peer, Pools(ranks=hello.ranks))
            self._on_opened(event, common_transports(event.hello, hello)[0], now)
        else:
            self._links.disconnect(event.peer, ROLE_CHANGED)

    def _on_pools(self, event: LinkOpened, pools: Pools, now: float) -> None:
        """A decode worker has said how to write into its pools."""
        hello, said = self._hello(), structs.replace(event.hello, ranks=pools.ranks)
        if _without_blobs(said) != event.hello:
            self._links.disconnect(event.peer, "Pools has other ranks or transports than Hello")
        elif not _fit(hello, said):
            self._links.disconnect(event.peer, ROLE_CHANGED)
        else:
            opened = LinkOpened(event.peer, event.session, said)
            self._on_opened(opened, common_transports(hello, said)[0], now)

    def _on_opened(self, event: LinkOpened, transport: str, now: float) -> None:
        """A connection can be used."""
        address = self._dialed.pop(event.peer, None)
        self._machine.on_opened(event.peer, event.session, address, event.hello, transport, now)
        self._refusals.pop(address or "", None)
        logger.info("connected to %s, to hand over KV by %s", event.hello.engine_id, transport)

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

    def set_load(self, scheduler: Scheduler) -> None:
        """Have the thread of the connections tell others whether a step runs; the caller may wait for it."""
        in_flight = scheduler.in_flight
        self._links.set_load(step=in_flight[-1].plan.step if in_flight else 0, busy=bool(in_flight))

    def close(self) -> None:
        """Close all connections."""
        self._links.close()


def _fit(source: Hello, target: Hello) -> bool:
    """Whether one worker computes KV for the other one."""
    return "prefill" in source.work and "decode" in target.work


def _without_blobs(hello: Hello) -> Hello:
    """Returns what may be said to a worker that has not proven that it has the key."""
    ranks = [
        structs.replace(rank, offers=[structs.replace(offer, blob=b"") for offer in rank.offers])
        for rank in hello.ranks
    ]
    return structs.replace(hello, ranks=ranks)


def make_hello(
    config: EngineConfig, runner: ModelRunner, ranks: list[RankAddress], scheduler: Scheduler
) -> Callable[[], Hello]:
    """Returns the function that says what this worker is: its role may change, and its weights."""
    model = runner.model_config
    name, boot = uuid.uuid4().hex, boot_id()
    shape = msgspec.json.encode(msgspec.to_builtins(model, enc_hook=str), order="sorted")
    tokenizer = runner.source.tokenizer_digest()
    numerics = [torch.__version__, *_device_numerics(runner), runner.tp.size]

    def hello() -> Hello:
        role = scheduler.roles.role
        return Hello(
            engine_id=f"{role}-{os.getpid()}-{name[:8]}",
            incarnation=name,
            boot_id=boot,
            work=WORK[role],
            model=hashlib.sha256(shape).hexdigest(),
            tokenizer=tokenizer,
            dtype=str(runner.dtype).removeprefix("torch."),
            kv_cache=runner.kv.format,
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=runner.limits.page_size,
            tp=runner.tp.size,
            num_pages=runner.limits.num_pages,
            max_seq_len=runner.limits.max_seq_len,
            deterministic=config.deterministic,
            numerics=f"segue {__version__} {numerics}",
            identity=scheduler.kv_identity,
            ranks=ranks,
        )

    return hello


def _device_numerics(runner: ModelRunner) -> list[object]:
    """Returns what decides the bits of results besides torch and the number of ranks."""
    if runner.device.type == "cpu":
        backend = torch.backends.cpu
        gemm = "own" if cpu.usable(torch.empty(0, dtype=runner.dtype)) else "torch"
        return [backend.get_cpu_capability(), torch.get_num_threads(), runner.attention_backend, gemm]
    properties = torch.cuda.get_device_properties(runner.device)
    capability = f"{properties.major}.{properties.minor}"
    return [properties.name, capability, torch.version.cuda, _version("triton"), runner.attention_backend]


def _version(distribution: str) -> str:
    """Returns the version of an installed distribution; empty: there is none."""
    with suppress(PackageNotFoundError):
        return version(distribution)
    return ""
