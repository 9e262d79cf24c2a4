"""Makes the flags of a command from the fields of an options class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, Optional, get_type_hints

import typer

from segue.options import Options, parse_sizes


def with_options(
    options_class: type[Options], *, without: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's ``config`` parameter by one flag per option of ``options_class``.

    Typer makes flags of a function's signature, so the returned decorator gives the command a new one. The
    flags that the user sets become the ``config`` that the command gets. ``without`` is a group of options
    that the command does not take; None: it takes all.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with the flags as parameters, which calls ``command`` with its ``config``."""
        hints = get_type_hints(options_class)
        flags = [
            flag
            for option in fields(options_class)
            if option.metadata["group"] != without
            for flag in _flags(option, hints[option.name])
        ]

        def run(**given: Any) -> Any:
            chosen = {flag.name: value for flag in flags if (value := given.pop(flag.name)) is not None}
            return command(config=options_class.create(**chosen), **given)

        own = inspect.signature(command, eval_str=True).parameters
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in [*own.values(), *flags]
            if parameter.name != "config"
        ]
        # What Typer reads of a command: name, docstring and parameters.
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def join_sizes(options_class: type[Options], words: Sequence[str]) -> list[str]:
    """Return a command line in which the numbers behind a flag of sizes are one word.

    SGLang takes ``--sizes 1 2 4``, and Typer gives a flag one word: it becomes ``--sizes 1,2,4``.
    """
    names = {
        _spelling(option.name) for option in fields(options_class) if option.metadata["check"] is parse_sizes
    }
    joined: list[str] = []
    is_sizes = False  # whether the last joined word has the sizes of such a flag
    for word in words:
        if is_sizes and word.isdecimal():
            joined[-1] += f",{word}"
            continue
        is_sizes = bool(joined) and joined[-1] in names and word.isdecimal()
        joined.append(word)
    return joined


def _flags(option: Field[Any], kind: Any) -> Iterator[inspect.Parameter]:
    """Yield the flag of an option, and that of its alias if it has one."""
    text, group = option.metadata["help"], option.metadata["group"]
    if option.default not in (None, False) and not callable(option.default_factory):
        text += f" [dim]\\[{option.default}][/dim]"
    yield _flag(option.name, kind, text, group)
    if (alias := option.metadata["alias"]) is not None:
        same = "; ".join(f"'{other}': '{value}'" for other, value in alias.values.items() if other != value)
        text = f"Another name of {_spelling(option.name)}" + (f"; {same}." if same else ".")
        yield _flag(alias.name, Literal[tuple(alias.values)], text, group)


def _flag(name: str, kind: Any, text: str, group: str) -> inspect.Parameter:
    """Return a flag; its default is None, so that the environment can set the option."""
    info = typer.Option(
        _spelling(name),
        help=f"{text} [dim]SEGUE_{name.upper()}[/dim]",
        rich_help_panel=group,
        show_default=False,
    )
    annotation = Annotated[Optional[kind], info]  # noqa: UP045, `kind` is a value
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _spelling(name: str) -> str:
    """Return an option's name as a flag."""
    return f"--{name.replace('_', '-')}"
