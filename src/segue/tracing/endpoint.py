"""The address of a collector of spans, as ``--otlp-traces-endpoint`` has it."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from segue.errors import ConfigError
from segue.extras import OTEL

PATH = "/v1/traces"  # of OTLP over HTTP, where a URL names none


def parse_endpoint(url: str, name: str) -> str:
    """Return the URL that spans are sent to; one without a path gets that of OTLP.

    Raises:
        ConfigError: it is no URL of HTTP, or the optional packages are not installed.
    """
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is no number
        is_valid = False
    if not is_valid or parts.scheme not in ("http", "https") or parts.fragment or not url.isprintable():
        text = "expected the URL of a collector that takes OTLP over HTTP, like http://collector:4318"
        raise ConfigError(f"{name}={url!r}: {text}", param=name)
    if "@" in parts.netloc:  # it would be shown where options are
        text = "a name or a password in the URL is not allowed; send a key by OTEL_EXPORTER_OTLP_HEADERS"
        raise ConfigError(f"{name}: {text}", param=name)
    if not OTEL.is_installed:
        text = "it needs the packages of OpenTelemetry, which are not installed; install them with"
        raise ConfigError(f"{name}={url!r}: {text}: {OTEL.remedy}", param=name)
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else url
