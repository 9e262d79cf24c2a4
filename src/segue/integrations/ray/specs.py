"""The processes of a fleet: their command lines, environments and probes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from segue.children import import_path
from segue.cluster.children import ROUTER, SEGUE, flags_of, secrets_of, without_options
from segue.cluster.probe import ReadinessProbe
from segue.cluster.processes import ChildSpec, HealthProbes
from segue.config import EngineConfig
from segue.failover.pod import Probe, ProbeKind, bundled_manifest, read_pod
from segue.failover.prober import LOOPBACK
from segue.integrations.ray.config import TrainerConfig
from segue.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """The secrets of a fleet: of its engines, and of its router's operators."""

    engines: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    admin: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process runs: the address of its node, and the ports that it gets there."""

    address: str
    port: int
    system_port: int = 0  # of an engine
    environ: Mapping[str, str]  # of the actor

    @property
    def url(self) -> str:
        """The URL of the process."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


def engine_spec(
    config: EngineConfig, name: str, place: Place, keys: FleetKeys, router_url: str, num_threads: int
) -> ChildSpec:
    """Return an engine that registers at the router, with ``num_threads`` threads per rank."""
    engine = replace(
        config,
        host=place.address,
        port=place.port,
        api_key=keys.engines,
        system_host=LOOPBACK,
        system_port=place.system_port,
        register=router_url,
        register_key=keys.admin,
        register_url=place.url,
    )
    environment = _environment(place.environ) | secrets_of(engine) | {"OMP_NUM_THREADS": str(num_threads)}
    return ChildSpec(
        name=name,
        role="engine",
        stage=0,
        command=(*SEGUE, "serve", *flags_of(engine)),
        environment=environment,
        probe=ReadinessProbe(url=f"http://{LOOPBACK}:{place.system_port}/ready"),
        health=HealthProbes(
            probes=_probes("engine-a", ProbeKind.STARTUP, ProbeKind.LIVENESS),
            ports={"system": place.system_port},
        ),
    )


def router_spec(config: RouterConfig, name: str, place: Place, keys: FleetKeys) -> ChildSpec:
    """Return the router."""
    router = replace(
        config, host=place.address, port=place.port, worker_api_key=keys.engines, admin_api_key=keys.admin
    )
    return ChildSpec(
        name=name,
        role=ROUTER,
        stage=0,
        command=(*SEGUE, "router", *flags_of(router)),
        environment=_environment(place.environ) | secrets_of(router),
        probe=ReadinessProbe(url=f"{place.url}/live"),
        health=HealthProbes(
            probes=_probes(ROUTER, ProbeKind.LIVENESS), ports={"http": place.port}, host=place.address
        ),
    )


def trainer_spec(config: TrainerConfig, name: str, place: Place) -> ChildSpec:
    """Return a trainer; it has no keys, so it listens on the loopback address that ``place`` must name."""
    flags = [
        f"--host={place.address}",
        f"--port={place.port}",
        f"--device={config.device}",
        f"--dtype={config.dtype}",
        f"--learning-rate={config.learning_rate}",
        *([] if config.model is None else [f"--model={config.model}"]),
    ]
    threads = {"OMP_NUM_THREADS": str(max(1, int(config.cpus)))}
    return ChildSpec(
        name=name,
        role="trainer",
        stage=0,
        command=(*SEGUE, "trainer", *flags),
        environment=_environment(place.environ) | threads,
        probe=ReadinessProbe(url=f"{place.url}/health"),
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process: that of the actor without options, and where this package is."""
    base = without_options(environ)
    return base | import_path(base) | {"PYTHONUNBUFFERED": "1"}


def _probes(container: str, *kinds: ProbeKind) -> dict[ProbeKind, Probe]:
    """Return probes that a container of the failover pod has."""
    found = read_pod(bundled_manifest())[container].probes
    return {kind: found[kind] for kind in kinds}
