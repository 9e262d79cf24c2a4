"""``segue serve`` and ``segue router``, and what they print once they are ready.

:mod:`segue.cli.entry` loads this module alone for them: clusters, pods and tests start many such processes,
and the other commands load much more.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from segue.cli.flags import join_lists, setting, with_named_flags, with_options
from segue.cli.reporting import errors_in_red
from segue.cli.start_view import start_view
from segue.config import MOST_SHADOWS, EngineConfig
from segue.host import collect_from_now_on
from segue.listener import bind
from segue.logs import configure
from segue.router.config import RouterConfig

if TYPE_CHECKING:
    from segue.cluster.config import ClusterConfig
    from segue.launch.runtime import Runtime

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


@with_options(EngineConfig)
def serve(
    config: EngineConfig,
    shadows: Annotated[
        int,
        setting(
            "shadows",
            "Number of engines that stand by: when the one that serves dies, one of them goes on with its "
            "requests, behind the same port.",
            group="Failover",
            min=0,
            max=MOST_SHADOWS,
        ),
    ] = 0,
) -> None:
    """Serve a model over HTTP: OpenAI's API, and SGLang's /generate.

    Every option can also be set by the environment variable that its help names.
    """
    # Until the server handles Ctrl-C, it ends the process at once. A KeyboardInterrupt could be lost: Python
    # swallows one that is raised in a callback, such as those that run while modules are imported.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if shadows:
        from segue.cluster.config import ClusterConfig

        run_cluster(ClusterConfig.with_shadows(config, shadows))
    import uvloop

    from segue.server import lifecycle

    collect_from_now_on()
    configure(config.log_level, config.log_format)
    listener = bind(config.host, config.port)
    with start_view(config.log_format) as on_start:
        sys.exit(uvloop.run(lifecycle.serve(config, listener, _print_ready, on_start=on_start)))


@with_options(RouterConfig)
def router(config: RouterConfig) -> None:
    """Serve several engines at one address: each request goes to the one predicted to be done with it first.

    Every option can also be set by the environment variable that its help names.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # as for `serve`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import uvloop

    from segue.router import lifecycle

    collect_from_now_on()
    configure(config.log_level, config.log_format)
    listener = bind(config.host, config.port)
    sys.exit(uvloop.run(lifecycle.route(config, listener, _print_router_ready)))


def run_cluster(config: ClusterConfig) -> NoReturn:
    """Run engines and their router until a signal, and end this process."""
    import asyncio

    from segue.cluster import lifecycle

    collect_from_now_on()
    configure(config.router.log_level, config.router.log_format)
    sys.exit(asyncio.run(lifecycle.run_cluster(config, _print_cluster_ready)))


def _print_cluster_ready(url: str, workers: str) -> None:
    """Print the router's URL, and how many workers there are of each role."""
    line = f"[bold green]Ready[/bold green] at [bold]{url}[/bold] (OpenAI base URL {url}/v1): {workers}"
    Console(highlight=False).print(line, soft_wrap=True)


def _print_router_ready(url: str) -> None:
    """Print the router's URL."""
    line = f"[bold green]Ready[/bold green] at [bold]{url}[/bold] (OpenAI base URL {url}/v1)"
    Console(highlight=False).print(line, soft_wrap=True)


def _print_ready(runtime: Runtime, url: str) -> None:
    """Print what the engine has chosen at its start, and the server's URL."""
    ready, limits = runtime.manager.ready, runtime.manager.ready.limits
    pages, size, chunk = limits.num_pages, limits.page_size, limits.chunked_prefill_size
    facts = {
        "model": f"{runtime.name} ({runtime.source.config.architecture})",
        "weights": f"{size_in_words(ready.weight_bytes)}, {ready.dtype}",
        "device": f"{ready.device}, tensor parallel {runtime.config.tp}, attention {ready.attention_backend}",
        "context": f"{limits.max_seq_len} tokens",
        "KV cache": f"{pages} pages of {size} = {pages * size} tokens, {size_in_words(ready.kv_bytes)}",
        "batch": f"{limits.max_running_requests} requests, {chunk} prompt tokens per step",
        "start": f"{sum(step.seconds for step in ready.init_steps):.1f} s in {len(ready.init_steps)} steps",
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for name, fact in facts.items():
        table.add_row(f"[dim]{name}[/dim]", escape(fact))
    console = Console(highlight=False)
    console.print(table)
    line = f"[bold green]Ready[/bold green] at [bold]{url}[/bold] (OpenAI base URL {url}/v1)"
    console.print(line, soft_wrap=True)


def size_in_words(num_bytes: int) -> str:
    """Return a number of bytes in MiB, or in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


COMMANDS: dict[str, Callable[..., None]] = {"serve": serve, "router": router}


def main(name: str, words: list[str]) -> None:
    """Run one of the commands with the words behind its name, and end the process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    words = join_lists(words, EngineConfig, RouterConfig)
    app.command(context_settings=SETTINGS)(with_named_flags(COMMANDS[name], words))
    with errors_in_red():
        app(args=words, prog_name=f"segue {name}")
