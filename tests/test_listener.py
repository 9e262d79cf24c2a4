"""The port of a server is taken early, and what keeps it from that is named."""

from __future__ import annotations

import re
import socket

import pytest

from segue.errors import ConfigError
from segue.listener import bind, listen, sibling, url_of


def test_the_error_for_a_port_in_use_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no..name", "x" * 70])
def test_the_error_for_an_address_of_another_machine_names_it(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(host)}.*--host"):
        bind(host, 0)


def test_a_port_that_was_taken_after_it_was_bound_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            listen(first)
            with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"):
                listen(second)


def test_port_0_picks_a_free_one() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_siblings_share_the_connections_to_a_port_and_nobody_else_takes_it() -> None:
    with bind("127.0.0.1", 0) as first, sibling(first) as one, sibling(first) as other:
        for each in (one, other):
            listen(each)
            each.settimeout(60)
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", port)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        for each in (one, other):  # that none of 40 comes to one of them happens once in 10^12 times
            each.accept()[0].close()
        other.close()  # its process has ended: from now on, all come to the other one
        clients += [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
        for client in clients:
            client.close()
