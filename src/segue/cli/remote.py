"""A client of a running server, and the commands that control one: ``segue pause``, ``abort`` and more."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from segue.cli.flags import setting
from segue.errors import ConfigError, SegueError
from segue.http_client import open_url

TIMEOUT_S = 600.0
control_app = typer.Typer()
PANEL = "Control a running server"  # the heading in `segue --help`
SERVER = "Server"
Url = Annotated[str, setting("url", "The running server.", group=SERVER)]
KEYS = ["SEGUE_ADMIN_API_KEY", "SEGUE_API_KEY"]


def _given_or_from_environment(key: str | None) -> str | None:
    """Return the key. An empty one counts as left out, as when a script passes a variable that is not set."""
    return key or next(filter(None, map(os.environ.get, KEYS)), None)


ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Its admin key, or API key.",
        envvar=KEYS,
        callback=_given_or_from_environment,
        rich_help_panel=SERVER,
    ),
]
# Of commands that ask a server for text, in place of an engine of their own.
ServerUrl = Annotated[
    str | None, setting("url", "Use this server instead of starting an engine.", group=SERVER)
]
ClientKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        "--key",
        help="The server's API key. [dim]SEGUE_API_KEY[/dim]",
        envvar=["SEGUE_API_KEY", "SEGUE_KEY"],
        show_envvar=False,
        rich_help_panel=SERVER,
    ),
]
DEFAULT_URL = "http://127.0.0.1:30000"


class RemoteError(SegueError):
    """The server cannot be reached, or it refused the request."""


class ServerUnavailableError(RemoteError):
    """The server cannot be reached, has no room now, or broke its answer off: later it may answer."""


UNAVAILABLE = (408, 429, 502, 503, 504)  # statuses that mean this


class Remote:
    """A client of the server at a URL, with an API key or none."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key or None

    @contextmanager
    def open(self, path: str, body: Any = None, *, timeout: float | None = TIMEOUT_S) -> Iterator[Any]:
        """Context with the open answer to a GET or, if ``body`` is given, to a POST of this JSON.

        ``timeout``: the longest silence, in seconds; None: no limit.

        Raises:
            RemoteError: the server cannot be reached, or it refused the request; or the answer breaks off in
                the block, or is not of the form that the block expects.
        """
        data = None if body is None else json.dumps(body).encode()
        # A proxy from the environment would look for a loopback address on another machine.
        by_proxy = not _is_loopback(self.url)
        try:
            response = open_url(
                self.url + path, data, api_key=self._key, timeout_s=timeout, by_proxy=by_proxy
            )
        except (OSError, HTTPException, ValueError) as error:
            raise ServerUnavailableError(
                f"cannot reach {self.url}: {str(getattr(error, 'reason', error)).strip()}; check --url"
            ) from None
        try:
            with response:
                if response.status != 200:
                    kind = ServerUnavailableError if response.status in UNAVAILABLE else RemoteError
                    raise kind(f"{self.url}{path}: {response.status} {_reason(response)}")
                yield response
        except (OSError, HTTPException) as error:
            raise ServerUnavailableError(
                f"{self.url} ended in the middle of its answer ({error}); see the server's log"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{self.url} does not answer as expected ({type(error).__name__}: {error}); check --url"
            ) from None


def message_of(content: Any) -> str:
    """Return the message in the body of an error, in any of the known forms.

    Those are OpenAI's ``{"error": {"message": …}}``, the native ``{"message": …}``, and ``{"error": …}``.
    Any other body is returned as text.
    """
    for name in ("error", "message"):
        if isinstance(content, dict):
            content = content.get(name, content)
    return str(content)


def _is_loopback(url: str) -> bool:
    """Whether the host of a URL names this machine; False also for a URL that cannot be parsed."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(response: Any) -> str:
    """Return why a server refused a request: its message, else the standard text of the status."""
    try:
        text = response.read().decode()
        if response.headers.get("content-type", "").startswith("text/plain"):
            return " ".join(text.split()) or str(response.reason)
        return message_of(json.loads(text))
    except (OSError, HTTPException, ValueError):
        return str(response.reason)


@control_app.command(rich_help_panel=PANEL)
def pause(
    mode: Annotated[
        str,
        setting(
            "mode",
            "What happens to requests: wait (running ones finish first), in_place (they keep their KV), "
            "retract (they give up their KV and wait), abort (they end).",
            group="Pause",
        ),
    ] = "retract",
    ttl: Annotated[
        float | None, setting("ttl", "Seconds until the server continues by itself.", group="Pause")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Pause a server's generation; returns once no request runs."""
    server, body = Remote(url, api_key), {"mode": mode, "ttl_s": ttl}
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
    with Remote(url, api_key).open("/continue_generation", {}) as answer:
        typer.echo(json.load(answer)["message"])


@control_app.command(rich_help_panel=PANEL)
def abort(
    rid: Annotated[str | None, typer.Argument(help="Id of a request, or of a batch.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every request.", rich_help_panel="Requests")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Abort one request of a server, or all. Replies keep the text so far. An unknown id does nothing."""
    if bool(rid) == all_:
        raise ConfigError("give either a request's id or --all")
    with Remote(url, api_key).open("/abort_request", {"rid": rid or "", "abort_all": all_}):
        typer.echo("asked the server to abort " + ("all requests" if all_ else str(rid)))


@control_app.command(rich_help_panel=PANEL)
def flush(
    timeout: Annotated[
        float, setting("timeout", "Seconds to wait until no request holds KV.", group="Flush", min=0)
    ] = 0.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Drop all cached KV of a server."""
    path, reply_timeout = f"/flush_cache?timeout={timeout}", None if timeout else TIMEOUT_S
    with Remote(url, api_key).open(path, {}, timeout=reply_timeout) as answer:
        typer.echo(" ".join(answer.read().decode().split()))
