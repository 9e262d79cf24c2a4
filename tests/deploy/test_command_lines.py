"""Every command line of the manifests is one that Segue takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer._click.exceptions import UsageError

from segue.cli.config_file import CONFIG_FLAG
from segue.cli.main import app
from segue.config import EngineConfig
from segue.router.config import RouterConfig
from tests.deploy import test_kinds as kinds
from tests.deploy.test_manifests import containers


def commands() -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Every command line of Segue in the manifests and the Dockerfile, with its environment."""
    for name, container in containers().items():
        environ = {each["name"]: each.get("value", "a-key") for each in container.get("env", ())}
        yield name, container["args"], environ
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            command = container.get(kind, {}).get("exec", {}).get("command")
            if command is not None:
                assert command[0] == "segue"
                yield f"{name}, {kind}", command[1:], environ
    for name, container in kinds.containers():
        yield name, *kinds.arguments(container)


@pytest.mark.parametrize(("where", "words", "environ"), list(commands()), ids=lambda each: str(each)[:20])
def test_each_command_line_is_one_of_segue(where: str, words: list[str], environ: dict[str, str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("segue", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]  # as Click itself goes on
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    options = {"serve": EngineConfig, "router": RouterConfig}.get(words[0])
    if options is not None:
        given = {
            name: value for name, value in context.params.items() if value is not None and name != CONFIG_FLAG
        }
        given.pop("shadows", None)
        options.create(environ, **given)


def test_a_wrong_option_would_be_found() -> None:
    command: Any = typer.main.get_command(app)
    with pytest.raises(UsageError, match="--shadow-mod"):
        command.commands["serve"].make_context("serve", ["--shadow-mod"])
