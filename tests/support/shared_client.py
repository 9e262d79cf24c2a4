"""An HTTP client that several threads use."""

from __future__ import annotations

from typing import Any

import httpx


def shared_client(**options: Any) -> httpx.Client:
    """Returns a client with the options of :class:`httpx.Client` whose connections serve one request each.

    If connections are kept, a request can end with ``ReadError: Bad file descriptor``. Before each request,
    the pool closes the connections that their server has ended. It asks each one first whether it is idle,
    and then whether there is something to read. In between, another thread can send its request on that
    connection, and get the first bytes of the reply.
    """
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(headers={"Connection": "close"}, limits=limits, **options)
