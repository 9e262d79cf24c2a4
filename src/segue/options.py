"""An option: its default, group, help text and rule. Flags and ``SEGUE_…`` variables follow from it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal, Protocol, Self, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from segue.errors import ConfigError

CONFIG_FILE = "SEGUE_CONFIG"  # the variable that names a file of options


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionAlias:
    """A second name of an option, under which its values have names of their own."""

    name: str
    values: Mapping[str, str]  # value under this name -> the option's


def option(
    default: Any,
    help_: str,
    *,
    group: str,
    minimum: float | None = None,
    maximum: float | None = None,
    check: Callable[[str, str], object] | None = None,
    alias: OptionAlias | None = None,
) -> Any:
    """Return the field of one option.

    Args:
        default: the value, or a function that returns it.
        help_: a sentence for ``--help``.
        group: the heading under which ``--help`` lists the option.
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        check: called with a text and the option's name; raises a ConfigError if the text breaks its rule.
        alias: another name, for users who know the option from another engine.
    """
    metadata = {"group": group, "help": help_, "min": minimum, "max": maximum, "check": check, "alias": alias}
    return field(**{"default_factory" if callable(default) else "default": default}, metadata=metadata)


class OptionSet(Protocol):
    """Options of a command: those of one class, or a choice from several."""

    @classmethod
    def listed(cls) -> Sequence[tuple[Field[Any], Any]]:
        """Return each option with its declared type."""

    @classmethod
    def create(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        file: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Build the options from those that were given, the environment, a file and the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The base of a frozen dataclass whose fields are made by :func:`option`; its values are checked."""

    def __post_init__(self) -> None:
        """Check every value, also those that a Python caller gave; raises ConfigError."""
        hints = get_type_hints(type(self))
        for each in fields(self):
            name, check, value = each.name, each.metadata["check"], getattr(self, each.name)
            # Python callers may pass lists.
            if check in (parse_sizes, parse_names) and isinstance(value, list | tuple):
                value = ",".join(map(str, value))
                object.__setattr__(self, name, value)
            _check(name, value, hints[name], each.metadata)
            if check is not None and value is not None:
                check(value, name)

    @classmethod
    def listed(cls) -> list[tuple[Field[Any], Any]]:
        """Return each option with its declared type."""
        hints = get_type_hints(cls)
        return [(each, hints[each.name]) for each in fields(cls)]

    @classmethod
    def create(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        file: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Build the options: explicit ones first, then ``SEGUE_…`` variables, a file's values, and defaults.

        Options may be given by their aliases. ``file`` has values as :func:`value_of_file` returns them.

        Raises:
            ConfigError: an option is unknown, its value breaks its rule, or its alias contradicts it.
        """
        given = os.environ if environ is None else environ
        aliases = {each.name: each.metadata["alias"] for each in fields(cls) if each.metadata["alias"]}
        kinds = get_type_hints(cls) | {alias.name: str for alias in aliases.values()}
        known = [*(each.name for each in fields(cls)), *(alias.name for alias in aliases.values())]
        for name in (*options, *(file or ())):
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}", param=name)
        found = {
            name: parse(given[variable(name)], kinds[name], variable(name))
            for name in known
            if variable(name) in given
        }
        sources = (file or {}, found, options)
        return cls(
            **{name: value for each in sources for name, value in _by_own_names(each, aliases).items()}
        )


def spelling(name: str) -> str:
    """Return an option's name as a flag."""
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    """Return the environment variable that sets an option."""
    return f"SEGUE_{name.upper()}"


def _by_own_names(options: Mapping[str, Any], aliases: Mapping[str, OptionAlias]) -> dict[str, Any]:
    """Return options with their own names; ``aliases`` has the other name of an option by its own one.

    Raises:
        ConfigError: an alias has another value than those it knows, or contradicts its option.
    """
    named = dict(options)
    for name, alias in aliases.items():
        if alias.name not in named:
            continue
        given = named.pop(alias.name)
        if given not in alias.values:
            raise ConfigError(
                f"{alias.name}={given!r}: choose one of {', '.join(alias.values)}", param=alias.name
            )
        if named.setdefault(name, alias.values[given]) != alias.values[given]:
            raise ConfigError(
                f"{alias.name}={given!r} contradicts {name}={named[name]!r}: both name the same option; "
                "give one of them",
                param=alias.name,
            )
    return named


def check_name(text: str, name: str) -> None:
    """Check an option that names something, such as a cohort: the name is also a part of file names and keys.

    Raises:
        ConfigError: it is none of those that DNS allows between two dots, as Kubernetes wants them.
    """
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", text):
        rule = "expected at most 63 of a-z, 0-9 and '-', with a letter or digit at both ends"
        raise ConfigError(f"{name}={text!r}: {rule}", param=name)


MAX_SOCKET_PATH = 107  # bytes, that the kernel allows for the path of a unix socket
SOCKET_NAME = (
    10  # of them, for the longest name of a socket in a directory that an option gives, and its slash
)
MAX_OWN_URL = 300  # bytes: a host name has at most 253


def check_socket_directory(path: str, name: str) -> None:
    """Raise ConfigError if a directory's path is too long for the sockets in it."""
    size, limit = len(os.fsencode(path)), MAX_SOCKET_PATH - SOCKET_NAME
    if size > limit:
        rule = f"the path has {size} bytes, and at most {limit} are allowed"
        reason = f"a unix socket's path may have {MAX_SOCKET_PATH}, of which its name takes {SOCKET_NAME}"
        remedy = "choose a shorter one, as in /run or /tmp"
        raise ConfigError(f"{name}={path!r}: {rule} ({reason}); {remedy}", param=name)


def stands_for_all(url: str) -> bool:
    """Whether a URL's host is that of a server which listens on all addresses, like 0.0.0.0."""
    with suppress(ValueError):
        return ipaddress.ip_address(urlsplit(url).hostname or "").is_unspecified
    return False


def check_own_url(url: str, name: str) -> None:
    """Raise ConfigError unless others can connect to this URL, as far as it says."""
    if (size := len(url.encode())) > MAX_OWN_URL:
        rule = f"it has {size} bytes, and at most {MAX_OWN_URL} are allowed"
        raise ConfigError(
            f"{name}={url[:40]!r}…: {rule}; give the host's name or address, and the port", param=name
        )
    check_url(url, name)
    if stands_for_all(url):
        rule = "this stands for all addresses of a machine, and nobody can connect to it"
        raise ConfigError(f"{name}={url!r}: {rule}; give one of its addresses", param=name)


def check_root_path(text: str, name: str) -> None:
    """Raise ConfigError unless a text is a path that a proxy can put before the server's routes."""
    parts = text.split("/")
    if text[:1] != "/" or not all(
        re.fullmatch(r"(?!\.{1,2}$)[\w.~-]+", part, re.ASCII) for part in parts[1:]
    ):
        rule = (
            "expected a path like /segue, without a slash at its end, of letters, digits, '-', '_', '.', '~'"
        )
        raise ConfigError(f"{name}={text!r}: {rule}", param=name)


def parse_sizes(text: str, name: str) -> list[int]:
    """Return the numbers of an option like "1,2,4,8" or "1 2 4 8".

    Raises:
        ConfigError: the text is not a list of numbers from 1 on.
    """
    parts = re.split(r"\s*,\s*|\s+", text.strip())
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{name}={text!r}: expected numbers from 1 on, separated by commas or spaces", param=name
        )
    return [int(part) for part in parts]


