"""From a parsed JSON body, or a Python caller's values, to a struct, with errors that name field and rule."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import structs

from segue.errors import InvalidRequestError, UnsupportedFieldError, invalid_value, short_repr

Body = TypeVar("Body", bound=msgspec.Struct)
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
NOT_EMPTY = msgspec.Meta(extra_json_schema={"minItems": 1})  # described so; what reads the list checks it
MAX_NAME_CHARS = 80  # of a field's name, in an error
MAX_MESSAGE_CHARS = 200  # of what a decoder says
_PLACE = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.(\w+)")
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_BOUND = re.compile(r"Expected `(\w+)` (of length )?(>=|>|<=|<) ([\d.e+-]+)")
_TYPE = re.compile(r"Expected `([\w| ]+)`(?:, got `([\w.]+)`)?")
_BOUNDS = {">=": "at least", ">": "greater than", "<=": "at most", "<": "less than"}
_ITEMS = {"str": ("character", "characters"), "object": ("entry", "entries")}
_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_UNSHOWN = object()


@dataclass(frozen=True, slots=True)
class Decoded:
    """A value that was checked while it was decoded from JSON, so that it is not gone through again."""

    value: Any


def plain(value: Any, name: str = "") -> Any:
    """The value that a Python caller gave, in the types that JSON has, as :func:`parse` takes them.

    Numbers of numpy, paths, arrays, views and generators are converted.

    Raises:
        InvalidRequestError: a set, which has no order; ``name`` is its field's.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list and all(type(item) is int for item in value):
        return value  # token ids: nothing to convert
    match value:
        case np.generic() | np.ndarray():
            return value.tolist()
        case str():
            return str(value)
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {plain(key): plain(item, str(key)) for key, item in value.items()}
        case set() | frozenset():
            raise invalid_value(name, value, "must be a list, for a set has no order")
        case Iterable() if not isinstance(value, (bytes, bytearray, memoryview)):
            return [plain(item, name) for item in value]
        case _:
            return value


