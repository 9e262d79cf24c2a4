"""Requests to HTTP servers whose address a user gave, by the standard library."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the API key is for the named server alone."""

    def redirect_request(self, *_: object) -> None:
        """Returns no request, so that the redirect itself is the answer."""


def open_url(
    url: str, body: bytes | None, *, api_key: str | None, timeout_s: float | None, by_proxy: bool = False
) -> Any:
    """Returns the open response, whatever its status; the caller must close it.

    Args:
        url: of the request.
        body: JSON to post; None: the request is a GET.
        api_key: of the server, or None.
        timeout_s: the longest silence of the server, in seconds; None: no limit.
        by_proxy: use the environment's proxy; else the request goes to the server directly.

    Raises:
        OSError, http.client.HTTPException, ValueError: the server cannot be reached, or ``url`` is not a URL.
    """
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    proxies = urllib.request.ProxyHandler(None if by_proxy else {})
    opener = urllib.request.build_opener(proxies, _NoRedirect)
    try:
        return opener.open(urllib.request.Request(url, body, headers), timeout=timeout_s)
    except urllib.error.HTTPError as response:
        return response