def parse_urls(text: str, name: str) -> list[str]:
    """Return the URLs of an option like "http://gpu-1:30000,http://gpu-2:30000", without a slash at the end.

    Raises:
        ConfigError: an entry is not the URL of a server.
    """
    urls = [part.rstrip("/") for part in re.split(r"\s*,\s*|\s+", text.strip())]
    for url in urls:
        check_url(url, name)
    return urls


def check_url(url: str, name: str) -> None:
    """Raise ConfigError unless this is the URL of a server, without a path."""
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is no number
        is_valid = False
    if (
        not is_valid
        or url not in (f"http://{parts.netloc}", f"https://{parts.netloc}")
        or "@" in parts.netloc
    ):
        raise ConfigError(f"{name}={url!r}: expected a server's URL, like http://gpu-1:30000", param=name)


def check_key(key: str, name: str) -> None:
    """Raise ConfigError if no request could carry a key, such as one with the line break of its file.

    The error does not show the key.
    """
    if key != key.strip() or not key.isprintable():
        text = "the key begins or ends with white space, or has a line break or another control character"
        raise ConfigError(f"{name}: {text}; give it without", param=name)


def parse_list(text: str, name: str, separator: str = ",") -> list[str]:
    """Return the entries of an option like "10.0.0.1,trainer-1.lan".

    Raises:
        ConfigError: an entry is empty.
    """
    parts = [part.strip() for part in text.split(separator)]
    if not all(parts):
        raise ConfigError(f"{name}={text!r}: expected entries separated by {separator!r}", param=name)
    return parts


