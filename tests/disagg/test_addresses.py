"""The addresses of connections: their forms, and listening on them."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest

from segue.disagg.addresses import address_of, close_listener, is_local, listen, parse, resolve
from segue.errors import ConfigError, KVLinkLostError


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("gpu-1.lan:8998", ("gpu-1.lan", 8998)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("unix:/run/p.sock", "/run/p.sock"),
    ],
)
def test_an_address_is_parsed(address: str, parsed: object) -> None:
    assert parse(address) == parsed


@pytest.mark.parametrize(
    "address",
    ["", "host", ":80", "host:", "host:-1", "host:65536", "host:8a", "::1:80", "[host]:80", "[]:80", "a:b:1"],
)
def test_a_malformed_address_is_named_with_the_possible_forms(address: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"{address!r} must be HOST:PORT, [IPv6]:PORT or unix:PATH")
    ):
        parse(address)


@pytest.mark.parametrize("path", ["", "x" * 108, "a\0b"])
def test_a_path_that_the_kernel_would_not_take_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="a unix path must have 1 to 107 bytes"):
        parse(f"unix:{path}")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_port_0_becomes_the_one_that_was_picked(host: str) -> None:
    with listen(f"{host}:0") as sock:
        address = address_of(sock)
        assert parse(address) == sock.getsockname()[:2]
        assert parse(address)[1] != 0


def test_a_port_in_use_is_named_with_its_option() -> None:
    with (
        listen("127.0.0.1:0") as sock,
        pytest.raises(ConfigError, match=r"in use.*--disaggregation-bootstrap-port"),
    ):
        listen(address_of(sock))


def test_a_unix_socket_is_for_its_user_only_and_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    sock = listen(f"unix:{path}")
    assert address_of(sock) == f"unix:{path}"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    close_listener(sock)
    assert not path.exists()


def test_a_unix_socket_in_use_is_named(tmp_path: Path) -> None:
    with (
        listen(f"unix:{tmp_path}/p.sock"),
        pytest.raises(ConfigError, match=r"p\.sock: Address already in use; "),
    ):
        listen(f"unix:{tmp_path}/p.sock")


def test_a_unix_socket_that_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    listen(f"unix:{tmp_path}/p.sock").close()
    close_listener(listen(f"unix:{tmp_path}/p.sock"))


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="notes"):
        listen(f"unix:{tmp_path}/notes")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_host_name_is_resolved_only_on_request() -> None:
    assert resolve("localhost:80", numeric=True) == []
    assert (socket.AF_INET, ("127.0.0.1", 80)) in resolve("localhost:80")
    assert resolve("[::1]:80", numeric=True) == [(socket.AF_INET6, ("::1", 80, 0, 0))]


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(KVLinkLostError, match=r"host 'no\.\.name' of no\.\.name:80 is not known"):
        resolve("no..name:80")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_loopback_is_local(host: str) -> None:
    with listen(f"{host}:0") as listener, socket.create_connection(listener.getsockname()[:2]) as sock:
        assert is_local(sock)


def test_another_address_of_this_machine_is_not_local() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing, but finds the address of the interface
        except OSError:
            pytest.skip("there is no interface but loopback")
        host = probe.getsockname()[0]
    with listen(f"{host}:0") as listener, socket.create_connection(listener.getsockname()) as sock:
        assert not is_local(sock)
