"""Options from a TOML file."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from segue.cli.flags import setting, with_options
from segue.cluster.config import ClusterConfig
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.gms.config import GmsConfig
from segue.options import (
    OptionAlias,
    Options,
    OptionSet,
    option,
    parse_list,
    parse_sizes,
    value_of_file,
    variable,
)
from segue.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Options):
    """One option of each kind."""

    size: int = option(1, "How large.", group="Place", minimum=1)
    share: float = option(0.5, "How much.", group="Place")
    is_far: bool = option(False, "Whether it is far.", group="Place")
    sizes: str | None = option(None, "Which sizes.", group="Place", check=parse_sizes)
    places: str | None = option(
        None, "Where.", group="Place", check=partial(parse_list, separator=os.pathsep)
    )
    part: Literal["all", "some"] = option(
        "all", "How much of it.", group="Hidden", alias=OptionAlias(name="old_part", values={"some": "some"})
    )


MyName = Annotated[str, setting("my_name", "A name.", group="Own")]


def called(text: str, *flags: str, path: Path, **environment: str) -> tuple[FileOptions, str]:
    """Returns what a command gets that has the options, and one of its own."""
    app, calls = typer.Typer(), []

    @app.command()
    @with_options(FileOptions, without=("Hidden",))
    def go(
        config: FileOptions, my_name: Annotated[str, setting("my_name", "A name.", group="Own")] = "x"
    ) -> None:
        calls.append((config, my_name))

    (path / "segue.toml").write_text(text)
    CliRunner().invoke(
        app,
        ["--config", str(path / "segue.toml"), *flags],
        env=environment,
        catch_exceptions=False,
        standalone_mode=False,
    )
    (call,) = calls
    return call


def test_flags_come_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    text = 'size = 2\nshare = 3\nis-far = true\nsizes = [1, 2]\nplaces = ["/a", "/b"]\n'
    text += 'my_name = "file"\npart = "some"'
    config, name = called(text, path=tmp_path)
    assert config == FileOptions(size=2, share=3, is_far=True, sizes="1,2", places="/a:/b", part="some")
    assert name == "file"
    config, name = called(text, path=tmp_path, SEGUE_SIZE="3", SEGUE_MY_NAME="variable", SEGUE_IS_FAR="0")
    assert (config.size, config.is_far, name) == (3, False, "variable")
    config, name = called(text, "--size", "4", "--my-name", "flag", path=tmp_path, SEGUE_SIZE="3")
    assert (config.size, name) == (4, "flag")
    assert called('old_part = "some"', path=tmp_path)[0].part == "some"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("siez = 1", r"segue\.toml: unknown option 'siez' \(did you mean 'size'"),
        ("my-nam = 1", "did you mean 'my_name'"),
        ("config = 1", "unknown option 'config'"),
        ('size = "2"', r"segue\.toml: size='2': expected int"),
        ("size = 0", r"segue\.toml: size=0: must be at least 1"),
        ("is_far = 1", "is_far=1: expected bool"),
        ("size = [1]", r"size=\[1\]: expected int"),
        ('sizes = ["x"]', "sizes='x'"),
        ("[place]\nsize = 1", r"\[place\] is a table"),
        ("size = ", "it is no TOML"),
        ('part = "none"', "part='none': choose one of"),
    ],
)
def test_a_wrong_file_is_named_with_the_fault(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        called(text, path=tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(with_options(FileOptions)(lambda config: None))
    for environment in ({"SEGUE_CONFIG": str(tmp_path / "none.toml")}, {"SEGUE_CONFIG": str(tmp_path)}):
        with pytest.raises(ConfigError, match="cannot be read"):
            CliRunner().invoke(app, [], env=environment, catch_exceptions=False)
    assert CliRunner().invoke(app, [], env={"SEGUE_CONFIG": ""}).exit_code == 0


def test_a_cluster_takes_its_options_from_a_file() -> None:
    file: dict[str, Any] = {"workers": 2, "policy": "round_robin", "port": 1234, "max_model_len": 64}
    config = ClusterConfig.create({"SEGUE_PORT": "99"}, file=file, max_model_len=32)
    assert (config.size.workers, config.router.policy) == (2, "round_robin")
    assert (config.router.port, config.engine.max_model_len) == (99, 32)
    with pytest.raises(ConfigError, match="unknown option 'x'"):
        ClusterConfig.create({}, file={"x": 1})


@pytest.mark.parametrize("options_class", [EngineConfig, RouterConfig, ClusterConfig, GmsConfig])
def test_every_option_that_is_a_list_may_be_an_array(options_class: type[OptionSet]) -> None:
    lists = [each for each, _ in options_class.listed() if "separated by" in each.metadata["help"]]
    assert lists and [each.name for each in lists if each.metadata["check"] is None] == []
    hosts = {each.name: (each, kind) for each, kind in options_class.listed()}.get("allowed_hosts")
    assert hosts is None or value_of_file(*hosts, ["gpu-1", "gpu-1.lan"]) == "gpu-1,gpu-1.lan"


@pytest.mark.parametrize("options_class", [EngineConfig, RouterConfig, GmsConfig])
def test_the_variable_of_every_option_of_a_server_sets_it(options_class: type[Options]) -> None:
    for each in fields(options_class):
        try:
            value = getattr(options_class.create({variable(each.name): "\n"}), each.name)
        except ConfigError as error:  # most options do not take this text
            assert variable(each.name) in error.message or each.name in error.message
        else:
            assert value == "\n", each.name
