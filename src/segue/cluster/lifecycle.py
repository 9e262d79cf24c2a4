"""Runs a cluster: takes the ports, starts router and workers, reports when they serve, and ends them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from segue.cluster.children import WORKER_HOST, WORKER_STAGE, ClusterHost, make_children
from segue.cluster.config import ClusterConfig
from segue.cluster.devices import list_gpus
from segue.cluster.processes import ChildSpec
from segue.cluster.progress import StartProgress, count_roles
from segue.cluster.runner import ChildRunner
from segue.cluster.supervisor import SupervisorRules
from segue.errors import ChildStartError
from segue.host import usable_cores
from segue.launch.run_dir import RunDir
from segue.listener import bind, url_of
from segue.server.http_server import on_signals
from segue.tls import scheme_of, server_context

REDRAW_S = 0.1  # also between two looks whether all children are ready
DRAIN_MARGIN_S = 1.0  # the router ends a drain by itself; only then is it told to


async def run_cluster(config: ClusterConfig, on_ready: Callable[[str, str], None]) -> int:
    """Serve until a signal; returns the exit code.

    ``on_ready`` is called once, with the router's URL and the workers by role, when requests are served.
    SIGTERM lets running requests end, for at most ``--drain-s`` seconds; SIGINT and any second signal end
    everything within seconds. It must be called on the main thread.

    Raises:
        ConfigError: the router's port is taken, its certificate cannot be used, or there are fewer GPUs than
            the workers need.
        ChildStartError: the router or a worker ended before it was ready for the first time.
    """
    server_context(config.router)  # the router needs it, and would say so only once the engines have started
    with ExitStack() as stack:
        # A port is kept by a socket that is bound and never listens, so a child that is started again gets
        # the same one: both sockets have SO_REUSEADDR, and one of them listens.
        entry = stack.enter_context(bind(config.router.host, config.router.port))
        num_ports = config.size.num_engines * (2 if config.size.shadows else 1)
        reserved = [stack.enter_context(bind(WORKER_HOST, 0)) for _ in range(num_ports)]
        ports = [each.getsockname()[1] for each in reserved]
        failover_dir = gms_dir = ""
        if config.size.shadows:
            run_dir = RunDir()
            stack.callback(run_dir.remove)
            failover_dir, gms_dir = str(run_dir.path / "failover"), str(run_dir.path / "gms")
        url = url_of(entry, scheme_of(config.router))
        host = ClusterHost(
            environ=os.environ,
            gpus=[] if config.engine.device == "cpu" else list_gpus(os.environ),
            num_cores=usable_cores(),
            router_url=url,
            worker_ports=ports[: config.size.num_engines],
            system_ports=ports[config.size.num_engines :],
            failover_dir=failover_dir,
            gms_dir=gms_dir,
        )
        children = make_children(config, host)
        roles = describe_workers(config, children)
        as_json = config.router.log_format == "json"
        progress = StartProgress([child.name for child in children], sys.stderr, as_json=as_json)
        rules = SupervisorRules(drain_s=config.router.drain_s + DRAIN_MARGIN_S)
        runner = ChildRunner(children, rules, progress.line, progress.ready)
        tasks = [
            asyncio.create_task(_obey_signals(runner)),
            asyncio.create_task(_report(runner, progress, lambda: on_ready(url, roles))),
        ]
        try:
            await runner.run()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            progress.finish()
    if runner.supervisor.failure is not None:
        raise ChildStartError(runner.supervisor.failure)
    return 0


def describe_workers(config: ClusterConfig, children: Sequence[ChildSpec]) -> str:
    """Return the workers by role, and the engines behind them, like "1 worker with 1 engine standing by"."""
    roles = [child.role for child in children if child.stage == WORKER_STAGE]
    found = count_roles(roles[:: 1 + config.size.shadows])
    if not config.size.shadows:
        return found
    each = "each " if config.size.total > 1 else ""
    engines = f"{config.size.shadows} engine{'' if config.size.shadows == 1 else 's'}"
    return f"{found}, {each}with {engines} standing by"


async def _obey_signals(runner: ChildRunner) -> None:
    """Let signals end the children."""
    stop, at_once = on_signals()
    await stop.wait()
    if not at_once.is_set():
        runner.drain()
        await at_once.wait()
    runner.stop()


async def _report(runner: ChildRunner, progress: StartProgress, on_ready: Callable[[], None]) -> None:
    """Redraw the progress until every child is ready, then call ``on_ready``."""
    while not runner.supervisor.is_ready:
        progress.redraw()
        await asyncio.sleep(REDRAW_S)
    progress.finish()
    on_ready()
