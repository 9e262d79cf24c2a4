"""The children of a cluster: the command line and the environment of each worker and of the router."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from string import ascii_lowercase
from typing import Any
from urllib.parse import urlsplit

from segue.children import import_path
from segue.cluster.config import ClusterConfig
from segue.cluster.devices import share_gpus, threads_per_rank, visible_gpus
from segue.cluster.probe import ReadinessProbe, SocketProbe
from segue.cluster.processes import ChildSpec, HealthProbes
from segue.config import EngineConfig, Role, TransportChoice
from segue.failover.pod import (
    Container,
    Execution,
    HttpGet,
    Probe,
    ProbeKind,
    bundled_manifest,
    read_pod,
)
from segue.gms.supervisor import GMS_COMMAND
from segue.gms.transport import HOLDER_SOCKET, SOCKET
from segue.http_guard import is_loopback
from segue.options import CONFIG_FILE, Options, spelling, variable
from segue.router.config import RouterConfig

WORKER_HOST = "127.0.0.1"
ROUTER = "router"
MEMORY_SERVICE, MEMORY_HOLDER = "gms", "gms-holder"
ROUTER_STAGE, WORKER_STAGE, MEMORY_STAGE = 1, 0, -1  # requests end while their workers still run
SECRETS = {
    *("api_key", "admin_api_key", "pd_key", "worker_api_key", "worker_admin_key", "gms_token"),
    *("register_key", "ssl_keyfile_password"),
}
# -P: files in the user's directory must not shadow modules of the standard library.
SEGUE: tuple[str, ...] = (sys.executable, "-P", "-m", "segue")
SMALLEST_RATIO = 0.01
NOTHING = os.devnull  # a --weights-root that no checkpoint is in
# Before an engine is started again as a shadow. Its start keeps several cores busy, which the engine that has
# just taken over needs for the prompts and replies that it computes again.
SHADOW_PAUSE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHost:
    """What the processes share, and how they find each other."""

    environ: Mapping[str, str]  # of this process
    gpus: Sequence[str]  # as CUDA_VISIBLE_DEVICES names them
    num_cores: int
    router_url: str
    worker_ports: Sequence[int]  # one per engine; they stay the same when an engine is started again
    system_ports: Sequence[int] = ()  # one per engine, if there are shadows
    failover_dir: str = ""  # of all cohorts, if there are shadows
    gms_dir: str = ""  # of the memory service that is started for the engines, if they share their weights


def make_children(
    config: ClusterConfig, host: ClusterHost, command: Sequence[str] = SEGUE
) -> list[ChildSpec]:
    """Return the workers, then the router. ``command`` is the command line of ``segue``.

    With shadows, each worker is a cohort: several engines with equal options, of which one serves. Before
    them come the memory service and its holder, unless the user has one, or wants none.

    Each call draws new keys, unless the user has set them: one that the router needs for the workers, and one
    for handing KV over.

    Raises:
        DeviceCountError: there are fewer GPUs than the workers need.
    """
    key = config.router.worker_api_key or secrets.token_urlsafe(32)
    pd_key = config.engine.pd_key or secrets.token_urlsafe(32)
    base = without_options(host.environ)
    base |= import_path(base) | {"PYTHONUNBUFFERED": "1"}
    workers = _workers(config)
    shares = share_gpus(host.gpus, config.engine.device, config.engine.tp, len(workers))
    num_each = 1 + config.size.shadows
    probes = read_pod(bundled_manifest()) if config.size.shadows else {}
    starts_service = shares_weights(config) and config.engine.gms_dir is None
    children = _memory_service(config, host, base, probes) if starts_service else []
    for index, (worker, role) in enumerate(workers):
        on_gpu = bool(shares[index])
        equal = replace(
            config.engine,
            role=role,
            host=WORKER_HOST,
            api_key=key,
            disaggregation_bootstrap_port=0,
            pd_key=pd_key if role != "both" else None,
            pd_transport=_pd_transport(config.engine, role, on_gpu=on_gpu),
            weights_root=_weights_root(config),
            memory_ratio=_memory_ratio(config.engine, 1 if on_gpu else len(workers)),
            num_shadows=config.size.shadows,
            gms_dir=host.gms_dir if starts_service else config.engine.gms_dir,
        )
        for place in range(index * num_each, (index + 1) * num_each):
            engine, name = replace(equal, port=host.worker_ports[place]), worker
            ready_url = f"http://{WORKER_HOST}:{host.worker_ports[place]}/ready"
            health = None
            if config.size.shadows:
                name = _engine_name(config, worker, place - index * num_each)
                engine = _standing_by(engine, host, worker, name, place)
                ready_url = f"http://{WORKER_HOST}:{host.system_ports[place]}/startup"
                ports = {"api": host.worker_ports[place], "system": host.system_ports[place]}
                health = HealthProbes(probes=probes["engine-a"].probes, ports=ports)
            children.append(
                ChildSpec(
                    name=name,
                    role="worker" if role == "both" else f"{role} worker",
                    stage=WORKER_STAGE,
                    command=(*command, "serve", *flags_of(engine)),
                    environment=base | secrets_of(engine) | _hardware(config, host, shares, index),
                    probe=ReadinessProbe(url=ready_url),
                    health=health,
                    restart_after_s=SHADOW_PAUSE_S if config.size.shadows else 0.0,
                )
            )
    children.append(_router(config, host, command, base, key, probes))
    return children


def shares_weights(config: ClusterConfig) -> bool:
    """Whether the engines have one copy of their weights, which a memory service keeps.

    Memory that an engine releases must be its own.
    """
    engine = config.engine
    return bool(config.size.shadows) and engine.gms_mode != "off" and not engine.enable_memory_saver


def _memory_service(
    config: ClusterConfig, host: ClusterHost, base: Mapping[str, str], pod: Mapping[str, Container]
) -> list[ChildSpec]:
    """Return the holder of descriptors and the memory service, for the devices of the engines.

    They have the liveness probes of a pod's containers. That they have started is seen by their sockets.
    """
    devices = "all" if host.gpus and config.engine.device != "cpu" else "cpu"
    engine = config.engine
    options = {"gms_dir": host.gms_dir, "log_level": engine.log_level, "log_format": engine.log_format}
    environment = dict(base) | {variable(name): value for name, value in options.items()}
    environment |= {name: value for name, value in secrets_of(config.engine).items() if "GMS" in name}
    return [
        ChildSpec(
            name=name,
            role=name,
            stage=MEMORY_STAGE,
            command=(*GMS_COMMAND, *words),
            environment=environment,
            probe=SocketProbe(path=os.path.join(host.gms_dir, path)),
            health=HealthProbes(
                probes={ProbeKind.LIVENESS: _run_here(pod[name].probes[ProbeKind.LIVENESS])}, ports={}
            ),
        )
        for name, words, path in (
            (MEMORY_HOLDER, ("hold",), HOLDER_SOCKET),
            (MEMORY_SERVICE, ("serve", f"--devices={devices}"), SOCKET),
        )
    ]


def _run_here(probe: Probe) -> Probe:
    """Return a probe that runs ``segue gms`` on this machine; its directory is in the environment."""
    action = probe.action
    assert isinstance(action, Execution) and action.command[:2] == ("segue", "gms")
    words = (word for word in action.command[2:] if not word.startswith(f"{spelling('gms_dir')}="))
    return replace(probe, action=Execution(command=(*GMS_COMMAND, *words)))


def _router(
    config: ClusterConfig,
    host: ClusterHost,
    command: Sequence[str],
    base: Mapping[str, str],
    key: str,
    probes: Mapping[str, Container],
) -> ChildSpec:
    """Return the router, which has ``key`` for the workers; ``probes`` are those of a pod."""
    address = urlsplit(host.router_url)
    assert address.hostname is not None and address.port is not None
    port = address.port
    router = replace(config.router, port=port, worker_api_key=key)
    if config.size.shadows:
        router = replace(router, discovery="file", discovery_target=host.failover_dir)
    else:
        urls = [f"http://{WORKER_HOST}:{each}" for each in host.worker_ports]
        router = replace(router, worker=",".join(urls))
    health = None
    if probes:
        of_pod = probes[ROUTER].probes
        asked = {kind: _by_https(probe) for kind, probe in of_pod.items()} if router.ssl_certfile else of_pod
        health = HealthProbes(probes=asked, ports={"http": port}, host=address.hostname)
    return ChildSpec(
        name=ROUTER,
        role=ROUTER,
        stage=ROUTER_STAGE,
        command=(*command, "router", *flags_of(router)),
        environment=dict(base) | secrets_of(router),
        # It is ready when it has heard of every worker: from then on no request waits for one.
        probe=ReadinessProbe(url=f"{host.router_url}/ready", min_serving=config.size.total),
        health=health,
    )


def _by_https(probe: Probe) -> Probe:
    """Return a probe that asks the same by HTTPS."""
    assert isinstance(probe.action, HttpGet)
    return replace(probe, action=replace(probe.action, scheme="HTTPS"))


def _engine_name(config: ClusterConfig, worker: str, number: int) -> str:
    """Return the name of an engine of a cohort: its worker's, if there are several, and a letter."""
    return f"{'engine' if config.size.total == 1 else worker}-{ascii_lowercase[number]}"


