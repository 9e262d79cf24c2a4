"""The option that names a collector."""

from __future__ import annotations

import subprocess
import sys

import pytest

from segue import extras
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.router.config import RouterConfig
from segue.tracing.endpoint import parse_endpoint
from segue.tracing.opening import tracer_of


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:4318/otlp/x?k=v", "http://c:4318/otlp/x?k=v"),
    ],
)
def test_a_url_without_a_path_gets_that_of_otlp(url: str, whole: str) -> None:
    assert parse_endpoint(url, "x") == whole


@pytest.mark.parametrize("url", ["collector:4318", "grpc://c:4317", "http://", "http://c:x", "http://c/#x"])
@pytest.mark.parametrize("kind", [EngineConfig, RouterConfig])
def test_what_is_no_url_of_a_collector_is_refused(kind: type, url: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=.*like http://collector:4318"):
        kind(otlp_traces_endpoint=url)


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"^otlp_traces_endpoint: .*OTEL_EXPORTER_OTLP_HEADERS") as caught:
        EngineConfig(otlp_traces_endpoint="http://me:hunter2@c:4318")
    assert "hunter2" not in str(caught.value)


def test_without_the_packages_the_option_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(extras, "find_spec", missing)
    with pytest.raises(ConfigError, match=r"install them with: pip install 'segue\[otel\]'"):
        EngineConfig(otlp_traces_endpoint="http://c:4318")


def test_opentelemetry_can_be_switched_off_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert tracer_of("http://c:4318", "segue", "1") is None


def test_without_the_option_nothing_of_opentelemetry_is_imported() -> None:
    text = (
        "import sys; from segue.config import EngineConfig; from segue.router.app import create_router_app\n"
        "from segue.router.config import RouterConfig; from segue.server.app import create_app\n"
        "create_app(EngineConfig()); assert create_router_app(RouterConfig()).state.router.tracer is None\n"
        "found = [name for name in sys.modules if name.startswith(('opentelemetry', 'google.protobuf'))]\n"
        "sys.exit(repr(found) if found or 'segue.tracing.otlp' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)
