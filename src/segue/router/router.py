"""One running router: its workers, the tasks that watch them, and how clients' requests are relayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request
from starlette.types import Scope

from segue.errors import DrainingError, StaleEpochError
from segue.laps.groups import RebalanceRules
from segue.logs import logger
from segue.messages.fleet import Registration, Role
from segue.router.client_request import ClientRequest
from segue.router.config import RouterConfig
from segue.router.discovery import Discovery, Registrations
from segue.router.entry import WorkerEntry
from segue.router.fan_out import WorkerRequest
from segue.router.membership import Membership
from segue.router.passthrough import Passthrough
from segue.router.pause import FleetPause
from segue.router.prompts import BytesPerToken
from segue.router.registry import UNNAMED, Registry
from segue.router.relay import Relay
from segue.router.request_trace import RequestTrace
from segue.router.upstream_connection import Headers
from segue.router.watch import watch
from segue.server.raw_body import read_bytes
from segue.server.request_ids import HEADER, arrival_of, id_of
from segue.tracing.context import passed_on
from segue.tracing.opening import tracer_of
from segue.tracing.tracer import Tracer

CONTENT_TYPE = (b"content-type", b"application/json")


@dataclass(slots=True, eq=False)
class Router:
    """One running router. It lives on one event loop."""

    config: RouterConfig
    registry: Registry
    membership: Membership
    pause: FleetPause
    sizes: BytesPerToken = field(default_factory=BytesPerToken)
    tracer: Tracer | None = None  # None: no spans are made, and headers about traces are passed on
    is_draining: bool = False
    # Whether every process that takes requests knows what the membership knows.
    is_settled: Callable[[], bool] = lambda: True
    watching: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by worker
    registrations: Registrations = field(default_factory=Registrations)
    # The URLs that each source has, and the task that watches it.
    _found: dict[Discovery, frozenset[str]] = field(default_factory=dict)
    _sources: Sequence[Discovery] = ()
    _silent: set[Discovery] = field(default_factory=set)  # those that have told nothing yet
    _discovering: list[asyncio.Task[None]] = field(default_factory=list)
    _forgetting: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def create(cls, config: RouterConfig) -> Router:
        """Make a router without workers."""
        rebalance = RebalanceRules(
            ratio=config.laps_rebalance_ratio, interval_s=config.laps_rebalance_interval_s
        )
        grouping = rebalance if config.enable_laps_alloc else None
        registry = Registry(config.rules, config.worker_ca)
        router = cls(config, registry, Membership(registry, grouping), FleetPause(config.control_timeout_s))
        router.tracer = tracer_of(config.otlp_traces_endpoint, "segue-router", router.membership.router_id)
        registry.on_idle = router.forget
        router.membership.on_joined = router.pause.joined
        router.membership.on_lost = router._on_lost
        return router

    # --- which workers there are ---

    def discover(self, *sources: Discovery) -> None:
        """Take workers from these sources, and from registrations, until the router is closed."""
        self._sources = (*sources, self.registrations)
        self._silent = set(sources)
        self.registry.served[UNNAMED] = time.monotonic()  # there may be an engine that serves
        for source in self._sources:
            task = asyncio.ensure_future(source.watch(partial(self._take, source)))
            task.add_done_callback(_log_failure)
            self._discovering.append(task)

    def register(self, registration: Registration, ttl_s: float | None) -> WorkerEntry:
        """Register a worker for ``ttl_s`` seconds, None: without an end.

        Raises:
            StaleEpochError: another worker of its cohort has a higher epoch.
        """
        self.membership.check_epoch(registration)
        entry = self.registry.at(registration.url) or self.add(registration.url, registration.role)
        entry.cohort = registration.cohort
        self.registrations.put(registration, ttl_s)
        found = self._found.get(self.registrations, frozenset())
        self._found[self.registrations] = found | {registration.url}  # even if it has lapsed already
        self._take(self.registrations, self.registrations.current())
        return entry

    def _take(self, source: Discovery, registrations: Sequence[Registration]) -> None:
        """Take all workers that a source has now. One that no source has any more leaves if it is lost."""
        before, now = self._found.get(source, frozenset()), set()
        self._silent.discard(source)
        if not self._silent:
            self.registry.served.pop(UNNAMED, None)
        for registration in registrations:
            now.add(registration.url)
            entry = self.registry.at(registration.url)
            if entry is not None:
                entry.has_returned = entry.has_returned or (entry.has_lapsed and entry.is_leaving)
                entry.has_lapsed = False
            try:
                self.membership.check_epoch(registration)
            except StaleEpochError as error:
                logger.warning("%s", error)
                continue
            entry = entry or self.add(registration.url, registration.role)
            entry.cohort = registration.cohort
        self._found[source] = frozenset(now)
        for url in before.difference(*self._found.values()):
            if (entry := self.registry.at(url)) is not None:
                entry.has_lapsed, entry.has_returned = True, False
                self._drop_if_lapsed(entry)

    def _on_lost(self, entry: WorkerEntry) -> None:
        """Look at once for another engine in the place of a worker whose reports have ended."""
        for source in self._sources:
            source.nudge()
        self._drop_if_lapsed(entry)

    def _drop_if_lapsed(self, entry: WorkerEntry) -> None:
        """Let a worker leave that no source has any more, and that sends no reports."""
        if entry.has_lapsed and entry.problem and not entry.is_leaving:
            logger.info("worker %s: its registration has lapsed, and its reports have ended", entry.id)
            entry.leave()
            if self.is_idle(entry):
                self.forget(entry)

    def add(self, url: str, role: Role | None = None) -> WorkerEntry:
        """Register a worker, and watch it from now on; ``role``: the only one that it may have; None: any."""
        entry = self.membership.add(url, role)
        self.watching[entry.id] = asyncio.ensure_future(watch(self.membership, entry, self.admin_header))
        return entry

    @property
    def admin_header(self) -> Headers:
        """The header with the workers' admin key."""
        return key_header(self.config.worker_admin_key or self.config.worker_api_key)

    async def remove(self, entry: WorkerEntry) -> None:
        """Forget a worker at once."""
        if (watching := self.watching.pop(entry.id, None)) is None:
            return  # it is being forgotten
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        self.membership.remove(entry)
        if entry.has_returned and not self.registry.is_closed:
            self.add(entry.url, entry.role)

    def forget(self, entry: WorkerEntry) -> None:
        """Forget a worker that was to leave, and whose last request has ended."""
        task = asyncio.ensure_future(self.remove(entry))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def close(self) -> None:
        """Forget all workers; requests in flight end."""
        self.membership.stop_grouping()
        await self.pause.close()
        for task in self._discovering:
            task.cancel()
        await asyncio.gather(*self._discovering, return_exceptions=True)
        self.registry.is_closed = True
        for entry in self.registry:
            await self.remove(entry)
        await self.close_tracer()

    async def close_tracer(self) -> None:
        """Send the spans that are there, within a bound."""
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def retire(self, entry: WorkerEntry) -> int:
        """Send a worker no further requests, and forget it once it has none; returns those in flight."""
        self.registrations.remove(entry.url)
        self._forget_cohort(entry)
        entry.leave()
        in_flight = self.registry.num_requests(entry.id)
        if self.is_idle(entry):
            await self.remove(entry)
        return in_flight

    def _forget_cohort(self, leaving: WorkerEntry) -> None:
        """Let no request wait for a successor of the last worker of its cohort, which an operator removes."""
        cohort = leaving.known_cohort
        if cohort not in {entry.known_cohort for entry in self.registry if entry is not leaving}:
            self.registry.served.pop(cohort, None)

    def is_idle(self, entry: WorkerEntry) -> bool:
        """Whether a worker that leaves has no requests, and will not have any."""
        return self.is_settled() and not self.registry.num_requests(entry.id)

    def check_open(self) -> None:
        """Raise DrainingError once the router is shutting down."""
        if self.is_draining:
            raise DrainingError("the router is shutting down; send the request to another one")

    def relay(self, scope: Scope, body: bytes) -> Relay:
        """Returns what answers a client's request; raises DrainingError once the router is shutting down.

        Workers get its id, and abort the request by it; and its trace, which they and the router continue.
        """
        self.check_open()
        path, request_id = scope["path"], id_of(scope)
        request = ClientRequest.create(path, body, self.sizes.facts(path, body))
        own, trace = [CONTENT_TYPE, (HEADER, request_id.encode())], None
        if self.tracer is None:
            own += passed_on(scope["headers"])
        else:
            began = arrival_of(scope)
            trace = RequestTrace.begin(self.tracer, scope["headers"], path, request_id, began)
        headers, foreign = [*self.admin_header, *own], [*self._api_header, *own]
        return Relay(
            self.registry, self.sizes, headers, foreign, request, self.config.resume_timeout_s, trace
        )

    def pass_through(self, path: str, body: bytes | None = None) -> Passthrough:
        """Returns what answers a client by a worker's own reply; raises as :meth:`relay` does.

        ``body`` is that of a POST; None: the request is a GET.
        """
        self.check_open()
        headers = [CONTENT_TYPE, *self._api_header]
        return Passthrough(self.registry, headers, path, body, self.config.resume_timeout_s)

    @property
    def _api_header(self) -> Headers:
        return key_header(self.config.worker_api_key)


def _log_failure(watching: asyncio.Task[None]) -> None:
    """Log why no further workers of a source will be found, if that is so."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        logger.error("a source of workers has failed, and is looked at no more: %r", error)


def router_of(request: Request) -> Router:
    """Returns the application's router."""
    router: Router = request.app.state.router
    return router


async def for_workers(request: Request) -> WorkerRequest:
    """Returns a client's request as workers get it, with their admin key in place of the client's.

    Raises:
        RequestTooLargeError: the body is larger than ``--max-body-mib``.
    """
    router, query = router_of(request), request.scope["query_string"]
    return WorkerRequest(
        method=request.method.encode(),
        path=request.scope["path"].encode() + (b"?" + query if query else b""),
        headers=[
            CONTENT_TYPE,
            *router.admin_header,
            *passed_on(request.scope["headers"]),
        ],
        body=await read_bytes(request, router.config.max_body_mib),
    )


def key_header(key: str | None) -> Headers:
    """Returns the header with a key for a worker; none without a key."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