def _standing_by(engine: EngineConfig, host: ClusterHost, cohort: str, name: str, place: int) -> EngineConfig:
    """Return the options of an engine that serves when no other one of its cohort does."""
    return replace(
        engine,
        shadow_mode=True,
        failover_dir=host.failover_dir,
        cohort=cohort,
        engine_id=name,
        system_port=host.system_ports[place],
    )


def flags_of(options: Options) -> list[str]:
    """Return the flags that set these options, those with their default value and the secrets left out."""
    flags = []
    for each in fields(options):
        value = getattr(options, each.name)
        if value == _default(each) or each.name in SECRETS:
            continue
        flags.append(spelling(each.name) if value is True else f"{spelling(each.name)}={value}")
    return flags


def _default(option: Field[Any]) -> Any:
    """Return the default of an option."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def secrets_of(options: Options) -> dict[str, str]:
    """Return the variables that set the secret options: every user can read a command line."""
    names = [each.name for each in fields(options) if each.name in SECRETS]
    return {variable(name): value for name in names if (value := getattr(options, name)) is not None}


def without_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without options of Segue, which the children get by their command lines."""
    names = _names(EngineConfig, RouterConfig) | {each.name for each, _ in ClusterConfig.listed()}
    variables = {variable(name) for name in names} | {CONFIG_FILE}
    return {name: value for name, value in environ.items() if name not in variables}