def parse_places(text: str, name: str) -> list[str]:
    """Return the entries of an option like ",http://etcd:2379", of which some may be empty."""
    return [part.strip() for part in text.split(",")]


def parse_names(text: str, name: str) -> list[str]:
    """Return the names of an option like "gpt-4o,my-model".

    Raises:
        ConfigError: a name is empty, or comes twice.
    """
    names = parse_list(text, name)
    for each in names:
        if names.count(each) > 1:
            raise ConfigError(f"{name}={text!r}: {each!r} comes twice; give each name once", param=name)
    return names


def parse(text: str, kind: Any, name: str) -> Any:
    """Return the value of an option whose environment variable ``name`` has the text ``text``.

    ``kind`` is the option's declared type. Raises ConfigError if the text is not of that type; whether a
    choice is an allowed one is checked later, with the other values.
    """
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]  # [T] for T and `T | None`
    if get_origin(kind) is Literal:
        return text
    if kinds == [bool]:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("", "0", "false", "no", "off"):
            return False
        raise ConfigError(f"{name}={text!r}: use 1 or 0", param=name)
    try:
        return kinds[0](text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: expected {kinds[0].__name__}", param=name) from error


def value_of_file(each: Field[Any], kind: Any, value: Any) -> Any:
    """Return an option's value from one that a TOML file has; ``kind`` is the option's declared type.

    An option whose text is a list may be an array there.

    Raises:
        ConfigError: the value is not of the type, or out of bounds.
    """
    check = each.metadata["check"]
    if isinstance(value, list) and str in (kind, *get_args(kind)) and check is not None:
        separator = check.keywords.get("separator", ",") if isinstance(check, partial) else ","
        value = separator.join(map(str, value))
    _check(each.name, value, kind, each.metadata)
    if check is not None and value is not None:
        check(value, each.name)
    return value


def _check(name: str, value: Any, kind: Any, rule: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a value has the declared type ``kind`` and meets ``rule``, its bounds.

    ``name`` is the option's. An integer is also taken for a float, but a bool is not taken for an integer.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(kind))}", param=name)
        return
    allowed = get_args(kind) or (kind,)
    if not isinstance(value, (*allowed, int) if float in allowed else allowed) or (
        isinstance(value, bool) and bool not in allowed
    ):
        names = " or ".join("None" if k is type(None) else k.__name__ for k in allowed)
        raise ConfigError(f"{name}={value!r}: expected {names}", param=name)
    if value == "":  # an API key that a script left empty must not open the server
        raise ConfigError(f"{name}='': must not be empty; leave it out for the default", param=name)
    if value is None or isinstance(value, str):
        return
    if rule["min"] is not None and not value >= rule["min"]:  # not "<", so that NaN is refused
        raise ConfigError(f"{name}={value}: must be at least {rule['min']}", param=name)
    if rule["max"] is not None and not value <= rule["max"]:
        raise ConfigError(f"{name}={value}: must be at most {rule['max']}", param=name)
