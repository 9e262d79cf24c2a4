"""The actors of a fleet. Each has one process of Segue, and ends with it, so that Ray starts both again.

They are plain classes, which `segue.integrations.ray.fleet` makes actors of. An actor is there once its
process is ready. If that fails at the first start, the error is that of the actor's creation. Later, and
whenever the process ends by itself, the actor's own process ends as if it had crashed: only then does Ray
restart it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from segue.cluster.processes import ChildSpec
from segue.errors import SegueError
from segue.failover.prober import LOOPBACK
from segue.http_client import open_url
from segue.integrations.ray.config import FleetConfig, TrainerConfig
from segue.integrations.ray.process import HostedProcess
from segue.integrations.ray.specs import FleetKeys, Place, engine_spec, router_spec, trainer_spec
from segue.listener import bind
from segue.messages.fleet import REGISTER_TTL_S

if TYPE_CHECKING:
    from segue.trainer.endpoint import Endpoint  # with torch, which only the actor of a trainer needs

RETRY_S = 1.0  # before Ray starts an actor again whose process did not come back, or engines are asked again
ASK_S = 10.0  # for an answer that needs no work


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorInfo:
    """The process of an actor, as it is now."""

    name: str
    url: str
    pid: int  # of Segue's process
    actor_pid: int
    node_id: str  # as Ray names the node
    is_restarted: bool  # whether this is not the actor's first process


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPlace:
    """Where the router is, and what it takes."""

    url: str
    max_body_mib: int  # of a request


class TrainerActorError(SegueError):
    """A training server refused a call, or could not be reached."""


class _HostActor:
    """An actor with one process."""

    def __init__(self, name: str, make_spec: Callable[[], tuple[ChildSpec, str]]) -> None:
        """Start the process that ``make_spec`` describes, with its URL, and wait until it is ready."""
        import ray

        context = ray.get_runtime_context()
        self._name = name
        self._node_id = str(context.get_node_id())
        with warnings.catch_warnings():  # Ray uses a name here that it is about to remove
            warnings.simplefilter("ignore", DeprecationWarning)
            self._is_restarted = bool(context.was_current_actor_reconstructed)
        try:
            spec, self._url = make_spec()
            self._process = HostedProcess(spec, self._crash)
            self._process.wait_ready()
        except SegueError as error:
            if not self._is_restarted:
                raise
            time.sleep(RETRY_S)
            self._crash(f"because its restart failed ({error})")

    def info(self) -> ActorInfo:
        """Return what runs here."""
        return ActorInfo(
            name=self._name,
            url=self._url,
            pid=self._process.pid,
            actor_pid=os.getpid(),
            node_id=self._node_id,
            is_restarted=self._is_restarted,
        )

    def stop(self, drain_s: float) -> None:
        """End the process: its requests have ``drain_s`` seconds to end. The actor itself stays."""
        self._process.stop(drain_s)

    def _crash(self, reason: str) -> NoReturn:
        """End the actor's process in a way after which Ray restarts it."""
        print(f"{self._name} ended {reason}; Ray is to start it again", file=sys.stderr, flush=True)
        os._exit(1)


class EngineActor(_HostActor):
    """One engine, which registers at the fleet's router."""

    def __init__(self, config: FleetConfig, number: int, router_url: str, keys: FleetKeys) -> None:
        """Start engine ``number`` on a free port of this node."""
        name = f"{config.name}-engine-{number}"

        def make_spec() -> tuple[ChildSpec, str]:
            node = node_address()
            # Bound sockets that never listen keep the ports for the process.
            self._ports = bind(node, 0), bind(LOOPBACK, 0)
            port, system_port = (each.getsockname()[1] for each in self._ports)
            place = Place(address=node, port=port, system_port=system_port, environ=os.environ)
            threads = config.threads_per_rank
            return engine_spec(config.engine, name, place, keys, router_url, threads), place.url

        super().__init__(name, make_spec)


class RouterActor(_HostActor):
    """The router. When it comes back on its node it has the same URL, and the engines register again."""

    def __init__(self, config: FleetConfig, keys: FleetKeys) -> None:
        """Start the router at `config.router.port` of this node."""
        name, self._max_body_mib = f"{config.name}-router", config.router.max_body_mib

        def make_spec() -> tuple[ChildSpec, str]:
            place = Place(address=node_address(), port=config.router.port, environ=os.environ)
            return router_spec(config.router, name, place, keys), place.url

        super().__init__(name, make_spec)

    def place(self) -> RouterPlace:
        """Return what whoever passes requests on has to know."""
        return RouterPlace(url=self._url, max_body_mib=self._max_body_mib)


class TrainerActor(_HostActor):
    """A training server, and the calls of it. Its weights end with its process, so it is not restarted."""

    def __init__(self, config: TrainerConfig, name: str, router: Endpoint) -> None:
        """Start a trainer, for the engines that ``router`` has at each :meth:`sync`."""
        self._router = router

        def make_spec() -> tuple[ChildSpec, str]:
            self._ports = (bind(LOOPBACK, 0),)
            place = Place(address=LOOPBACK, port=self._ports[0].getsockname()[1], environ=os.environ)
            return trainer_spec(config, name, place), place.url

        super().__init__(name, make_spec)

    def train_step(self, texts: Sequence[str]) -> dict[str, Any]:
        """Run one optimizer step on these texts; returns its ``loss``, and ``num_steps``."""
        return self._ask("train_step", {"texts": list(texts)})

    def save(self, path: str) -> dict[str, Any]:
        """Write a checkpoint into a directory of this node."""
        return self._ask("save_checkpoint", {"path": path})

    def sync(self) -> dict[str, Any]:
        """Send the weights to all engines that the router has now: all commit them, or none does.

        Raises:
            TrainerActorError: an engine could not be reached, or refused.
        """
        engines = self._engines()
        known = {each["url"] for each in self._ask("inference_endpoints", None)["endpoints"]}
        for url in known - engines.keys():
            self._ask("remove_inference_endpoint", _host_and_port(url))
        for url in engines.keys() - known:
            key = {"api_key": engines[url].api_key}
            self._ask("add_inference_endpoint", _host_and_port(url) | key)
        return self._ask("sync_inference_weights", {})

    def _engines(self) -> dict[str, Endpoint]:
        """Return the router's engines by URL, all of which can be reached.

        An engine that has died is still registered until its registration lapses. So this waits as long for
        one that refuses the connection, because the engine that replaces it may serve before that.
        """
        deadline = time.monotonic() + REGISTER_TTL_S
        while True:
            engines = {each.url: each for each in self._router.engines(ASK_S)}
            gone = [url for url, each in engines.items() if each.get("health", ASK_S).gone]
            if not gone:
                return engines
            if time.monotonic() >= deadline:
                raise TrainerActorError(
                    f"the router {self._router.url} has engines that cannot be reached: {', '.join(gone)}; "
                    "start them again, or take them out of the router"
                )
            time.sleep(RETRY_S)

    def _ask(self, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Return the reply of the training server, which may take as long as it works."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            with closing(open_url(f"{self._url}/{route}", data, api_key=None, timeout_s=None)) as response:
                reply: dict[str, Any] = msgspec.json.decode(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise TrainerActorError(f"{route}: the training server did not answer: {error}") from error
        if reply.get("success", True) is not True:
            raise TrainerActorError(f"{route}: {reply.get('message', reply)}")
        return reply


def node_address() -> str:
    """Return the address at which the other nodes of the Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _host_and_port(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {"host": parts.hostname, "port": parts.port}
