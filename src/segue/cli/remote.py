"""A running server, as the command line talks to it."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from segue.errors import SegueError

TIMEOUT_S = 600.0


class RemoteError(SegueError):
    """The server cannot be reached, or it refused."""


class Remote:
    """Where requests go, and with which key."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        # A proxy of the environment would look for this machine's own server on another machine.
        direct = [urllib.request.ProxyHandler({})] if _is_loopback(self.url) else []
        self._opener = urllib.request.build_opener(*direct)

    def post(self, path: str, body: Any = None, *, timeout: float | None = TIMEOUT_S) -> str:
        """The text of the answer; ``timeout``: seconds of silence that are too long.

        Raises:
            RemoteError: there is no such server, or it refused.
        """
        data = b"" if body is None else json.dumps(body).encode()
        with self.open(path, data, timeout=timeout) as response, self.understood():
            text: str = response.read().decode()
            return text

    def open(self, path: str, data: bytes | None = None, *, timeout: float | None = TIMEOUT_S) -> Any:
        """The answer, to be read and closed; a POST if there are data.

        Raises:
            RemoteError: there is no such server, or it refused.
        """
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise RemoteError(f"{self.url}{path}: {error.code} {_reason(error)}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise RemoteError(
                f"cannot reach {self.url}: {str(getattr(error, 'reason', error)).strip()}; check --url"
            ) from None

    @contextmanager
    def understood(self) -> Iterator[None]:
        """What stops answering, or answers something else than was expected, is one error."""
        try:
            yield
        except (OSError, HTTPException) as error:
            raise RemoteError(f"{self.url} ended in the middle of its answer ({error})") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{self.url} does not answer as expected ({type(error).__name__}: {error}); check --url"
            ) from None


def message_of(content: Any) -> str:
    """What the body of an error says, whoever wrote it."""
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


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode()
        if error.headers.get("content-type", "").startswith("text/plain"):
            return " ".join(text.split()) or error.reason
        return message_of(json.loads(text))
    except (OSError, HTTPException, ValueError):
        return error.reason
