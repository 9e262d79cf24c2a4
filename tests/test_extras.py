"""The optional packages, their commands, and the extras of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from segue import extras
from segue.extras import EXTRAS, Extra

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]


def test_the_extras_are_those_that_pip_installs() -> None:
    declared = PROJECT["optional-dependencies"]
    assert set(declared) == {*EXTRAS, "all", "dev", "docs"}
    (everything,) = declared["all"]
    found = re.fullmatch(r"segue\[(.*)\]", everything)
    assert found is not None and sorted(found[1].split(",")) == sorted(EXTRAS)


@pytest.mark.parametrize(("has_pip", "command"), [(True, "pip install"), (False, "uv pip install")])
def test_the_command_is_one_that_the_environment_has(
    has_pip: bool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object() if has_pip and name == "pip" else None)
    assert EXTRAS["nixl"].remedy == f"{command} 'segue[nixl]'"


def test_any_of_its_modules_will_do() -> None:
    assert Extra(name="x", modules=("no_such_module", "json"), purpose="").is_installed
    assert not Extra(name="x", modules=("no_such_module",), purpose="").is_installed
