"""What each block of JSON, TOML or YAML of the documentation is checked as."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import typer.main
import yaml

from segue.cli.main import app
from tests.deploy.test_manifests import VERSIONS
from tests.docs import shell
from tests.docs.blocks import Block

# Fields of Prometheus' scrape_config that the documentation uses.
SCRAPE_FIELDS = {"authorization", "job_name", "metrics_path", "scrape_interval", "static_configs"}
LOG_FIELDS = {"time", "level", "logger", "message", "rank", "request_id", "exception", "process"}


def check(block: Block, routes: dict[str, Any], folder: Path) -> None:
    """Check a block of data as what its mark says it is. ``folder`` is for files that the check needs.

    Raises:
        AssertionError, WrongCommandError, SegueError, ValidationError: it is not what it should be.
    """
    what = block.marks["is"]
    kind, _, route = what.partition(" of ")
    if kind in ("body", "reply"):
        method, path = route.split()
        operation = shell.operation_of(method, path, routes)
        content = operation["requestBody"] if kind == "body" else operation["responses"]["200"]
        for value in _values(block.text):
            shell.validate(content["content"]["application/json"]["schema"], value, routes)
    else:
        CHECKS[what](block.text, routes, folder)


def _values(text: str) -> list[Any]:
    """One value of JSON, or one per line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def _options(text: str, routes: dict[str, Any], folder: Path) -> None:
    """A file for `segue serve --config`: each option is known, and its value keeps its rule."""
    assert tomllib.loads(text)
    file = folder / "segue.toml"
    file.write_text(text)
    command: Any = typer.main.get_command(app)
    command.commands["serve"].make_context("serve", ["--config", str(file)])


def _prometheus(text: str, routes: dict[str, Any], folder: Path) -> None:
    """Jobs of Prometheus, each with a path that an engine or a router has."""
    jobs = yaml.safe_load(text)["scrape_configs"]
    for job in jobs:
        assert set(job) <= SCRAPE_FIELDS, job
        shell.operation_of("GET", job.get("metrics_path", "/metrics"), routes)


def _pod(text: str, routes: dict[str, Any], folder: Path) -> None:
    """A part of a pod's specification: its fields, its command lines, and the paths of its probes."""
    spec = yaml.safe_load(text)
    for container in spec["containers"]:
        shell.check(["segue", *container["args"]], routes)
        for name, probe in container.items():
            if name.endswith("Probe"):
                shell.operation_of("GET", probe["httpGet"]["path"], routes)
        container.setdefault("image", "segue")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "segue"}, "spec": spec}
    kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)


def _log_line(text: str, routes: dict[str, Any], folder: Path) -> None:
    line = json.loads(text)
    assert set(line) <= LOG_FIELDS and {"time", "level", "logger", "message"} <= set(line)
    assert datetime.fromisoformat(line["time"]).tzinfo is not None


CHECKS: dict[str, Callable[[str, dict[str, Any], Path], None]] = {
    "options of segue serve": _options,
    "jobs of Prometheus": _prometheus,
    "a part of a pod": _pod,
    "a line of the log": _log_line,
}
