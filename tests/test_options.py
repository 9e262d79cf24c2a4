"""A second class of options has the same machinery as the engine's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import pytest

from segue.errors import ConfigError
from segue.gms.transport import HOLDER_SOCKET, SOCKET
from segue.options import (
    MAX_SOCKET_PATH,
    SOCKET_NAME,
    OptionAlias,
    Options,
    check_own_url,
    check_socket_directory,
    option,
    parse_sizes,
)

_door = partial(option, group="Door")


def refuse_doors(text: str, name: str) -> None:
    if "door" in text:
        raise ConfigError(f"{name}: no doors", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(Options):
    """The options of an imaginary router."""

    mode: Literal["near", "far"] = _door("near", "Which way.")
    tries: int | None = _door(None, "How often.", minimum=1)
    place: str = _door(lambda: "here", "Where.", check=refuse_doors)
    sizes: str = _door("1", "How large.", check=parse_sizes)


def test_another_class_has_its_own_options_and_variables() -> None:
    found = RouteOptions.create({"SEGUE_TRIES": "3", "SEGUE_PORT": "1"}, mode="far")
    assert found == RouteOptions(mode="far", tries=3, place="here", sizes="1")
    assert replace(found, sizes=[2, 3]).sizes == "2,3"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 1}, "unknown option 'port'; known: mode, place, sizes, tries"),
        ({"tries": 0}, "tries=0: must be at least 1"),
        ({"mode": "up"}, "mode='up': choose one of near, far"),
        ({"place": "indoors"}, "place: no doors"),
        ({"place": ["a"]}, "place=['a']: expected str"),
    ],
)
def test_a_wrong_option_of_another_class_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RouteOptions.create({}, **options)
    assert words == raised.value.message


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasOptions(Options):
    """An option with two names."""

    way: Literal["near", "far"] = option(
        "near",
        "Which.",
        group="Door",
        alias=OptionAlias(name="reach", values={"short": "near", "long": "far"}),
    )


def test_a_given_option_wins_over_the_environment_under_either_name() -> None:
    assert AliasOptions.create({"SEGUE_REACH": "long"}, way="near").way == "near"
    assert AliasOptions.create({"SEGUE_WAY": "far"}, reach="short").way == "near"
    assert AliasOptions.create({"SEGUE_REACH": "long"}).way == "far"


def test_names_in_the_environment_may_not_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="reach='long' contradicts way='near'"):
        AliasOptions.create({"SEGUE_REACH": "long", "SEGUE_WAY": "near"})


def test_an_alias_is_among_the_known_options() -> None:
    with pytest.raises(ConfigError, match="unknown option 'range'; known: reach, way"):
        AliasOptions.create({}, range=1)


def test_the_directory_of_a_socket_is_not_longer_than_the_kernel_allows() -> None:
    longest = "/tmp/".ljust(MAX_SOCKET_PATH - SOCKET_NAME, "x")
    check_socket_directory(longest, "gms_dir")
    assert max(len(f"/{name}") for name in (SOCKET, HOLDER_SOCKET)) == SOCKET_NAME
    with pytest.raises(ConfigError) as raised:
        check_socket_directory(longest + "x", "gms_dir")
    assert str(raised.value) == (
        f"gms_dir='{longest}x': the path has 98 bytes, and at most 97 are allowed (a unix socket's path may "
        "have 107, of which its name takes 10); choose a shorter one, as in /run or /tmp"
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://0.0.0.0:30000", "http://0.0.0.0:30000': this stands for all addresses of a machine"),
        ("http://[::]:30000", "this stands for all addresses of a machine"),
        ("http://" + "x" * 294, "it has 301 bytes, and at most 300 are allowed"),
        ("gpu-1:80", "expected a server's URL"),
    ],
)
def test_a_url_that_nobody_could_use_is_refused(url: str, words: str) -> None:
    check_own_url("http://" + "x" * 293, "register_url")
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_own_url(url, "register_url")
