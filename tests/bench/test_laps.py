"""Servers get the same load and are compared; the charts have a curve per arm."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench import laps, laps_served, report
from segue.bench.load import LogNormal, Mixture
from tests.server import fake_server
from tests.server.live import LiveServer
from tests.support.tiny_model import write_model

WORKLOAD = Mixture(
    long_share=0.3,
    short=LogNormal(median=4, sigma=0.5, least=1, most=8),
    long=LogNormal(median=40, sigma=0.3, least=20, most=60),
    max_id=90,
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("laps") / "tiny-model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model) as live:
        yield live


def arguments(**given: Any) -> argparse.Namespace:
    """What `bench.laps` is called with, for a short load."""
    short: dict[str, Any] = {
        "model": None,
        "option": [],
        "arms": [],
        "url": [],
        "theirs": [],
        "add": False,
        "load": [0.8],
        "rate": 20.0,
        "seconds": 1.0,
        "repeats": 2,
        "burstiness": 1.0,
        "concurrency": 4,
        "max_requests": 4000,
        "processes": 1,
    }
    return argparse.Namespace(**(short | given))


@pytest.mark.slow
def test_servers_that_run_and_servers_that_are_started_get_the_same_load(
    results: Path, server: LiveServer, model: Path
) -> None:
    options = '{"model": "{model}", "port": {port}, "log_level": "error"}'
    args = arguments(
        model=str(model),
        url=[("runs", server.url)],
        theirs=[("started", f"{sys.executable} {fake_server.__file__} '{options}'")],
    )
    found = laps_served.serve(args, WORKLOAD, "short")
    saved = json.loads((results / "short.json").read_text())
    assert saved["runs"] == json.loads(json.dumps(found["runs"]))
    assert [(run["arm"], run["load"], run["rate"]) for run in found["runs"]] == [
        ("runs", 0.8, 20.0),
        ("started", 0.8, 20.0),
    ]
    counts = [
        [[repeat[name]["requests"] for name in ("short", "long")] for repeat in run["repeats"]]
        for run in found["runs"]
    ]
    assert counts[0] == counts[1], "a repeat is the same load for each arm"
    assert counts[0][0] != counts[0][1], "and each repeat is another load"
    assert all(repeat["short"]["failed"] == 0 for run in found["runs"] for repeat in run["repeats"])
    assert set(found["saturation_per_s"]) == {"runs", "started"}


@pytest.mark.slow
def test_an_arm_that_is_added_gets_the_load_of_those_that_are_there(
    results: Path, server: LiveServer
) -> None:
    laps_served.serve(arguments(url=[("first", server.url)], repeats=1), WORKLOAD, "short")
    args = arguments(url=[("second", server.url)], repeats=1, add=True)
    found = laps_served.serve(args, WORKLOAD, "short")
    assert [run["arm"] for run in found["runs"]] == ["first", "second"]
    first, second = (run["repeats"][0]["short"]["requests"] for run in found["runs"])
    assert first == second
    assert set(found["saturation_per_s"]) == {"first", "second"}


def run_of(arm: str, load: float, p99: float) -> dict[str, Any]:
    """The figures of an arm at one load, with other latencies that say nothing."""
    times = {"p50": p99 / 2, "p90": p99, "p99": p99}
    return {"arm": arm, "load": load, "rate": 5.0, "short": times, "long": times}


def test_laps_is_compared_with_other_servers_at_the_same_load() -> None:
    runs = [run_of("laps", 0.8, 0.1), run_of("vllm", 0.8, 0.5), run_of("vllm", 0.9, 0.5)]
    runs += [run_of("vllm tuned", 0.8, 0.2), run_of("another", 0.8, 0.1)]
    assert laps_served.judged(runs) == [
        ("vllm, at 80%", pytest.approx(0.2), 0.4),
        ("vllm tuned, at 80%", pytest.approx(0.5), 0.8),
    ]


def test_the_chart_has_a_curve_per_arm_in_a_panel_per_class(results: Path) -> None:
    runs = [run_of(arm, load, 0.1) for arm in ("laps", "vllm") for load in (0.6, 0.8)]
    laps.draw("short", runs)
    picture = ElementTree.parse(results / "short.svg").getroot()
    texts = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if "time to first token" in text] == [
        f"{kind} prompts: time to first token, {which}, ms"
        for kind in ("short", "long")
        for which in ("p50", "p99")
    ]
    assert texts.count("laps") == texts.count("vllm") == 4
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 8


@pytest.mark.parametrize("text", ["vllm", "=http://127.0.0.1:1", "laps=http://127.0.0.1:1", "vllm=", "a=b"])
def test_an_arm_that_runs_needs_a_name_of_its_own_and_a_url(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        laps_served.named_url(text)
    assert laps_served.named_url("vllm=http://host:8000/v1") == ("vllm", "http://host:8000")


def test_a_command_must_be_told_its_port() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"must have \{port\}"):
        laps_served.named_command("vllm=serve --model {model}")
    assert laps_served.named_command("vllm=serve --port={port}") == ("vllm", "serve --port={port}")
