"""The options name the backends and their places, and each mistake is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from segue.discovery.file import FileDiscovery
from segue.discovery.opening import open_discovery, parse_backends, parse_targets
from segue.discovery.several import SeveralBackends
from segue.errors import ConfigError


def test_backends_are_named_in_order() -> None:
    assert parse_backends("none", "discovery") == []
    assert parse_backends("file", "discovery") == ["file"]
    assert parse_backends("etcd, file", "discovery") == ["etcd", "file"]


@pytest.mark.parametrize("text", ["", "files", "none,file", "file,file", "file,"])
def test_a_backend_that_does_not_exist_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="expected none, or some of file, etcd, kubernetes, each once"):
        parse_backends(text, "discovery")


def test_each_backend_has_its_place() -> None:
    there = Path("/run/segue")
    url = "http://127.0.0.1:2379"
    assert parse_targets(["file"], None, there) == ["/run/segue"]
    assert parse_targets(["file", "etcd"], f",{url}", there) == ["/run/segue", url]
    assert parse_targets(["etcd", "file"], f"{url},/tmp/x", there) == [url, "/tmp/x"]
    assert parse_targets(["kubernetes"], None, None) == [""]


@pytest.mark.parametrize(
    ("names", "text", "rule"),
    [
        (["file"], None, "name the directory of the files"),
        (["etcd"], None, "name the URL of the etcd server"),
        (["etcd"], "localhost:2379", "expected a server's URL"),
        (["file", "etcd"], "/tmp/x", "expected one per backend of discovery=file,etcd, in this order"),
    ],
)
def test_a_place_that_is_missing_or_wrong_is_named(names: list[str], text: str | None, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_targets(names, text, None)  # type: ignore[arg-type]


def test_the_backends_are_opened(tmp_path: Path) -> None:
    async def run() -> None:
        assert isinstance(open_discovery("none", None), SeveralBackends)
        assert isinstance(open_discovery("file", None, directory=tmp_path / "a"), FileDiscovery)
        assert (tmp_path / "a" / "discovery").is_dir()

    asyncio.run(run())
