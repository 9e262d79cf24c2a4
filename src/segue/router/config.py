"""Every option of ``segue router``, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

from segue.config import LogLevel
from segue.discovery.opening import parse_backends, parse_targets
from segue.errors import ConfigError
from segue.logs import LogFormat
from segue.messages.fleet import Role
from segue.options import (
    Options,
    check_key,
    check_root_path,
    option,
    parse_list,
    parse_places,
    parse_urls,
    spelling,
)
from segue.router.choice import RoutingPolicy, RoutingRules
from segue.router.upstream import tls_context
from segue.tracing.endpoint import parse_endpoint

MOST_PROCESSES = 64
PartPolicy = Literal["as --policy", "cost", "power_of_two", "round_robin"]  # that, or a `RoutingPolicy`

_workers = partial(option, group="Workers")
_routing = partial(option, group="Routing")
_server = partial(option, group="Server")


def _check_certificates(path: str, name: str) -> None:
    """Raise ConfigError unless a file has certificates."""
    try:
        tls_context(path)
    except OSError as error:
        why = f"no certificates can be read from there ({error.strerror or error})"
        text = f"{name}={path!r}: {why}; give a file of certificates in PEM form"
        raise ConfigError(text, param=name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(Options):
    """The options of one router."""

    worker: str | None = _workers(
        None,
        "URLs of engines, whichever --role they have; POST /workers adds further ones.",
        check=parse_urls,
    )
    prefill: str | None = _workers(None, "URLs of engines that must have --role prefill.", check=parse_urls)
    decode: str | None = _workers(None, "URLs of engines that must have --role decode.", check=parse_urls)
    discovery: str = _workers(
        "none",
        "Where engines are found that have put their records there, besides those that are named: some of "
        "'file', 'etcd' and 'kubernetes', separated by commas; 'none': nowhere.",
        check=parse_backends,
    )
    discovery_target: str | None = _workers(
        None,
        "Where each backend of --discovery is, in its order and separated by commas: for 'file' the engines' "
        "--failover-dir, for 'etcd' a URL, for 'kubernetes' a namespace, by default the router's own.",
        check=parse_places,
    )
    worker_api_key: str | None = _workers(
        None,
        "API key of the engines. Clients' own keys are never sent to them. A cluster makes one at each "
        "start; set it if a trainer has to send weights to the engines directly.",
        check=check_key,
    )
    worker_admin_key: str | None = _workers(
        None,
        "Admin key of the engines, for /watch, control routes and legs; default: --worker-api-key.",
        check=check_key,
    )
    worker_ca: str | None = _workers(
        None,
        "File of the certificates to trust at engines with https:// URLs; default: the system's.",
        check=_check_certificates,
    )
    control_timeout_s: float = _workers(
        300.0,
        "Seconds in which every engine must answer an operation that goes to all of them, such as a pause.",
        minimum=0.1,
    )

    policy: RoutingPolicy = _routing(
        "cost",
        "'cost': the engine with the fewest predicted seconds; 'power_of_two': the better of two drawn ones; "
        "'round_robin': one after the other.",
    )
    prefill_policy: PartPolicy = _routing(
        "as --policy", "The policy for engines that compute prompts, in place of --policy."
    )
    decode_policy: PartPolicy = _routing("as --policy", "The policy for engines with --role decode.")
    local_prefill_tokens: int = _routing(
        256,
        "Most prompt tokens that an engine with --role decode computes itself, if it has the KV of the rest.",
        minimum=0,
    )
    resume_timeout_s: float = _routing(
        60.0,
        "Seconds that a request waits for another engine, if its own was lost, or if it comes while one "
        "engine takes another one's place.",
        minimum=0.0,
        maximum=86400.0,
    )
    enable_laps_alloc: bool = _routing(
        False,
        "Prefer one group of engines for short prompts and one for long ones; needs two engines that compute "
        "prompts.",
    )
    laps_alloc_threshold: int = _routing(256, "LAPS: tokens of the longest short prompt.", minimum=1)
    laps_overflow_ms: float = _routing(
        50.0,
        "LAPS: milliseconds by which the other group must be faster to get a prompt.",
        minimum=0.0,
    )
    laps_rebalance_interval_s: float = _routing(
        5.0, "LAPS: least seconds between two moves of an engine to the other group.", minimum=0.1
    )
    laps_rebalance_ratio: float = _routing(
        2.0, "LAPS: ratio of the groups' waiting work above which an engine moves.", minimum=1.0
    )

    host: str = _server("127.0.0.1", "Host name or address to listen on.")
    port: int = _server(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    ssl_certfile: str | None = _server(
        None, "File of the server's certificate and of those that vouch for it, in PEM form: it speaks HTTPS."
    )
    ssl_keyfile: str | None = _server(None, "File of the certificate's private key, in PEM form.")
    ssl_keyfile_password: str | None = _server(None, "Password of --ssl-keyfile, if the key is encrypted.")
    root_path: str | None = _server(
        None,
        "Path, like /segue, that a proxy in front of this server puts before its routes and removes again; "
        "requests that still have it are served too.",
        check=check_root_path,
    )
    processes: int = _server(
        1,
        "Processes that share the clients' connections, so that the router uses several cores; if there are "
        "several, one more coordinates them.",
        minimum=1,
        maximum=MOST_PROCESSES,
    )
    api_key: str | None = _server(
        None, "Key that clients must send as a bearer token; default: no key is needed.", check=check_key
    )
    admin_api_key: str | None = _server(
        None,
        "Key that /workers, /laps_status, control and weight routes need; default: --api-key.",
        check=check_key,
    )
    open_metrics: bool = _server(False, "Answer /metrics without a key, like the health routes.")
    otlp_traces_endpoint: str | None = _server(
        None,
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, like http://collector:4318: it gets "
        "spans of requests. Default: there are none.",
        check=parse_endpoint,
    )
    allowed_hosts: str | None = _server(
        None,
        "Host names that requests to this router may use, besides localhost and --host, separated by commas; "
        "'*': any. Default: none on a loopback address, else any.",
        check=parse_list,
    )
    cors_origin: str | None = _server(
        None,
        "Origins of web pages that may use this router, separated by commas; '*': any; default: none.",
        check=parse_list,
    )
    disable_webpage: bool = _server(False, "Serve no web page at / (charts, a log of events, a chat).")
    max_body_mib: int = _server(16, "Largest request body, in MiB.", minimum=1)
    drain_s: float = _server(
        30.0,
        "Seconds that running requests have to end after SIGTERM; 0: they end at once.",
        minimum=0.0,
        maximum=86400.0,
    )
    log_level: LogLevel = _server("info", "Lowest level of messages that are logged.")
    log_format: LogFormat = _server(
        "text", "How lines of the log look: 'text', or 'json': one object per line."
    )

    def __post_init__(self) -> None:
        """Check the values, and that no engine is named twice.

        Raises:
            ConfigError: a value breaks its rule, two URLs have the same host and port, or a backend of
                ``--discovery`` has no place.
        """
        super(RouterConfig, self).__post_init__()  # a class with slots is made anew: plain super() fails
        parse_targets(parse_backends(self.discovery, "discovery"), self.discovery_target, None)
        seen: dict[str, str] = {}
        for url, role in self.urls:
            name = role or "worker"
            place = urlsplit(url).netloc
            if place in seen:
                text = f"is named already, by {spelling(seen[place])}; name each engine once"
                raise ConfigError(f"{name}={url!r}: {place} {text}", param=name)
            seen[place] = name

    @property
    def urls(self) -> list[tuple[str, Role | None]]:
        """The URLs of all engines, each with the role that it must have; None: any."""
        given: list[tuple[str, Role | None]] = [
            ("worker", None),
            ("prefill", "prefill"),
            ("decode", "decode"),
        ]
        values = [(name, role, getattr(self, name)) for name, role in given]
        return [(url, role) for name, role, text in values if text for url in parse_urls(text, name)]

    @property
    def rules(self) -> RoutingRules:
        """The options that a choice depends on."""
        return RoutingRules(
            prefill_policy=self.policy if self.prefill_policy == "as --policy" else self.prefill_policy,
            decode_policy=self.policy if self.decode_policy == "as --policy" else self.decode_policy,
            local_prefill_tokens=self.local_prefill_tokens,
            laps_threshold=self.laps_alloc_threshold,
            laps_overflow_s=self.laps_overflow_ms / 1e3,
        )
