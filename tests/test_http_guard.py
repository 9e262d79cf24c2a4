"""Tests of the checks of host, origin and type, without a server. The routes' tests use real sockets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from segue.errors import ConfigError, ForbiddenError, MediaTypeError, SegueError
from segue.http_guard import HttpGuard, check_type


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except SegueError:
        return False
    return True


def host_passes(guard: HttpGuard, host: str) -> bool:
    return passes(lambda: guard.check_host({b"host": host.encode("latin-1")}))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:30000",
        "LocalHost:30000",
        "localhost.",
        "segue.localhost:1",
        "127.0.0.1",
        "127.1.2.3:30000",
        "[::1]",
        "[::1]:30000",
    ],
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "127.0.0.9"])
def test_a_server_on_loopback_answers_for_this_machine(bound: str, host: str) -> None:
    assert host_passes(HttpGuard(bound), host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:30000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evillocalhost",
        "10.0.0.1",
        "0.0.0.0:30000",
        "[::2]",
        "[::1",
        "::1",
        "localhost:30000@evil.example",
        "localhost:x",
        "localhost evil.example",
        "",
        "ä.example",
    ],
)
def test_a_server_on_loopback_answers_for_no_other_host(host: str) -> None:
    guard = HttpGuard("127.0.0.1")
    assert not host_passes(guard, host)
    assert passes(lambda: guard.check_host({}))  # HTTP/1.0; a browser always sends one


def test_other_hosts_can_be_named() -> None:
    guard = HttpGuard("127.0.0.1", allowed_hosts=" GPU-1.lan , [fe80::1]")
    for host in ("gpu-1.lan:30000", "GPU-1.LAN", "[fe80::1]:1", "localhost"):
        assert host_passes(guard, host)
    assert not host_passes(guard, "gpu-2.lan")
    assert host_passes(HttpGuard("127.0.0.1", allowed_hosts="*"), "evil.example")


def test_a_server_on_the_network_checks_hosts_where_names_are_given() -> None:
    assert host_passes(HttpGuard("0.0.0.0"), "anything.example")
    guard = HttpGuard("0.0.0.0", allowed_hosts="api.example")
    assert host_passes(guard, "api.example") and host_passes(guard, "127.0.0.1")
    assert not host_passes(guard, "evil.example")


def test_a_refused_host_is_named_with_the_remedy() -> None:
    with pytest.raises(ForbiddenError, match=r"'evil\.example'.*--allowed-hosts"):
        HttpGuard("127.0.0.1").check_host({b"host": b"evil.example"})
    with pytest.raises(ForbiddenError) as refused:
        HttpGuard("127.0.0.1").check_host({b"host": b"x" * 60_000})
    assert len(refused.value.message) < 400


def origin_passes(guard: HttpGuard, origin: str | None, site: str | None) -> bool:
    headers = {b"host": b"localhost:30000"}
    headers |= {} if origin is None else {b"origin": origin.encode()}
    headers |= {} if site is None else {b"sec-fetch-site": site.encode()}
    return passes(lambda: guard.check_origin(headers, "http"))


OWN = "http://localhost:30000"


@pytest.mark.parametrize(
    ("origin", "site", "expected"),
    [
        (None, None, True),
        (None, "none", True),
        (None, "same-origin", True),
        (OWN, None, True),
        (OWN, "same-origin", True),
        (None, "same-site", False),
        (None, "cross-site", False),
        (None, "", False),
        (None, "Same-Origin", False),
        (OWN, "cross-site", False),
        ("null", None, False),
        ("null", "same-origin", False),
        ("", None, False),
        ("http://localhost", None, False),
        ("http://localhost:3000", None, False),
        ("https://localhost:30000", None, False),
        ("http://evil.example", "none", False),
        (f"{OWN}.evil.example", None, False),
    ],
)
def test_requests_of_pages_of_other_origins_are_refused(
    origin: str | None, site: str | None, expected: bool
) -> None:
    assert origin_passes(HttpGuard("127.0.0.1"), origin, site) is expected
    assert origin_passes(HttpGuard("127.0.0.1", cors_origin="*"), origin, site)


def test_origins_can_be_allowed() -> None:
    guard = HttpGuard("127.0.0.1", cors_origin="https://chat.example, app://notes")
    assert origin_passes(guard, "https://chat.example", "cross-site")
    assert origin_passes(guard, "app://notes", None)
    assert not origin_passes(guard, "https://chat.example:444", "cross-site")
    assert not origin_passes(guard, None, "cross-site")


def type_passes(kind: str | None, **more: str) -> bool:
    headers = {name.replace("_", "-").encode(): value.encode() for name, value in more.items()}
    headers |= {} if kind is None else {b"content-type": kind.encode()}
    return passes(lambda: check_type(headers))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (None, True),
        ("", True),
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("text/plain", False),
        ("text/plain; application/json", False),
        ("text/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=application/json", False),
        ("application/jsonp", False),
        ("application/octet-stream", False),
        ("application/json, text/plain", False),
    ],
)
def test_a_body_is_json_or_has_no_type(kind: str | None, expected: bool) -> None:
    assert type_passes(kind, content_length="2") is expected
    assert type_passes(kind, transfer_encoding="chunked") is expected


def test_an_empty_body_may_have_the_type_that_aiohttp_declares() -> None:
    assert type_passes("application/octet-stream") and type_passes(
        "application/octet-stream", content_length="0"
    )
    assert not type_passes("text/plain") and not type_passes("text/plain", content_length="0")


def test_a_refused_type_is_named_with_the_remedy() -> None:
    with pytest.raises(MediaTypeError, match=r"'text/plain'.*send 'Content-Type: application/json'"):
        check_type({b"content-type": b"text/plain"})


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_hosts": "a.lan:30000"},
        {"allowed_hosts": "http://a.lan"},
        {"allowed_hosts": "a.lan,,b.lan"},
        {"allowed_hosts": "*.lan"},
        {"cors_origin": "chat.example"},
        {"cors_origin": "https://chat.example/"},
        {"cors_origin": "null"},
        {"cors_origin": " "},
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ConfigError) as refused:
        HttpGuard("127.0.0.1", **options)
    assert refused.value.param == name and refused.value.message.startswith(f"{name}={value!r}: ")
