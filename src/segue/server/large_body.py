"""Decodes bodies that are too large to be decoded in one call, field by field and in pieces.

A body is decoded as the :class:`Shape` of its route says: which fields may be large, and how each is decoded.
Lists with more items than could be accepted are refused by a count, before they are decoded. The body becomes
a dictionary as plain decoding would make it, but for values that were checked on the way: they are
:class:`~segue.api.validation.Decoded`. Fields that cannot change the answer are not decoded at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from segue.api import native
from segue.api.openai import requests as openai
from segue.api.validation import MAX_NAME_CHARS, misfit, unknown_field
from segue.errors import InvalidRequestError, SegueError, short_repr
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError, TooManyItemsError, cut

Decode = Callable[[bytes], Any]  # from the JSON of one value, without white space around it
MAX_MEMBERS = 1 << 12  # of an object of more than `json_pieces.AT_ONCE` bytes
SMALL = json_pieces.PIECE  # bytes of a value that is decoded at once, whatever it is
MAX_OTHER = json_pieces.PIECE  # bytes of a value of any field that is not made for large ones

RULES = {  # what fields that may be large are, in words
    **openai.RULES,
    **native.RULES,
    **dict.fromkeys(("token_ids", "tokens"), "a list of token ids"),
    "messages": "a list of messages",
    "input": "a string or a list of items",
    "tools": "a list of functions",
    "system": "a string or a list of blocks of text",
    "stop_sequences": "a list of strings",
    "output_config": "an object",
    "response_format": "an object with a type",
    "structured_outputs": "an object",
    **dict.fromkeys(("choice", "guided_choice"), "a list of strings"),
    **dict.fromkeys(("regex", "ebnf", "guided_regex", "guided_grammar"), "a string"),
    "logit_bias": "an object of token ids and numbers",
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), "a list of token ids"),
    "buckets": "a list of buckets",
    "update_info": "an object of names, dtype_names and shapes",
    "shapes": "a list of lists of sizes",
    "checksums": "an object of names and integers of 64 bits",
    **dict.fromkeys(
        ("names", "dtypes", "dtype_names", "request_ids", "serialized_named_tensors"), "a list of strings"
    ),
}


class _NothingElse:
    """In place of a large value of a field that takes none."""

    def __repr__(self) -> str:
        return "a large value"


NOTHING_ELSE = _NothingElse()
_MEMBER = re.compile(rb'\s*("(?:[^"\\]|\\.){0,256}")\s*:\s*', re.DOTALL)
_LONG_NAME = re.compile(rb'\s*("(?:[^"\\]|\\.){257})', re.DOTALL)  # longer than any that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An object: its fields, and how those that may be large are decoded."""

    model: type[msgspec.Struct]
    large: Mapping[str, Decode]
    skipped: frozenset[str] = frozenset()  # further fields, which change nothing
    refused: frozenset[str] = frozenset()  # further fields, which are errors unless they ask for nothing


def decode(data: bytes, shape: Shape) -> dict[str, Any]:
    """Decode a body, which has to be an object, into its fields.

    Raises:
        InvalidRequestError: not well-formed, too many items, or a value of a wrong type.
        UnsupportedFieldError: a field that ``shape`` does not know and does not ignore.
    """
    try:
        return decode_fields(data.strip(), shape)
    except TooManyItemsError as error:
        text = f"the body has {error.args[0]} fields or more; at most {MAX_MEMBERS} are allowed"
        raise InvalidRequestError(text) from None
    except MisfitError:
        raise not_json("brackets, quotes or names are missing") from None
    except msgspec.ValidationError as error:
        _, unknown, name = str(error).partition("unknown field `")
        if unknown:
            raise unknown_field(name.removesuffix("`")[:MAX_NAME_CHARS]) from None
        raise InvalidRequestError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


