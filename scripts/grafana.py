"""Writes docs/grafana.json, a dashboard of what operators of engines and routers look at.

    python scripts/grafana.py

Import the file in Grafana, and choose a Prometheus that scrapes ``/metrics`` of the engines and routers. A
change belongs here, and not in the file: a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"
COLUMNS, WIDTH, HEIGHT = 24, 8, 8  # of the page and of a panel, in Grafana's units
ENGINE = '{model_name=~"$model", instance=~"$instance"}'
ROUTER = '{instance=~"$instance"}'


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and what its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: lines over time, or a table of what is so now."""

    title: str
    unit: str  # Grafana's name of it
    queries: Sequence[Query]
    text: str = ""  # for people, behind the panel's title
    kind: str = "timeseries"


def gauge(name: str, legend: str = "{{instance}}") -> Query:
    """A gauge of engines as it is."""
    return each(f"segue:{name}{ENGINE}", legend)


def each(expression: str, legend: str) -> Query:
    """A query with a line per engine; a router's `/engine_metrics` tells them apart by `worker`."""
    return Query(expression, legend.replace("{{instance}}", "{{instance}} {{worker}}"))


def rate(name: str, legend: str, *labels: str) -> Query:
    """The growth per second of a counter of engines, of all of them together, by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return Query(f"sum{by} (rate(segue:{name}_total{ENGINE}[$__rate_interval]))", legend)


def quantiles(name: str, *labels: str, of_whom: str = ENGINE) -> list[Query]:
    """The median and high quantiles of a histogram of engines, by labels."""
    by = ", ".join(("le", *labels))
    of = "".join(f" {{{{{label}}}}}" for label in labels)
    buckets = f"sum by ({by}) (rate(segue:{name}_bucket{of_whom}[$__rate_interval]))"
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", f"p{round(100 * quantile)}{of}")
        for quantile in (0.5, 0.9, 0.99)
    ]


def ratio(part: str, whole: str, legend: str) -> Query:
    """The share of one counter's growth in another's, of all engines together."""
    rates = [f"sum (rate(segue:{name}_total{ENGINE}[$__rate_interval]))" for name in (part, whole)]
    return Query(" / ".join(rates), legend)


def router(name: str, legend: str, *labels: str) -> Query:
    """The growth per second of a counter of routers, by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return Query(f"sum{by} (rate(segue:router_{name}_total{ROUTER}[$__rate_interval]))", legend)


