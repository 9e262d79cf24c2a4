"""Loads on a server that run for some seconds each, and the table of their figures."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import msgspec

from segue.bench.load import SLO, Clients, Lengths
from segue.errors import BenchmarkError
from segue.http_client import open_url

WARM_UP = 0.15  # share of a load's time, at its begin, that does not count
PATIENCE_S = 10.0  # after the last arrival, until unfinished requests are given up


class _Listed(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Listed] = []


def model_of(url: str, key: str | None = None) -> str:
    """Return the name of the model that the server at `url` serves, or of the first one of several.

    Raises:
        BenchmarkError: the server cannot be reached, or does not list a model.
    """
    try:
        with closing(open_url(f"{url}/v1/models", None, api_key=key, timeout_s=10)) as reply:
            status, content = reply.status, reply.read()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BenchmarkError(
            f"cannot reach {url} ({error}); check the URL, and that a server runs there"
        ) from error
    try:
        models = msgspec.json.decode(content, type=_Models).data
    except msgspec.MsgspecError:
        models = []
    if status != 200 or not models:
        raise BenchmarkError(
            f"{url}/v1/models answers {status}, and lists no model; name one with --model, and check the key"
        )
    return models[0].id


def at_rate(
    clients: Clients, rate: float, *, seconds: float, lengths: Lengths, burstiness: float, slo: SLO, seed: int
) -> dict[str, Any]:
    """Run one load of `rate` requests per second, and return its summary."""
    run = clients.open_loop(
        rate, seconds, lengths=lengths, burstiness=burstiness, seed=seed, patience=PATIENCE_S
    )
    return {"rate": rate, **run.summary(since=WARM_UP * seconds, until=seconds, slo=slo)}


def saturated(
    clients: Clients,
    concurrency: int,
    *,
    seconds: float,
    lengths: Lengths,
    slo: SLO,
    max_requests: int,
    seed: int,
) -> dict[str, Any]:
    """Saturate the server with `concurrency` requests at any time; `rate` is its requests per second."""
    run = clients.closed_loop(concurrency, seconds, lengths=lengths, max_requests=max_requests, seed=seed)
    found = run.summary(since=0.3 * seconds, until=seconds, slo=slo)
    rate = found["events_per_s"] * found["tokens_per_event"] / lengths.mean_output
    return {"concurrency": concurrency, "rate": rate, **found}


TITLE = "ms; good: kept the SLO; late: sent after it was due; client: CPU of the busiest process"
COLUMNS = (
    "",
    "req/s",
    "TTFT p50",
    "p99",
    "gap p50",
    "p99",
    "max",
    "end p50",
    "p99",
    "good",
    "unfinished",
    "failed",
    "late p99",
    "client",
)


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return one line of the table, in milliseconds."""

    def ms(kind: str, *which: str) -> list[str]:
        return [f"{1e3 * found[kind][each]:.1f}" for each in which]

    return [
        name,
        f"{found['rate']:.1f}",
        *ms("ttft_s", "p50", "p99"),
        *ms("gap_s", "p50", "p99", "max"),
        *ms("end_s", "p50", "p99"),
        f"{found['good_share']:.0%}",
        str(found["unfinished"]),
        str(found["failed"]),
        f"{1e3 * found['send_lag_p99_s']:.1f}",
        f"{found['client_cpu']:.0%}",
    ]
