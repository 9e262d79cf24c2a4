"""``segue gms``: the memory service, and what asks it."""

from __future__ import annotations

import json
import signal
import sys
import time
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from segue.cli.flags import setting, with_options
from segue.cli.reporting import errors_in_red
from segue.gms.config import SERVE_GROUP, GmsConfig

LOOK_S = 10.0  # for a service to answer a person who looks at it

gms_app = typer.Typer(
    help="Keep weights in memory that outlives the engines, and share them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(words: list[str]) -> None:
    """Run ``segue gms`` with the words behind it, and end the process."""
    with errors_in_red():
        gms_app(args=words, prog_name="segue gms")


@gms_app.command()
@with_options(GmsConfig)
def serve(config: GmsConfig) -> None:
    """Run the memory service of this machine, for all devices.

    Every option can also be set by the environment variable that its help names.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # as for `segue serve`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import asyncio

    from segue.gms import lifecycle
    from segue.gms.service import MemoryService
    from segue.logs import configure

    def print_ready(service: MemoryService, path: str) -> None:
        devices = ", ".join(service.store.vmms)
        line = f"[bold green]Ready[/bold green] at [bold]{escape(path)}[/bold]: devices {escape(devices)}"
        Console(highlight=False).print(line, soft_wrap=True)

    configure(config.log_level, config.log_format)
    if config.on_child_exit != "alone":
        from segue.gms.supervisor import GmsSupervisor

        sys.exit(GmsSupervisor(config, config.on_child_exit).run())
    sys.exit(asyncio.run(lifecycle.serve(config, print_ready)))


@gms_app.command()
@with_options(GmsConfig, without=SERVE_GROUP)
def hold(config: GmsConfig) -> None:
    """Hold copies of the memory service's descriptors: started again after its death, it has all of them."""
    from segue.gms import lifecycle

    def print_ready(path: str) -> None:
        line = f"[bold green]Ready[/bold green] at [bold]{escape(path)}[/bold]: holding descriptors"
        Console(highlight=False).print(line, soft_wrap=True)

    lifecycle.hold(config.gms_dir, config.log_level, config.log_format, print_ready)


@gms_app.command()
@with_options(GmsConfig, without=SERVE_GROUP)
def ready(
    config: GmsConfig,
    timeout_s: Annotated[
        float, setting("timeout_s", "Seconds in which the service must answer.", group="Place", min=0)
    ] = 2.0,
    holder: Annotated[
        bool, setting("holder", "Ask the holder of descriptors, not the service.", group="Place")
    ] = False,
) -> None:
    """Exit with 0 if the memory service answers for every one of its devices; a probe can run this."""
    from segue.gms import messages as wire
    from segue.gms.readiness import check_holder, check_service

    if holder:
        check_holder(config.gms_dir, timeout_s)
        typer.echo("ready: the holder of descriptors")
        return
    devices = check_service(config.gms_dir, config.gms_token, timeout_s)
    full = f"all of its {wire.MAX_SESSIONS} sessions are in use"
    typer.echo(f"ready: {', '.join(devices) or full}")


@gms_app.command()
@with_options(GmsConfig, without=SERVE_GROUP)
def status(
    config: GmsConfig,
    as_json: Annotated[bool, setting("json", "Print JSON.", group="Output")] = False,
) -> None:
    """Show which weights and KV memory the memory service has, and who uses them."""
    with _watch(config) as client:
        found = client.status()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    for title, table in status_tables(found):
        console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        console.print(table)


@gms_app.command()
@with_options(GmsConfig, without=SERVE_GROUP)
def events(
    config: GmsConfig,
    once: Annotated[bool, setting("once", "End after the events so far.", group="Output")] = False,
) -> None:
    """Print what has happened in the memory service: its last 256 events, and then each new one."""
    with _watch(config) as client:
        since = 0
        while True:
            for event in client.events(since):
                at = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
                typer.echo(f"{at} {event.kind:16} {event.text}")
                since = event.number
            if once:
                return
            time.sleep(0.2)


def _watch(config: GmsConfig) -> Any:
    """Return a client that only looks."""
    from segue.gms.client import GmsClient
    from segue.gms.client_connection import GmsTarget

    return GmsClient(
        GmsTarget(
            directory=config.gms_dir, tag="watch", token=config.gms_token, connect_s=0.0, reply_s=LOOK_S
        )
    )


def status_tables(found: dict[str, Any]) -> list[tuple[str, Table]]:
    """Return the tables that show the state of the service, and their titles."""
    tables: list[tuple[str, Table]] = []

    def add(title: str, columns: list[str], rows: list[list[object]]) -> None:
        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(escape(str(cell)) for cell in row))
        tables.append((title, table))

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:.0f} MiB"

    add(
        f"Memory service {found['incarnation']}",
        ["device", "slabs"],
        [[name, mib(num_bytes)] for name, num_bytes in found["devices"].items()],
    )
    rows: list[list[object]] = [
        [
            each["generation"],
            each["state"],
            each["version"] or "-",
            ", ".join(each["cohorts"]) or "-",
            mib(each["bytes"]),
            "\n".join(each["readers"]) or "-",
        ]
        for each in found["generations"]
    ]
    add("Generations", ["generation", "state", "version", "cohorts", "size", "used by"], rows)
    rows = [[name, each["current"] or "-", each["epoch"]] for name, each in found["cohorts"].items()]
    add("Cohorts", ["cohort", "generation", "epoch"], rows)
    if found["kv"]:
        rows = [
            [each["cohort"], each["rank"], each["phase"], mib(each["bytes"]), each["user"] or "-"]
            for each in found["kv"]
        ]
        add("KV memory", ["cohort", "rank", "state", "size", "written by"], rows)
    names = ["session", "pid", "tag", "cohort", "engine", "rank", "device", "seconds"]
    add("Sessions", names, [[each[name] for name in names] for each in found["sessions"]])
    if found["waiting"]:
        add("Waiting for weights", ["engine"], [[name] for name in found["waiting"]])
    return tables
