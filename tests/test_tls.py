"""A certificate that a server cannot use is an error at its start, and names what is wrong with it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from segue.cluster.config import ClusterConfig
from segue.cluster.lifecycle import run_cluster
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.listener import bind
from segue.router.config import RouterConfig
from segue.router.lifecycle import route
from segue.server import lifecycle
from segue.tls import scheme_of, server_context
from tests.support.certificates import make_certificate, openssl, tls_options

PASSWORD = "open sesame"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two certificates, their keys, one of these encrypted, and a file that is neither."""
    folder = tmp_path_factory.mktemp("tls")
    one, _ = make_certificate(folder / "one.pem"), make_certificate(folder / "two.pem")
    key, locked = str(one.with_suffix(".key")), str(folder / "locked.key")
    openssl("pkey", "-in", key, "-aes256", "-passout", f"pass:{PASSWORD}", "-out", locked)
    (folder / "both.pem").write_text(one.read_text() + one.with_suffix(".key").read_text())
    (folder / "text.pem").write_text("hello")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "password", "param", "words"),
    [
        ("one.pem", None, None, "ssl_keyfile", "ssl_certfile is given without ssl_keyfile"),
        (None, "one.key", None, "ssl_certfile", "ssl_keyfile is given without ssl_certfile"),
        (None, None, PASSWORD, "ssl_keyfile_password", "without ssl_keyfile, whose password it is"),
        ("none.pem", "one.key", None, "ssl_certfile", "none.pem': the file cannot be read (No such file"),
        ("one.pem", "none.key", None, "ssl_keyfile", "none.key': the file cannot be read (No such file"),
        ("text.pem", "one.key", None, "ssl_certfile", "has no certificate in PEM form"),
        ("one.pem", "one.pem", None, "ssl_keyfile", "has no private key in PEM form"),
        ("one.pem", "two.key", None, "ssl_keyfile", "the key does not belong to the certificate of"),
        ("one.pem", "locked.key", None, "ssl_keyfile_password", "the key is encrypted; give its password"),
        ("one.pem", "locked.key", "no", "ssl_keyfile_password", "the password does not open the key of"),
    ],
)
def test_what_cannot_be_used_is_named(
    files: Path, certificate: str | None, key: str | None, password: str | None, param: str, words: str
) -> None:
    paths = {"ssl_certfile": certificate, "ssl_keyfile": key}
    given = {name: None if path is None else str(files / path) for name, path in paths.items()}
    with pytest.raises(ConfigError) as raised:
        server_context(EngineConfig(**given, ssl_keyfile_password=password))
    assert words in raised.value.message and raised.value.param == param
    assert password is None or password == "no" or password not in raised.value.message


def test_a_key_may_be_encrypted_or_in_the_file_of_the_certificate(files: Path) -> None:
    options = tls_options(files / "one.pem")
    locked = options | {"ssl_keyfile": str(files / "locked.key"), "ssl_keyfile_password": PASSWORD}
    both = dict.fromkeys(options, str(files / "both.pem"))
    for each in (options, locked, both):
        config = RouterConfig(**each)
        assert server_context(config) is not None and scheme_of(config) == "https"


def test_without_files_a_server_speaks_plain_http() -> None:
    assert server_context(EngineConfig()) is None and scheme_of(EngineConfig()) == "http"


@pytest.mark.parametrize("command", ["serve", "router", "router of two processes", "cluster"])
def test_every_command_says_so_before_it_starts_anything(command: str) -> None:
    given = {"ssl_certfile": "/no/such.pem", "ssl_keyfile": "/no/such.key"}

    async def start() -> None:
        with closing(bind("127.0.0.1", 0)) as listener:
            if command == "serve":
                config = EngineConfig(model="/no/such/model", **given)
                await lifecycle.serve(config, listener, lambda *_: None)
            elif command == "cluster":
                await run_cluster(ClusterConfig.create({}, workers=1, port=0, **given), lambda *_: None)
            else:
                processes = 2 if "two" in command else 1
                await route(RouterConfig(processes=processes, **given), listener, lambda _: None)

    with pytest.raises(ConfigError, match=r"ssl_certfile='/no/such.pem': the file cannot be read"):
        asyncio.run(start())