def _names(*options_classes: type[Options]) -> set[str]:
    """Return the names of all options, aliases included."""
    options = [each for options_class in options_classes for each in fields(options_class)]
    aliases: Iterable[Any] = (each.metadata["alias"] for each in options)
    return {each.name for each in options} | {alias.name for alias in aliases if alias is not None}


def _workers(config: ClusterConfig) -> list[tuple[str, Role]]:
    """Return each worker's name and role."""
    size = config.size
    counts: list[tuple[str, Role, int]] = [
        ("worker", "both", size.workers),
        ("prefill", "prefill", size.prefill),
        ("decode", "decode", size.decode),
    ]
    return [(f"{word}-{number}", role) for word, role, count in counts for number in range(count)]


def _weights_root(config: ClusterConfig) -> str | None:
    """Return what clients may have an engine read; None: anything, as of a server on a loopback address.

    An engine listens on a loopback address, but its clients are those of the router.
    """
    router = config.router
    if config.engine.weights_root or router.admin_api_key or is_loopback(router.host):
        return config.engine.weights_root
    return NOTHING


def _memory_ratio(engine: EngineConfig, num_sharing: int) -> float:
    """Return an engine's share of the free memory of a device that ``num_sharing`` engines share."""
    return engine.memory_ratio if num_sharing == 1 else max(SMALLEST_RATIO, engine.memory_ratio / num_sharing)


def _pd_transport(engine: EngineConfig, role: Role, *, on_gpu: bool) -> TransportChoice:
    """Return how a worker hands KV over; unless the user chose, it opens no ports to other hosts."""
    if role == "both" or engine.pd_transport != "auto":
        return engine.pd_transport
    return "cuda_ipc" if on_gpu else "shm"


def _hardware(
    config: ClusterConfig, host: ClusterHost, shares: Sequence[Sequence[str]], index: int
) -> dict[str, str]:
    """Return the variables that give worker ``index`` its GPUs and, unless the user chose, its cores."""
    threads = threads_per_rank(host.num_cores, config.engine.tp, len(shares))
    found = {"OMP_NUM_THREADS": host.environ.get("OMP_NUM_THREADS", str(threads))}
    if shares[index]:
        gpus = visible_gpus(shares, index, sees_peers=config.size.prefill > 0)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return found
