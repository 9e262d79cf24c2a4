"""A fleet in a Ray cluster: its placement group and its actors, from their start to their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from segue.cluster.probe import ReadinessProbe, is_ready
from segue.errors import ChildStartError, ConfigError
from segue.extras import RAY
from segue.integrations.ray.actors import ActorInfo, EngineActor, RouterActor, TrainerActor
from segue.integrations.ray.config import FleetConfig, TrainerConfig
from segue.integrations.ray.specs import FleetKeys

if TYPE_CHECKING:
    from segue.trainer.endpoint import Endpoint

NAMESPACE = "segue"  # of the actors' names
POLL_S = 0.1  # between two looks whether the router has all engines
STOP_MARGIN_S = 15.0  # for the answer to a stop, beyond the drain
CONCURRENT_CALLS = 4  # of one actor: a long one must not keep a stop waiting


@dataclass(kw_only=True)
class RayFleet:
    """Engines, router and perhaps a trainer, as actors of the Ray cluster that this process is connected to.

    `engines`, `router` and `trainer` are handles of Ray. All ends with :meth:`stop`, or with the process that
    has started the fleet.
    """

    config: FleetConfig
    engines: list[Any]
    router: Any
    trainer: Any  # None: there is none
    url: str  # of the router, for clients
    _keys: FleetKeys
    _group: Any

    @classmethod
    def start(cls, config: FleetConfig) -> Self:
        """Start all processes, and return once requests are served.

        Raises:
            ConfigError: Ray is not installed, or this process is not connected to a cluster.
            ChildStartError: the cluster lacks the resources, or a process has ended before it was ready.
        """
        ray = connected()
        keys = FleetKeys() if (own := config.router.admin_api_key) is None else FleetKeys(admin=own)
        fleet = cls(
            config=config,
            engines=[],
            router=None,
            trainer=None,
            url="",
            _keys=keys,
            _group=ray.util.placement_group(_bundles(config), strategy=config.strategy),
        )
        deadline = time.monotonic() + config.start_timeout_s
        try:
            fleet._start(deadline)
        except BaseException:
            fleet.stop(drain_s=0.0)
            raise
        return fleet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> Endpoint:
        """The router with all keys, as :class:`segue.trainer.WeightSender` takes it."""
        from segue.trainer.endpoint import Endpoint  # with torch, which a program that trains nothing spares

        return Endpoint(url=self.url, api_key=self._keys.admin, worker_api_key=self._keys.engines)

    def describe(self) -> list[ActorInfo]:
        """Return what runs where: router, engines, trainer. Restarts are waited for."""
        ray = connected()
        actors = [each for each in (self.router, *self.engines, self.trainer) if each is not None]
        found: list[ActorInfo] = ray.get([actor.info.remote() for actor in actors])
        return found

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the router serves with all engines.

        Raises:
            ChildStartError: it does not within ``timeout_s`` seconds.
        """
        probe = ReadinessProbe(url=f"{self.url}/ready", min_serving=self.config.engines)
        deadline = time.monotonic() + timeout_s
        while not asyncio.run(is_ready(probe)):
            if time.monotonic() >= deadline:
                wanted = f"{self.config.engines} engines within {timeout_s:g} s"
                raise ChildStartError(f"the router at {self.url} did not have {wanted}; see the actors' logs")
            time.sleep(POLL_S)

    def start_trainer(self, config: TrainerConfig) -> Any:
        """Start a trainer, and return its handle; after one that has died, from a checkpoint of that one.

        It has the bundle of the trainer in the fleet's configuration.

        Raises:
            ConfigError: the configuration has no trainer.
            ChildStartError: it has ended before it was ready.
        """
        if self.config.trainer is None:
            raise ConfigError("the fleet has no bundle for a trainer: give `trainer` at its start")
        ray = connected()
        if self.trainer is not None:
            ray.kill(self.trainer)
        name = f"{self.config.name}-trainer"
        self.trainer = self._actor(
            TrainerActor,
            (config, name, self.endpoint),
            bundle=self.config.engines + 1,
            cpus=config.cpus,
            gpus=config.gpus,
            restarts=0,
        )
        self._await([self.trainer], time.monotonic() + self.config.start_timeout_s)
        return self.trainer

    def stop(self, drain_s: float | None = None) -> None:
        """End all processes and actors; may be called again.

        The router takes no new requests then; running ones have ``drain_s`` seconds to end, by default those
        of the router's own option.
        """
        ray = connected()
        patience_s = self.config.router.drain_s if drain_s is None else drain_s
        for actors in ([self.router], [*self.engines, self.trainer]):
            there = [actor for actor in actors if actor is not None]
            ends = [actor.stop.remote(patience_s) for actor in there]
            if ends:
                # An actor that is gone, or that does not answer, ends below, and its process with it.
                ray.wait(ends, num_returns=len(ends), timeout=patience_s + STOP_MARGIN_S)
            for actor in there:
                ray.kill(actor)
        self.engines, self.router, self.trainer = [], None, None
        if self._group is not None:
            with suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(self._group)
        self._group = None

    def _start(self, deadline: float) -> None:
        """Start everything; what has begun is in this object, also after an error."""
        ray, config = connected(), self.config
        if not self._group.wait(max(0.0, deadline - time.monotonic())):
            wanted = ", ".join(str(bundle) for bundle in _bundles(config))
            raise ChildStartError(
                f"the Ray cluster had no room for {wanted} within {config.start_timeout_s:g} s (it has "
                f"{ray.cluster_resources()}): add nodes, or lower `engines` or what each process reserves"
            )
        self.router = self._actor(
            RouterActor,
            (config, self._keys),
            bundle=0,
            cpus=config.router_cpus,
            gpus=0.0,
            restarts=config.max_restarts,
            name=router_name(config.name),
        )
        (router,) = self._await([self.router], deadline)
        self.url = router.url
        for number in range(config.engines):
            engine = self._actor(
                EngineActor,
                (config, number, self.url, self._keys),
                bundle=1 + number,
                cpus=config.engine_cpus,
                gpus=config.gpus_per_engine,
                restarts=config.max_restarts,
            )
            self.engines.append(engine)
        if config.trainer is not None:
            self.start_trainer(config.trainer)
        self._await(self.engines, deadline)
        self.wait_ready(max(0.0, deadline - time.monotonic()))

    def _actor(
        self,
        kind: type,
        arguments: tuple[Any, ...],
        *,
        bundle: int,
        cpus: float,
        gpus: float,
        restarts: int,
        name: str | None = None,
    ) -> Any:
        """Start an actor in its bundle; with ``name`` others find it."""
        ray = connected()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {} if name is None else {"name": name, "namespace": NAMESPACE}
        remote = ray.remote(kind).options(
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
            max_restarts=restarts,
            max_task_retries=restarts,  # calls wait while the actor is restarted
            max_concurrency=CONCURRENT_CALLS,
            **options,
        )
        return remote.remote(*arguments)

    def _await(self, actors: Iterable[Any], deadline: float) -> list[ActorInfo]:
        """Wait until actors are there, and return what runs in them."""
        ray = connected()
        try:
            found: list[ActorInfo] = ray.get(
                [actor.info.remote() for actor in actors], timeout=max(0.0, deadline - time.monotonic())
            )
        except ray.exceptions.GetTimeoutError:
            text = f"an actor was not ready within {self.config.start_timeout_s:g} s; see its log"
            raise ChildStartError(text) from None
        except ray.exceptions.RayActorError as error:
            raise ChildStartError(f"an actor of the fleet could not start: {error}") from error
        return found


def router_name(fleet: str) -> str:
    """Return the name of a fleet's router among the actors of `NAMESPACE`."""
    return f"{fleet}-router"


def connected() -> Any:
    """Return the module of Ray.

    Raises:
        ConfigError: it is not installed, or this process is not connected to a cluster.
    """
    if not RAY.is_installed:
        raise ConfigError(f"Ray is not installed; `{RAY.remedy}` installs it")
    import ray

    if not ray.is_initialized():
        raise ConfigError("this process is not connected to a Ray cluster; call ray.init() before")
    return ray


def _bundles(config: FleetConfig) -> list[dict[str, float]]:
    """Return what each process reserves: the router, the engines, the trainer."""
    found = [(config.router_cpus, 0.0)]
    found += [(config.engine_cpus, config.gpus_per_engine)] * config.engines
    if config.trainer is not None:
        found.append((config.trainer.cpus, config.trainer.gpus))
    return [{"CPU": cpus} | ({"GPU": gpus} if gpus else {}) for cpus, gpus in found]
