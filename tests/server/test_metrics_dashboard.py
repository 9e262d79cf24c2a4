"""The dashboard for Grafana asks for nothing but what ``/metrics`` has."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from segue.frontend.stats import Stats
from segue.messages.control import Counters, HandoverCounters, LapsCounters
from segue.router.choice import RoutingRules
from segue.router.engine_metrics import LABEL
from segue.router.registry import Registry
from segue.router.status import RouterCollector
from segue.server.metrics import _handover_metrics, _histogram, _laps_metrics, _metric, _warm_metrics
from tests.server.conftest import MODEL
from tests.server.live import LiveServer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "grafana.json"
OF_SCRAPES = {"instance", LABEL}  # labels that Prometheus itself adds, and a router's /engine_metrics

# A selector: the name of a metric, with the matchers behind it if there are any.
_SELECTOR = re.compile(r"([a-zA-Z_]\w*:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")

Known = dict[str, set[str]]  # name of a sample -> its labels


def asked(expression: str, legend: str = "") -> Known:
    """The names in an expression, each with the labels that it must have: its own, and those of groupings."""
    found: Known = {}
    shared = {label.strip() for group in _GROUPING.findall(expression) for label in group.split(",")}
    for name, matchers in _SELECTOR.findall(expression):
        found.setdefault(name, set()).update(_MATCHER.findall(matchers), shared, _LEGEND.findall(legend))
    return found


def missing(expression: str, legend: str, known: Known) -> set[str]:
    """What an expression asks for, and the metrics do not have."""
    lacks = set()
    for name, labels in asked(expression, legend).items():
        if name not in known:
            lacks.add(name)
        else:
            lacks |= {f"{name}: {label}" for label in labels - known[name] - OF_SCRAPES}
    return lacks


def exposed(text: str) -> Known:
    found: Known = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


class WithOptions(Collector):
    """The metrics of engines that have the options for them."""

    def collect(self) -> Iterator[Metric]:
        gauge, counter = (partial(_metric, kind, MODEL) for kind in (GaugeMetricFamily, CounterMetricFamily))
        counts = {"short": 1}
        laps = LapsCounters(
            waiting=counts, picks=counts, chunks=0, chunk_tokens=0, window_s=0, error_p50=0, error_p90=0
        )
        yield from _laps_metrics(laps, Stats(), gauge, counter, partial(_histogram, MODEL))
        yield from _handover_metrics(HandoverCounters(), 100, gauge, counter)
        yield from _warm_metrics(Counters(), 16, gauge)


class OfRouter(Collector):
    """The metrics of a router: those by worker have no samples before there are workers and requests."""

    def collect(self) -> Iterator[Metric]:
        for metric in RouterCollector(Registry(RoutingRules())).collect():
            if not metric.samples:
                metric.add_metric([""] * len(metric._labelnames), 0)  # type: ignore[attr-defined]
            yield metric


@pytest.fixture
def known(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Known:
    runtime = server.runtime  # as if it had woken, and its weights had been updated
    monkeypatch.setattr(runtime.life, "wake_phases", {"total": 1.0})
    last = {"timings": {"total_s": 1.0}}
    monkeypatch.setattr(runtime.manager, "weights", structs.replace(runtime.manager.weights, last=last))
    others = generate_latest(WithOptions()).decode() + generate_latest(OfRouter()).decode()
    return exposed(server.client.get("/metrics").text) | exposed(others)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_script", ROOT / "scripts" / "grafana.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses need it
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_script_writes(script: ModuleType) -> None:
    assert FILE.read_text() == script.text(), "run python scripts/grafana.py"


def test_every_query_asks_for_metrics_and_labels_that_there_are(known: Known) -> None:
    board = json.loads(FILE.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(targets) > 40
    lacks = {t["expr"]: found for t in targets if (found := missing(t["expr"], t["legendFormat"], known))}
    assert lacks == {}
    assert all(asked(target["expr"]) for target in targets)
    queries = [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]
    assert {name for query in queries for name in asked(query)} <= known.keys()


@pytest.mark.parametrize(
    ("expression", "legend", "lacks"),
    [
        ('a:b{x="1", y!~"2"}', "", {"a:b: y"}),
        ("sum by (le, z) (rate(a:b_bucket[5m]))", "", {"a:b_bucket: z"}),
        ("a:b / ignoring (x) a:c", "{{x}}", {"a:c"}),
        ("a:b", "{{instance}} {{x}} {{w}}", {"a:b: w"}),
    ],
)
def test_a_query_that_asks_for_something_else_is_found(expression: str, legend: str, lacks: set[str]) -> None:
    assert missing(expression, legend, {"a:b": {"x"}, "a:b_bucket": {"le", "x"}}) == lacks
