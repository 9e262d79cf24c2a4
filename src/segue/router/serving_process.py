"""One of several processes that serve a router's clients; the coordinator starts it.

    python -m segue.router.serving_process LINK LISTENER

Both are descriptors that it inherits: its end of the connection to the coordinator, and a socket at the
router's port, which listens once the process knows the workers. It ends when the coordinator asks for it, and
at once when the coordinator dies.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from array import array
from dataclasses import dataclass, field

import uvloop

from segue.host import freeze_heap
from segue.listener import listen
from segue.logs import configure
from segue.router.app import create_router_app
from segue.router.breaker import BreakerState
from segue.router.config import RouterConfig
from segue.router.draining import drain
from segue.router.entry import Elsewhere
from segue.router.fleet import CacheName
from segue.router.forwarding import Forwarding
from segue.router.index import Keys
from segue.router.process_link import ProcessLink
from segue.router.process_messages import (
    BeginServing,
    EndServing,
    FleetState,
    HeldElsewhere,
    PrefixGiven,
    PrefixLacked,
    ProcessReport,
    ToProcess,
)
from segue.router.registry import Registry
from segue.router.router import Router
from segue.router.shared_fleet import FleetCopy
from segue.server.connections import ConnectionLimits, raise_descriptor_limit
from segue.server.http_server import HttpServer, first_of
from segue.tls import server_context

DESCRIPTORS_EACH = 3  # per client: its own connection, and those to a pair of workers
KEY = "q"  # of `array`: a block's key is an int64


@dataclass(slots=True)
class ServingShare:
    """What this process knows by the coordinator, and tells it."""

    registry: Registry
    link: ProcessLink[ToProcess]
    copy: FleetCopy = field(init=False)
    knows_workers: asyncio.Event = field(default_factory=asyncio.Event)
    ends: asyncio.Event = field(default_factory=asyncio.Event)  # the process is to end, within `drain_s`
    ends_now: asyncio.Event = field(default_factory=asyncio.Event)
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        self.copy = FleetCopy(self.registry)
        self.registry.on_given = self._tell_given
        self.registry.on_lacked = self._tell_lacked

    async def follow(self) -> None:
        """Take the coordinator's messages until it is gone."""
        self._report()
        async for message in self.link:
            self._take(message)

    def _take(self, message: ToProcess) -> None:
        match message:
            case FleetState():
                self.copy.take(message)
                self._report()
                self.knows_workers.set()
            case HeldElsewhere():
                self.registry.elsewhere = Elsewhere(held=message.held)
            case PrefixGiven():
                self.registry.index.add(_keys(message.keys), message.worker, message.cache)
            case PrefixLacked():
                keys = _keys(message.keys)
                self.registry.index.correct(keys, message.worker, message.predicted, message.cached)
            case EndServing():
                self.drain_s = message.drain_s
                if not message.drain_s:
                    self.ends_now.set()
                self.ends.set()
            case BeginServing():
                raise AssertionError("the first message came twice")

    def _report(self) -> None:
        registry = self.registry
        breakers = {view.id: view.breaker for view in registry.views()}
        self.link.send(
            ProcessReport(
                version=self.copy.version,
                held=dict(registry.holds.by_worker()),
                pending=dict(registry.holds.pending()),
                breakers={
                    worker: breaker
                    for worker, breaker in breakers.items()
                    if breaker.state is not BreakerState.CLOSED
                },
                counters=registry.counters,
            )
        )

    def _tell_given(self, keys: Keys, worker: str, cache: CacheName | None) -> None:
        self.link.send(PrefixGiven(worker=worker, cache=cache, keys=array(KEY, keys).tobytes()))

    def _tell_lacked(self, keys: Keys, worker: str, predicted: int, cached: int) -> None:
        data = array(KEY, keys).tobytes()
        self.link.send(PrefixLacked(worker=worker, keys=data, predicted=predicted, cached=cached))


def _keys(data: bytes) -> Keys:
    return array(KEY, data).tolist()


async def serve_clients(end: socket.socket, listener: socket.socket) -> int:
    """Serve until the coordinator wants it to end, or is gone; returns the exit code.

    Raises:
        ConfigError: the port was taken meanwhile.
    """
    link: ProcessLink[ToProcess] = await ProcessLink.open(end, ToProcess)
    begin = await link.receive()
    if not isinstance(begin, BeginServing):
        return 1
    config = RouterConfig(**begin.config)
    configure(config.log_level, config.log_format)
    raise_descriptor_limit(DESCRIPTORS_EACH)
    app = create_router_app(config)
    router: Router = app.state.router
    forwarding = Forwarding(app, begin.address)
    limits = ConnectionLimits.of_this_process(config.max_body_mib, DESCRIPTORS_EACH)
    server = HttpServer(
        forwarding, limits, config.log_level, tls=server_context(config), root_path=config.root_path
    )
    share = ServingShare(router.registry, link)
    following = asyncio.create_task(share.follow())
    ending = asyncio.create_task(share.ends.wait())
    http: asyncio.Task[None] | None = None
    try:
        await first_of(asyncio.ensure_future(share.knows_workers.wait()), ending, following)
        if not share.ends.is_set() and not following.done():
            listen(listener)
            http = asyncio.create_task(server.serve(sockets=[listener]))
            freeze_heap()
            await first_of(ending, http, following)
            await drain(router, server, share.drain_s, lambda: share.ends_now.is_set() or following.done())
        return 0 if share.ends.is_set() else 1
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        server.should_exit = True
        router.registry.is_closed = True
        for entry in router.registry:
            router.registry.remove(entry)
        if http is not None:
            await http
        forwarding.close()
        await router.close_tracer()
        await link.close()


def main() -> None:
    """Run the process."""
    end, listener = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    sys.exit(uvloop.run(serve_clients(end, listener)))


if __name__ == "__main__":
    main()
