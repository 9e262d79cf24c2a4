"""Sends the command line's requests to a running server."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from segue.errors import SegueError
from segue.http_client import open_url

TIMEOUT_S = 600.0


class RemoteError(SegueError):
    """The server cannot be reached, or it refused the request."""


class Remote:
    """A client of the server at a URL, with an API key or none."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key

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
            raise RemoteError(
                f"cannot reach {self.url}: {str(getattr(error, 'reason', error)).strip()}; check --url"
            ) from None
        try:
            with response:
                if response.status != 200:
                    raise RemoteError(f"{self.url}{path}: {response.status} {_reason(response)}")
                yield response
        except (OSError, HTTPException) as error:
            raise RemoteError(f"{self.url} ended in the middle of its answer ({error})") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{self.url} does not answer as expected ({type(error).__name__}: {error}); check --url"
            ) from None


def message_of(content: Any) -> str:
    """Return the message in the body of an error, in any of the known forms."""
    for name in ("error", "message"):
        if isinstance(content, dict):
            content = content.get(name, content)
    return str(content)


def _is_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(response: Any) -> str:
    try:
        text = response.read().decode()
        if response.headers.get("content-type", "").startswith("text/plain"):
            return " ".join(text.split()) or str(response.reason)
        return message_of(json.loads(text))
    except (OSError, HTTPException, ValueError):
        return str(response.reason)
