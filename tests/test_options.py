"""A second class of options has the same machinery as the engine's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import pytest

from segue.errors import ConfigError
from segue.options import OptionAlias, Options, option, parse_sizes

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
