"""``--config FILE``: options from a TOML file, by their names."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

import typer

from segue.cli.sampling import nearest
from segue.errors import ConfigError
from segue.options import CONFIG_FILE, OptionSet, value_of_file

CONFIG_FLAG = "config_file"  # the name of the parameter
GROUP = "Options"


def config_file_flag(options_class: type[OptionSet]) -> Any:
    """Return the type of a parameter that takes a file, and becomes the options of the class in it."""

    def take(context: typer.Context, value: str | None) -> Any:
        """Return the options; what belongs to the command alone becomes the default of its own flag."""
        if not value or context.resilient_parsing:
            return {}
        own = {
            flag.removeprefix("--").replace("-", "_"): parameter.name
            for parameter in context.command.params
            for flag in parameter.opts
            if parameter.name not in (None, CONFIG_FLAG) and flag.startswith("--") and parameter.envvar
        }
        options, defaults = read_config_file(value, options_class, own)
        context.default_map = {own[name]: each for name, each in defaults.items()}
        return options

    return Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file of options, each as NAME = VALUE; flags and variables come before it. "
            f"[dim]{CONFIG_FILE}[/dim]",
            envvar=CONFIG_FILE,
            show_envvar=False,
            is_eager=True,
            callback=take,
            rich_help_panel=GROUP,
        ),
    ]


def read_config_file(
    path: str, options_class: type[OptionSet], own: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the class in a file, and the values of the names in ``own``.

    A name may have hyphens, as its flag has. Options that the class has and the command does not take are
    allowed, so that commands can share a file.

    Raises:
        ConfigError: the file cannot be read or is no TOML, a name is unknown, or a value breaks its rule.
    """
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"config={path!r}: it cannot be read ({error.strerror}); give a TOML file", param="config"
        ) from None
    except ValueError as error:  # also for bytes that are not UTF-8
        raise ConfigError(f"config={path!r}: it is no TOML: {error}; correct it", param="config") from None
    known = {each.name: (each, kind) for each, kind in options_class.listed()}
    aliases = {alias.name for each, _ in known.values() if (alias := each.metadata["alias"]) is not None}
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for spelled, value in content.items():
        name = spelled.replace("-", "_")
        if isinstance(value, dict):
            raise ConfigError(
                f"{path}: [{spelled}] is a table, and there are none; write every option as NAME = VALUE",
                param=name,
            )
        if name in own:
            defaults[name] = value
        elif name in known:
            try:
                options[name] = value_of_file(*known[name], value)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error.message}", param=name) from None
        elif name in aliases:
            options[name] = value
        else:
            near = nearest(name, [*known, *aliases, *own])
            remedy = "the help of the command lists all (--help)"
            raise ConfigError(f"{path}: unknown option {spelled!r}{near}; {remedy}", param=name)
    return options, defaults
