"""Opens a process's tracer, if its options ask for one. Without one, nothing of OpenTelemetry is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from segue.tracing.endpoint import parse_endpoint

if TYPE_CHECKING:
    from segue.tracing.tracer import Tracer


def tracer_of(endpoint: str | None, service: str, instance: str) -> Tracer | None:
    """Return the tracer of ``--otlp-traces-endpoint``; None without it, or with ``OTEL_SDK_DISABLED``.

    ``service`` and ``instance`` name the process.

    Raises:
        ConfigError: the endpoint is not valid, or the packages are not installed.
    """
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url = parse_endpoint(endpoint, "otlp_traces_endpoint")
    from segue.tracing.otlp import open_tracer

    return open_tracer(url, service, instance)
