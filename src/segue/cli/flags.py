"""Makes the flags of a command from the fields of an options class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import Field
from typing import Annotated, Any, Literal, Optional

import typer
from rich.markup import escape

from segue.cli.config_file import CONFIG_FLAG, config_file_flag
from segue.options import OptionSet, parse_names, parse_sizes, parse_urls, spelling, variable

# For each check of an option that is a list: whether a word of the command line is one of its entries.
_IS_ENTRY: dict[Callable[[str, str], object], Callable[[str], bool]] = {
    parse_sizes: str.isdecimal,
    parse_urls: lambda word: "://" in word,
    parse_names: lambda word: True,
}


def with_options(
    options_class: type[OptionSet], *, without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's ``config`` parameter by one flag per option of ``options_class``.

    Typer makes flags of a function's signature, so the returned decorator gives the command a new one. The
    flags that the user sets become the ``config`` that the command gets. ``without`` has the groups
    of options that the command does not take. Options come from the file of ``--config``, too.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with the flags as parameters, which calls ``command`` with its ``config``."""
        flags = [
            flag
            for option, kind in options_class.listed()
            if option.metadata["group"] not in without
            for flag in _flags(option, kind)
        ]

        from_file = inspect.Parameter(
            CONFIG_FLAG,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=config_file_flag(options_class),
        )

        def run(**given: Any) -> Any:
            chosen = {flag.name: value for flag in flags if (value := given.pop(flag.name, None)) is not None}
            file = given.pop(CONFIG_FLAG)
            return command(config=options_class.create(file=file, **chosen), **given)

        own = inspect.signature(command, eval_str=True).parameters
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in [*own.values(), from_file, *flags]
            if parameter.name != "config"
        ]
        # What Typer reads of a command: name, docstring and parameters.
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def with_named_flags(command: Callable[..., Any], words: Sequence[str]) -> Callable[..., Any]:
    """Return a command of :func:`with_options` with only those flags of its options that it is given.

    Typer makes a parser for each of a hundred flags, a fifth of what the start of a server costs. If a word
    looks like a flag that the command does not have, as ``--help`` does, it keeps all.
    """
    parameters = inspect.signature(command).parameters.values()
    flags = {"--config" if each.name == CONFIG_FLAG else spelling(each.name): each for each in parameters}
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    if not given <= flags.keys():
        return command

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        return command(**values)

    # A flag of the options has the default None; those of the command alone a file may set.
    kept = [
        each
        for flag, each in flags.items()
        if flag in given or each.name == CONFIG_FLAG or each.default is not None
    ]
    run.__annotations__ = {each.name: each.annotation for each in kept}
    run.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return run


def setting(name: str, help_: str, *, group: str, **rules: Any) -> Any:
    """Return an option that belongs to one command alone, as a flag and an environment variable.

    Args:
        name: the option's name, with underscores.
        help_: a sentence for ``--help``.
        group: the heading under which ``--help`` lists the option.
        rules: further arguments of ``typer.Option``.
    """
    text = f"{help_} [dim]{variable(name)}[/dim]"
    rules |= {"envvar": variable(name), "show_envvar": False, "rich_help_panel": group}
    return typer.Option(spelling(name), help=text, **rules)


def join_lists(words: Sequence[str], *options_classes: type[OptionSet]) -> list[str]:
    """Return a command line in which the entries behind a flag that takes a list are one word.

    Typer gives a flag one word. SGLang takes ``--sizes 1 2 4``, which becomes ``--sizes 1,2,4``. URLs may
    also come each with a flag of its own: ``--worker A --worker B`` becomes ``--worker A,B``. Names come so
    only, as the word behind a name may be something else.
    """
    checks = {
        spelling(option.name): option.metadata["check"]
        for options_class in options_classes
        for option, _ in options_class.listed()
        if option.metadata["check"] in _IS_ENTRY
    }
    joined: list[str] = []
    lists: dict[str, int] = {}  # flag -> where its list is in `joined`
    flag = ""  # the flag whose list the next word may be an entry of
    for word in words:
        check = checks.get(flag)
        if check is not None and _IS_ENTRY[check](word) and (check is not parse_names or joined[-1] == flag):
            if flag in lists and (check is not parse_sizes or joined[lists[flag] :] == joined[-1:]):
                joined[lists[flag]] += f",{word}"
                if joined[-1] == flag:
                    joined.pop()
                continue
            lists[flag] = len(joined)
        else:
            flag = word
        joined.append(word)
    return joined


def _flags(option: Field[Any], kind: Any) -> Iterator[inspect.Parameter]:
    """Yield the flag of an option, and that of its alias if it has one."""
    text, group = escape(option.metadata["help"]), option.metadata["group"]
    if option.default not in (None, False) and not callable(option.default_factory):
        text += f" [dim]\\[{option.default}][/dim]"
    yield _flag(option.name, kind, text, group)
    if (alias := option.metadata["alias"]) is not None:
        same = "; ".join(f"'{other}': '{value}'" for other, value in alias.values.items() if other != value)
        text = f"Another name of {spelling(option.name)}" + (f"; {same}." if same else ".")
        yield _flag(alias.name, Literal[tuple(alias.values)], text, group)


def _flag(name: str, kind: Any, text: str, group: str) -> inspect.Parameter:
    """Return a flag; its default is None, so that the environment can set the option."""
    info = typer.Option(
        spelling(name),
        help=f"{text} [dim]{variable(name)}[/dim]",
        rich_help_panel=group,
        show_default=False,
    )
    annotation = Annotated[Optional[kind], info]  # noqa: UP045, `kind` is a value
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