def router_quantiles(name: str) -> list[Query]:
    """The median and high quantiles of a histogram of routers."""
    return quantiles(f"router_{name}_seconds", of_whom=ROUTER)


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Running and waiting",
            "short",
            [
                gauge("num_requests_running", "running {{instance}}"),
                gauge("num_requests_waiting", "waiting {{instance}}"),
            ],
        ),
        Panel("Ended", "reqps", [rate("request_success", "{{finished_reason}}", "finished_reason")]),
        Panel(
            "Tokens",
            "short",
            [rate("prompt_tokens", "prompt tokens/s"), rate("generation_tokens", "output tokens/s")],
        ),
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Time in the queue", "s", quantiles("queue_time_seconds"), "Until the first step of a prompt."),
        Panel("Time of a prompt", "s", quantiles("prefill_time_seconds"), "Until the first token."),
        Panel("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
        Panel("Time of a whole request", "s", quantiles("e2e_request_latency_seconds")),
    ],
    "KV cache and steps": [
        Panel(
            "KV pages",
            "percentunit",
            [
                gauge("kv_cache_usage_perc", "used {{instance}}"),
                gauge("kv_cache_taken_perc", "held by requests {{instance}}"),
            ],
            "What is used and not held by requests is cached, and makes room when it is needed.",
        ),
        Panel("Preemptions", "ops", [rate("num_preemptions", "{{instance}}", "instance")]),
        Panel(
            "Share of prompt tokens found in the prefix cache",
            "percentunit",
            [ratio("prefix_cache_hits", "prefix_cache_queries", "hits")],
        ),
        Panel("Time of a step", "s", quantiles("step_time_seconds")),
        Panel(
            "Steps without a CUDA graph",
            "ops",
            [rate("eager", "{{reason}}", "reason")],
            "By reason, per second.",
        ),
        Panel("Requests with logits that are not finite", "ops", [rate("non_finite_logits", "requests/s")]),
    ],
    "Engines": [
        Panel("State", "short", [gauge("engine_state", "{{state}} {{instance}}")], "1 is the present one."),
        Panel(
            "Hung, paused or poisoned",
            "short",
            [
                gauge("engine_hung", "hung {{instance}}"),
                gauge("paused", "paused ({{mode}}) {{instance}}"),
                gauge("weights_poisoned", "poisoned {{instance}}"),
            ],
        ),
        Panel(
            "Age of the last heartbeat", "s", [gauge("heartbeat_age_seconds", "rank {{rank}} {{instance}}")]
        ),
        Panel(
            "Failovers",
            "short",
            [each(f"segue:failovers_total{ENGINE}", "{{instance}}"), gauge("epoch", "epoch {{instance}}")],
            "Wakes in the place of another engine, and the epoch under which each engine serves.",
        ),
        Panel("Time of the last wake, by phase", "s", [gauge("wake_seconds", "{{phase}} {{instance}}")]),
        Panel(
            "KV taken over at the last wake",
            "short",
            [
                gauge("warm_kv_tokens", "tokens {{instance}}"),
                gauge("warm_kv_refused", "{{reason}} {{instance}}"),
            ],
            "With --warm-kv: tokens, or 1 at the reason why there are none.",
        ),
    ],
    "Weights": [
        Panel(
            "Version",
            "short",
            [gauge("weight_version_info", "{{version}} {{instance}}")],
            "Engines of one model that show different versions have not all been updated.",
            kind="table",
        ),
        Panel(
            "Updates",
            "short",
            [
                each(
                    f"increase(segue:weight_updates_total{ENGINE}[$__rate_interval])",
                    "took effect {{instance}}",
                ),
                each(
                    f"increase(segue:weight_update_failures_total{ENGINE}[$__rate_interval])",
                    "failed {{instance}}",
                ),
            ],
        ),
        Panel(
            "Time of the last update, by phase",
            "s",
            [gauge("weight_update_seconds", "{{phase}} {{instance}}")],
        ),
        Panel("Received in the last update", "decbytes", [gauge("weight_update_bytes")]),
        Panel("Rate of the last update", "GBs", [gauge("weight_update_gb_per_second")]),
    ],
    "Length-aware prefill (--enable-laps-scheduler)": [
        Panel("Waiting, by class", "short", [gauge("laps_requests_waiting", "{{class}} {{instance}}")]),
        Panel("Time to first token, by class", "s", quantiles("laps_time_to_first_token_seconds", "class")),
        Panel("Steps with prefill, by reason", "ops", [rate("laps_picks", "{{reason}}", "reason")]),
    ],
    "Handing KV over (--role prefill, --role decode)": [
        Panel(
            "Offers and leases",
            "short",
            [
                gauge("pd_offers", "offer {{state}} {{instance}}"),
                gauge("pd_leases", "lease {{state}} {{instance}}"),
            ],
        ),
        Panel(
            "Requests",
            "reqps",
            [
                rate("pd_handed_over", "handed over"),
                rate("pd_adopted", "taken over"),
                rate("pd_recomputed", "computed again: {{reason}}", "reason"),
                rate("pd_failed", "failed: {{reason}}", "reason"),
            ],
        ),
        Panel("Bytes", "Bps", [rate("pd_transferred_bytes", "{{instance}}", "instance")]),
    ],
    "Router": [
        Panel("Requests in flight", "short", [Query(f"segue:router_in_flight{ROUTER}", "{{worker}}")]),
        Panel(
            "Workers that get requests",
            "short",
            [Query(f"segue:router_worker_serves{ROUTER}", "{{worker}}")],
            "1: it gets requests.",
        ),
        Panel(
            "Time until a worker is chosen",
            "s",
            router_quantiles("queue_time"),
            "Of all requests.",
        ),
        Panel("Time to first token of streams", "s", router_quantiles("time_to_first_token")),
        Panel("Time of a whole request", "s", router_quantiles("e2e_request_latency")),
        Panel("Legs, by end", "reqps", [router("requests", "{{worker}} {{end}}", "worker", "end")]),
        Panel(
            "Lost workers and refusals",
            "reqps",
            [
                router("retries", "tried again"),
                router("resumes", "resumed in the middle"),
                router("waits", "waited for another engine"),
                router("refused", "refused"),
            ],
        ),
        Panel(
            "Pairs of prefill and decode workers",
            "reqps",
            [
                router("pairs", "at a pair"),
                router("local", "at a decode worker alone"),
                router("second_claims", "KV claimed a second time"),
            ],
        ),
        Panel("Operations", "ops", [router("control_requests", "{{route}} {{end}}", "route", "end")]),
    ],
}


def variable(name: str, query: str) -> dict[str, Any]:
    """A choice above the dashboard, from the values of a label."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def made(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """A panel as Grafana has it."""
    is_table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": query.expression,
            "legendFormat": query.legend,
            "instant": is_table,
            "range": not is_table,
            **({"format": "table"} if is_table else {}),
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        number = len(panels) + 1
        at = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        panels.append(
            {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": at, "panels": []}
        )
        y += 1
        for index, panel in enumerate(row):
            column, line = index % (COLUMNS // WIDTH), index // (COLUMNS // WIDTH)
            panels.append(made(panel, len(panels) + 1, column * WIDTH, y + line * HEIGHT))
        y += HEIGHT * -(-len(row) // (COLUMNS // WIDTH))
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "Segue",
        "uid": "segue",
        "tags": ["segue"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model", "label_values(segue:num_requests_running, model_name)"),
                variable(
                    "instance",
                    'label_values({__name__=~"segue:engine_state|segue:router_retries_total"}, instance)',
                ),
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
