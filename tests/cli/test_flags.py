"""The flags of a command follow from its class of options."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import typer
from typer.testing import CliRunner

from segue.cli.flags import join_lists, with_named_flags, with_options
from segue.cli.serving import serve
from segue.config import EngineConfig
from segue.options import OptionAlias, Options, option
from segue.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketOptions(Options):
    """An option whose help has brackets, which Rich would take for markup."""

    size: int = option(1, "pip install 'x[y]'.", group="Place")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions(Options):
    """Two options in two groups."""

    far_away: bool = option(False, "Whether it is far.", group="Place")
    size: int | None = option(None, "How large.", group="Hidden", minimum=1)


@pytest.mark.parametrize(
    ("without", "flags", "expected"),
    [
        ((), ["--far-away", "--size", "3"], (True, 3, "x")),
        (("Hidden",), ["--name", "y"], (False, 7, "y")),
        (("Hidden",), ["--size", "3"], None),
    ],
)
def test_a_command_takes_the_options_of_its_class(
    without: tuple[str, ...], flags: list[str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGUE_SIZE", "7")
    app, calls = typer.Typer(), []

    @app.command()
    @with_options(PlaceOptions, without=without)
    def go(config: PlaceOptions, name: Annotated[str, typer.Option()] = "x") -> None:
        calls.append((config.far_away, config.size, name))

    code = CliRunner().invoke(app, flags).exit_code
    assert calls == ([] if expected is None else [expected]) and code == (2 if expected is None else 0)
    few = typer.Typer()
    few.command()(with_named_flags(go, flags))
    assert CliRunner().invoke(few, flags).exit_code == code and len(calls) in (0, 2) and len(set(calls)) < 2
    assert ("SEGUE_SIZE" in CliRunner().invoke(app, ["--help"]).output) == (not without)


def test_brackets_in_the_help_of_an_option_are_shown() -> None:
    app = typer.Typer()

    @app.command()
    @with_options(BracketOptions)
    def go(config: BracketOptions) -> None:
        """Do nothing."""

    assert "'x[y]'. [1]" in CliRunner().invoke(app, ["--help"], terminal_width=200).output


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        ("serve", "serve"),
        (
            "serve --batch-prefill-batch-sizes 1 2 4 --port 3",
            "serve --batch-prefill-batch-sizes 1,2,4 --port 3",
        ),
        ("serve --batch-prefill-seq-lengths 16,32 64", "serve --batch-prefill-seq-lengths 16,32 64"),
        ("generate --max-tokens 5 6", "generate --max-tokens 5 6"),
        ("serve --precompile-bs-paddings=1 2", "serve --precompile-bs-paddings=1 2"),
    ],
)
def test_sizes_may_be_several_words(given: str, joined: str) -> None:
    assert join_lists(given.split(), EngineConfig) == joined.split()


@pytest.mark.parametrize(
    "given",
    [
        "router --worker http://a:1 http://b:2 --port 0",
        "router --worker http://a:1 --worker http://b:2 --port 0",
        "router --worker http://a:1,http://b:2 --port 0",
    ],
)
def test_urls_may_be_several_words_and_come_with_several_flags(given: str) -> None:
    joined = ["router", "--worker", "http://a:1,http://b:2", "--port", "0"]
    assert join_lists(given.split(), EngineConfig, RouterConfig) == joined


def test_names_come_with_several_flags_and_the_word_behind_one_stays() -> None:
    given = "generate --served-model-name a Hello --served-model-name b,c --port 1"
    joined = "generate --served-model-name a,b,c Hello --port 1"
    assert join_lists(given.split(), EngineConfig) == joined.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions(Options):
    """An option with another name."""

    part: Literal["all", "some"] = option(
        "all",
        "How much.",
        group="Place",
        alias=OptionAlias(name="old_part", values={"none": "all", "some": "some"}),
    )


def test_an_alias_is_a_flag_too() -> None:
    app, calls = typer.Typer(), []

    @app.command()
    @with_options(RoleOptions)
    def go(config: RoleOptions) -> None:
        calls.append(config.part)

    for flags in (["--old-part", "some"], ["--part", "some"], ["--old-part", "none"], []):
        assert CliRunner().invoke(app, flags).exit_code == 0
    assert calls == ["some", "some", "all", "all"]
    assert CliRunner().invoke(app, ["--old-part", "all"]).exit_code == 2
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.replace("│", " ").split())
    assert "Another name of --part; 'none': 'all'." in shown and "SEGUE_OLD_PART" in shown


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], {"shadows", "config_file"}),
        (["--tp", "2", "--model=m"], {"shadows", "config_file", "tp", "model"}),
        (["--config", "f.toml", "--shadows", "1"], {"shadows", "config_file"}),
    ],
)
def test_a_server_gets_a_parser_for_the_flags_that_are_given(words: list[str], kept: set[str]) -> None:
    assert inspect.signature(with_named_flags(serve, words)).parameters.keys() == kept


@pytest.mark.parametrize("word", ["--help", "-h", "--mdel=m", "--config-file", "-1"])
def test_a_word_that_may_be_another_flag_needs_the_parsers_of_all(word: str) -> None:
    assert with_named_flags(serve, ["--tp", "2", word]) is serve