def parse(
    kind: type[Body], body: Any, *, rules: Mapping[str, str] | None = None, coerces: bool = False
) -> Body:
    """Check ``body``, and return it as a struct of ``kind``.

    Values that are :class:`Decoded` were checked before: an empty value stands in for each while msgspec
    checks the others.

    Args:
        kind: what it has to be; a struct that forbids unknown fields makes them errors.
        body: a mapping.
        rules: says in words what fields of several types may be, by field.
        coerces: numbers may come as strings, as in a query.

    Raises:
        InvalidRequestError: the first wrong field.
        UnsupportedFieldError: an unknown field that is forbidden.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"expected a JSON object, got {short_repr(body)}")
    decoded = {name: value.value for name, value in body.items() if isinstance(value, Decoded)}
    tag = kind.__struct_config__.tag_field  # tells messages apart; a client's value of it is ignored
    fields = {name: value for name, value in body.items() if name != tag}
    fields |= {name: {} if isinstance(value, dict) else [] for name, value in decoded.items()}
    try:
        checked = msgspec.convert(fields, kind, strict=not coerces, str_keys=True)
    except msgspec.ValidationError as error:
        raise misfit(error, "", rules or {}, value=fields, values=_values(kind)) from None
    except UnicodeEncodeError:
        raise InvalidRequestError("the body has a text that is not valid Unicode") from None
    except OverflowError:
        raise InvalidRequestError("the body has a number that is out of range") from None
    return structs.replace(checked, **decoded) if decoded else checked


def prompts_of(
    value: Any, param: str, rules: Mapping[str, str], max_prompts: int
) -> tuple[Sequence[str | list[int]], bool]:
    """Return the prompts of a text, token ids, or a list of either, and whether it is such a list.

    An empty list is a prompt without token ids; where ``param`` is ``text``, it is a batch without texts, and
    thus an error.

    Raises:
        InvalidRequestError: a list has items of several types, no prompts, or more than ``max_prompts``.
    """
    if isinstance(value, list) and len(set(map(type, value))) > 1:
        raise InvalidRequestError(f"{param}: expected {rules[param]}", param=param)
    if isinstance(value, str) or (isinstance(value[0], int) if value else param != "text"):
        return [value], False
    check_batch(len(value), max_prompts, param)
    return value, True


def check_batch(count: int, most: int, param: str) -> None:
    """Raise InvalidRequestError for an empty batch, and for one with more prompts than may wait."""
    if count == 0:
        raise InvalidRequestError(f"{param} is an empty list; it must have at least one prompt", param=param)
    if count > most:
        rule = f"at most {most} (--max-queued-requests) go in one call"
        raise InvalidRequestError(f"{param} has {count} prompts; {rule}", param=param)


def misfit(
    error: msgspec.ValidationError,
    param: str,
    rules: Mapping[str, str],
    first: int = 0,
    value: Any = _UNSHOWN,
    values: Mapping[str, str] | None = None,
) -> InvalidRequestError:
    """Return what msgspec found wrong inside the field ``param`` as an error in this API's words.

    msgspec says it in a text, such as "Expected `int`, got `str` - at `$.stop[2]`": the text is taken apart
    into the rule and the path. In a path, ``[...]`` is a value of a mapping whose key is not told.

    Args:
        error: what it said.
        param: the field; empty: the whole body.
        rules: says in words what fields of several types may be; where there is one, it is the message.
        first: where only a part of a list was given to msgspec, the index of its first item in the list.
        value: what msgspec was given; the wrong part of it is shown in the error. Not given: none is shown.
        values: what fields of a few values may be, in words.
    """
    text = str(error)
    place = _PLACE.search(text)
    message = text[: place.start()] if place else text
    path = place[1] if place else ""
    steps: list[int | str] = [
        int(index) if index else name for index, name in _STEP.findall(path) if index != "..."
    ]
    value = _at(value, steps) if place and "..." not in path else _UNSHOWN
    if steps and isinstance(steps[0], int):
        steps[0] += first
    steps = [param, *steps] if param else steps
    where, rule = _where(steps, rules)
    if rule is not None:  # the field takes several types, and msgspec speaks of one of them
        return InvalidRequestError(f"{where}: expected {rule}", param=where)
    if field := _FIELD.fullmatch(message):
        where, _ = _where([*steps, field[2]], {})
        if field[1] == "missing required":
            return InvalidRequestError(f"{where}: this field is required", param=where)
        return unknown_field(where)
    choices = (values or {}).get(where)
    message = _in_words(message) if choices is None else f"must be one of {choices}"
    if "`key` in" in text:
        return InvalidRequestError(f"a key of {where} {message}", param=where)
    if path.endswith("[...]"):
        return InvalidRequestError(f"a value in {where} {message}", param=where)
    if not where:
        return InvalidRequestError(message)
    if value is _UNSHOWN:
        return InvalidRequestError(f"{where}: {message}", param=where)
    return invalid_value(where, value, message)


def unknown_field(param: str) -> UnsupportedFieldError:
    """The error for a field that the API does not have."""
    return UnsupportedFieldError(f"{param}: this field is not known here; leave it out", param=param)


def _in_words(message: str) -> str:
    """Return what msgspec says of a value as a rule: "must be an integer, not a string"."""
    if bound := _BOUND.match(message):
        kind, length, sign, limit = bound.groups()
        amount = f"{float(limit):g}" if kind == "float" else limit
        items = _ITEMS.get(kind, ("item", "items"))[amount != "1"]
        return f"must {'have' if length else 'be'} {_BOUNDS[sign]} {amount}{f' {items}' if length else ''}"
    if found := _TYPE.fullmatch(message):
        kinds = [_TYPES.get(kind, kind) for kind in found[1].split(" | ")]
        *others, last = kinds
        allowed = f"{', '.join(others)} or {last}" if others else last
        return f"must be {allowed}" + (f", not {_TYPES.get(found[2], found[2])}" if found[2] else "")
    return f"{message[0].lower()}{message[1:MAX_MESSAGE_CHARS]}"


@lru_cache
def _values(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the allowed values of each field of a struct that is a ``Literal``, in words."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(kind).items():
        options = [hint, *get_args(hint)]
        literals = [each for each in options if get_origin(each) is Literal]
        if literals:
            found[name] = ", ".join(repr(value) for each in literals for value in get_args(each))
    return found


def _at(value: Any, steps: Sequence[int | str]) -> Any:
    """Return the part of a value that ``steps``, names and indices, lead to; ``_UNSHOWN`` if they do not."""
    try:
        for step in steps:
            value = value[step]
    except (LookupError, TypeError):
        return _UNSHOWN
    return value


def _where(steps: Sequence[int | str], rules: Mapping[str, str]) -> tuple[str, str | None]:
    """The place that ``steps`` lead to, such as ``messages[0].role``, and its rule if it has one.

    The place ends at a field with a rule, which says in words all that the field may be: msgspec's own place
    goes on into one of the field's possible types.
    """
    path = ""
    for step in steps:
        name = str(step)[:MAX_NAME_CHARS]
        path += f"[{name}]" if isinstance(step, int) else f".{name}" if path else name
        if step in rules:
            return path, rules[str(step)]
    return path, None
