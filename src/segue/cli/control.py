"""The commands that control a running server: ``segue pause``, ``continue``, ``abort`` and ``flush``."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from segue.cli.remote import TIMEOUT_S, Remote
from segue.errors import ConfigError

control_app = typer.Typer()
PANEL = "Control a running server"  # the heading in `segue --help`
Url = Annotated[str, typer.Option(help="The running server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Its admin key, or API key. [dim]SEGUE_ADMIN_API_KEY, SEGUE_API_KEY[/dim]"),
]
DEFAULT_URL = "http://127.0.0.1:30000"


@control_app.command(rich_help_panel=PANEL)
def pause(
    mode: Annotated[
        str,
        typer.Option(
            help="What happens to requests: wait (running ones finish first), in_place (they keep their KV), "
            "retract (they give up their KV and wait), abort (they end)."
        ),
    ] = "retract",
    ttl: Annotated[float | None, typer.Option(help="Seconds until the server continues by itself.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Pause a server's generation; returns once no request runs."""
    server, body = _server(url, api_key), {"mode": mode, "ttl_s": ttl}
    with server.open("/pause_generation", body, timeout=None if mode == "wait" else TIMEOUT_S) as answer:
        now = json.load(answer)
        state = "continued meanwhile" if now["mode"] is None else f"paused ({now['mode']})"
        typer.echo(
            f"{state}: {now['num_running']} requests in place, {now['num_waiting']} waiting; "
            f"{now['num_retracted']} retracted, {now['num_aborted']} aborted; took {now['drained_ms']:.1f} ms"
        )


@control_app.command("continue", rich_help_panel=PANEL)
def continue_(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let a paused server continue."""
    with _server(url, api_key).open("/continue_generation", {}) as answer:
        typer.echo(json.load(answer)["message"])


@control_app.command(rich_help_panel=PANEL)
def abort(
    rid: Annotated[str | None, typer.Argument(help="Id of a request, or of a batch.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every request.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Abort one request of a server, or all. Replies keep the text so far. An unknown id does nothing."""
    if bool(rid) == all_:
        raise ConfigError("give either a request's id or --all")
    with _server(url, api_key).open("/abort_request", {"rid": rid or "", "abort_all": all_}):
        typer.echo("asked the server to abort " + ("all requests" if all_ else str(rid)))


@control_app.command(rich_help_panel=PANEL)
def flush(
    timeout: Annotated[float, typer.Option(help="Seconds to wait until no request holds KV.", min=0)] = 0.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Drop all cached KV of a server."""
    path, reply_timeout = f"/flush_cache?timeout={timeout}", None if timeout else TIMEOUT_S
    with _server(url, api_key).open(path, {}, timeout=reply_timeout) as answer:
        typer.echo(" ".join(answer.read().decode().split()))


def _server(url: str, api_key: str | None) -> Remote:
    given = os.environ
    return Remote(url, api_key or given.get("SEGUE_ADMIN_API_KEY") or given.get("SEGUE_API_KEY") or None)
