"""Sends the command line's requests to a running server."""

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
    """The server cannot be reached, or it refused the request."""


class Remote:
    """A client of the server at a URL, with an API key or none."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        # A proxy from the environment would look for a loopback address on another machine.
        direct = [urllib.request.ProxyHandler({})] if _is_loopback(self.url) else []
        self._opener = urllib.request.build_opener(*direct)

    def post(self, path: str, body: Any = None, *, timeout: float | None = TIMEOUT_S) -> str:
        """Post ``body`` as JSON and return the text of the answer; ``timeout``: seconds without data.

        Raises:
            RemoteError: the server cannot be reached, refused the request, or did not finish its answer.
        """
        data = b"" if body is None else json.dumps(body).encode()
        with self.open(path, data, timeout=timeout) as response, self.understood():
            text: str = response.read().decode()
            return text

    def open(self, path: str, data: bytes | None = None, *, timeout: float | None = TIMEOUT_S) -> Any:
        """Return the open answer, which the caller must close; the request is a POST if ``data`` is given.

        Raises:
            RemoteError: the server cannot be reached, or it refused the request.
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
        """Raise a RemoteError if the answer breaks off in the block, or is not of the expected form."""
        try:
            yield
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


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read().decode()
        if error.headers.get("content-type", "").startswith("text/plain"):
            return " ".join(text.split()) or error.reason
        return message_of(json.loads(text))
    except (OSError, HTTPException, ValueError):
        return error.reason