def decode_fields(data: bytes, shape: Shape) -> dict[str, Any]:
    """Decode an object into its fields; raises what :func:`decode` turns into errors for users.

    Small values are decoded at once, of whatever type: the check that follows refuses wrong ones.
    """
    fields: dict[str, Any] = {}
    for name, raw in _members(data, shape).items():
        is_large = len(raw) > SMALL
        if name in shape.skipped:
            continue
        if is_large and name in shape.refused:
            fields[name] = NOTHING_ELSE
        elif is_large and name in shape.large:
            fields[name] = _large_value(name, raw, shape.large[name])
        elif len(raw) > MAX_OTHER:
            text = f"{name} has {len(raw)} bytes of JSON; at most {MAX_OTHER} are allowed"
            raise InvalidRequestError(text, param=name)
        else:
            try:
                fields[name] = msgspec.json.decode(raw)
            except msgspec.DecodeError as error:
                raise not_json(error) from None
    return fields


def too_many(param: str, count: int, most: int, what: str = "items") -> InvalidRequestError:
    """The error for a field with at least ``count`` items."""
    text = f"{param} has {short_repr(count)} {what} or more; at most {most} are allowed in one call"
    return InvalidRequestError(text, param=param)


def _large_value(name: str, raw: bytes, decoder: Decode) -> Any:
    """Decode a large value, and turn what goes wrong into an error that names the field and its rule."""
    try:
        return decoder(raw)
    except TooManyItemsError as error:
        raise too_many(name, *error.args) from None
    except (MisfitError, msgspec.DecodeError):
        rule = RULES[name]
    except OverflowError:
        rule = "token ids of at most 32 bits"
    raise InvalidRequestError(f"{name}: expected {rule}", param=name)


def _members(data: bytes, shape: Shape) -> dict[str, bytes]:
    """Returns the fields of an object that ``shape`` knows, undecoded: each as the bytes of its JSON.

    A body of up to ``AT_ONCE`` bytes is scanned by msgspec, in one call; a larger one is cut with numpy.
    """
    kind = _undecoded(shape.model, shape.skipped | shape.refused)
    if len(data) <= json_pieces.AT_ONCE:
        found = structs.asdict(msgspec.json.decode(data, type=kind))
        return {name: bytes(raw) for name, raw in found.items() if raw is not UNSET}
    if not data.startswith(b"{"):
        raise msgspec.ValidationError("expected an object")  # the callers name the body, or its field
    members: dict[str, bytes] = {}
    for start, end in cut(data, MAX_MEMBERS, "fields"):
        if member := _MEMBER.match(data, start, end):
            name = msgspec.json.decode(member[1])
        elif member := _LONG_NAME.match(data, start, end):
            name = short_repr(member[1].decode("utf-8", "replace"))
        else:
            raise MisfitError
        if name in kind.__struct_fields__:
            members[name] = data[member.end() : end].rstrip()
        elif kind.__struct_config__.forbid_unknown_fields:
            raise unknown_field(name[:MAX_NAME_CHARS])
    return members


@lru_cache
def _undecoded(model: type[msgspec.Struct], others: frozenset[str]) -> type[msgspec.Struct]:
    """Returns a struct with the fields of ``model`` and ``others``, which msgspec leaves as JSON."""
    names = dict.fromkeys([*model.__struct_encode_fields__, *sorted(others)])
    fields = [(name, Raw | UnsetType, UNSET) for name in names]
    strict = model.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=strict)


def not_json(error: object) -> SegueError:
    """Returns the error for a body that is not JSON."""
    return InvalidRequestError(f"the body is not valid JSON: {error}")


# --- what several fields have ---


def strings_of(param: str, most: int, data: bytes) -> Any:
    """Decode a string, or a list of at most ``most`` strings; ``param`` is the field, for errors."""
    if data.startswith(b'"'):
        return msgspec.json.decode(data)
    return json_pieces.strings(data, partial(check_count, param, most))


def structs_of(
    param: str,
    decoder: msgspec.json.Decoder[list[Any]],
    most: int,
    data: bytes,
    rules: Mapping[str, str] = openai.RULES,
) -> list[Any]:
    """Decode a list of structs, group by group; errors name the item by its index in the whole list."""
    found: list[Any] = []
    for first, group in json_pieces.groups(data, most, param):
        try:
            found += decoder.decode(group)
        except msgspec.ValidationError as error:
            raise misfit(error, param, rules, first) from None
    return found


def check_count(param: str, most: int, count: int) -> None:
    """Raise the error for a field of more than ``most`` items."""
    if count > most:
        raise too_many(param, count, most)
