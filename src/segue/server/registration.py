"""Registers this server at routers, again and again for as long as it serves."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

from segue.config import EngineConfig
from segue.http_client import open_url
from segue.listener import own_address, with_host_of
from segue.logs import logger
from segue.messages.fleet import REGISTER_PERIOD_S, REGISTER_TTL_S, Register
from segue.options import parse_urls, stands_for_all
from segue.server.responses import encode

ANSWER_S = 3.0  # for a router to answer
LEAVE_S = 0.5  # the same, when the server is shutting down
MOST_BYTES = 4096  # of an answer, that are read for its message


async def keep_registered(config: EngineConfig, url: str, *, epoch: int = 0) -> None:
    """Register at every router of ``--register``, until this is cancelled; then the registrations end.

    A router that cannot be reached is tried again at the next turn. ``url`` is the server's own one. With an
    ``epoch`` the server is registered as the one of its cohort that serves.
    """
    routers = [] if config.register is None else parse_urls(config.register, "register")
    await asyncio.gather(*(_keep_registered(router, config, url, epoch) for router in routers))


async def _keep_registered(router: str, config: EngineConfig, url: str, epoch: int) -> None:
    problem: str | None = ""  # of the last try; None: it succeeded; "": there was none
    own_url = config.register_url or ""
    cohort = config.cohort if epoch else ""

    def registration(ttl_s: float) -> Register:
        return Register(url=own_url, cohort=cohort, epoch=epoch, ttl_s=ttl_s)

    try:
        while True:
            before = problem
            try:
                own_url = own_url or await asyncio.to_thread(reachable_url, url, router)
                problem = await asyncio.to_thread(
                    _post, router, config, registration(REGISTER_TTL_S), ANSWER_S
                )
            except OSError as error:  # the router's name is not known
                problem = str(error)
            if problem != before and problem is not None:
                logger.warning("cannot register at the router %s: %s; trying again", router, problem)
            elif problem != before:
                logger.info("registered at the router %s as %s", router, own_url)
            await asyncio.sleep(REGISTER_PERIOD_S)
    finally:
        if own_url and not problem:
            with suppress(asyncio.CancelledError):
                await asyncio.to_thread(_post, router, config, registration(0.0), LEAVE_S)


def reachable_url(url: str, router: str) -> str:
    """Returns the URL at which a router reaches the server that listens at ``url``.

    It differs where the server listens on all addresses: then it has the address that this machine has
    towards the router.

    Raises:
        OSError: the router's host name is unknown, or there is no way to it.
    """
    if stands_for_all(url):
        target = urlsplit(router)
        address = own_address(target.hostname or "", target.port or 80)
        return with_host_of(url, f"http://[{address}]" if ":" in address else f"http://{address}")
    return url


def _post(router: str, config: EngineConfig, registration: Register, timeout_s: float) -> str | None:
    """Register at a router; returns what went wrong, None: nothing."""
    body = encode(registration)
    try:
        with open_url(f"{router}/workers", body, api_key=config.register_key, timeout_s=timeout_s) as reply:
            if reply.status < 300:
                return None
            text = reply.read(MOST_BYTES).decode("utf-8", "replace")
            status = reply.status
    except (OSError, HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["message"]
    hint = "; give its admin key by --register-key" if status in (401, 403) else ""
    return f"HTTP {status}: {text}{hint}"
