"""Reads request bodies up to a limit, decodes their JSON and checks them.

A body that is too large to be decoded in one call is decoded field by field, as its :class:`Shape` says, in a
thread. It becomes a dictionary as plain decoding would make it, but for values that were checked on the way:
they are :class:`~segue.api.validation.Decoded`. Fields that cannot change the answer are not decoded at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs
from starlette.requests import Request

from segue.api import native
from segue.api.openai import requests as openai
from segue.api.validation import MAX_NAME_CHARS, unknown_field
from segue.config import MIB
from segue.errors import InvalidRequestError, RequestTooLargeError, SegueError, short_repr
from segue.frontend.tokenizer import ServedModel
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError, TooManyItemsError, cut
from segue.server.running import runtime_of

T = TypeVar("T")
Decode = Callable[[bytes], Any]
INLINE_BYTES = 1 << 14  # largest body that is decoded in one call, on the event loop
MAX_MEMBERS = 1 << 12  # of an object of more than `json_pieces.AT_ONCE` bytes
SMALL = json_pieces.PIECE  # bytes of a value that is decoded at once, whatever it is
MAX_OTHER = json_pieces.PIECE  # bytes of a value of any field that is not made for large ones
NOTHING_ELSE = object()  # in place of a large value of a field that takes none

RULES = {  # what fields that may be large are, in words
    **openai.RULES,
    **native.RULES,
    "messages": "a list of messages",
    "logit_bias": "an object of token ids and numbers",
    "stop_token_ids": "a list of token ids",
    "buckets": "a list of buckets",
    "shapes": "a list of lists of sizes",
    "checksums": "an object of names and integers of 64 bits",
    **dict.fromkeys(("names", "dtypes", "serialized_named_tensors"), "a list of strings"),
}
_MEMBER = re.compile(rb'\s*("(?:[^"\\]|\\.){0,256}")\s*:\s*', re.DOTALL)
_LONG_NAME = re.compile(rb'\s*("(?:[^"\\]|\\.){257})', re.DOTALL)  # longer than any that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An object: its fields, and how those that may be large are decoded."""

    model: type[msgspec.Struct]
    large: Mapping[str, Decode]
    skipped: frozenset[str] = frozenset()  # further fields, which change nothing
    refused: frozenset[str] = frozenset()  # further fields, which are errors unless they ask for nothing


async def read_json(request: Request, check: Callable[[Any], T], shape: Callable[[ServedModel], Shape]) -> T:
    """Returns the result of ``check`` for the decoded body; an empty body decodes to ``{}``.

    A body of more than ``INLINE_BYTES`` is decoded by its ``shape`` and checked in a thread.

    Raises:
        EngineStartError: the engine is still starting; the body was not read.
        RequestTooLargeError: the body exceeds the limit; no more than the limit was kept.
        InvalidRequestError: the body is not JSON, or has more than ``shape`` allows.
    """
    runtime = runtime_of(request)
    data = await read_bytes(request, runtime.config.max_body_mib)
    if len(data) > INLINE_BYTES:
        model = runtime.served_model
        return await runtime.manager.thread_pool.run(lambda: check(decode(data, shape(model))))
    try:
        body = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None
    return check(body)


async def read_bytes(request: Request, limit_mib: int) -> bytes:
    """Returns the body; raises RequestTooLargeError above ``limit_mib`` MiB."""
    limit = limit_mib * MIB
    announced = request.headers.get("content-length", "")
    if not announced.isdigit() or int(announced) <= limit:
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                break
            chunks.append(chunk)
        else:
            return b"".join(chunks)
    text = f"the body is larger than {limit_mib} MiB; send less, or raise --max-body-mib"
    raise RequestTooLargeError(text)


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
        raise _not_json("brackets, quotes or names are missing") from None
    except msgspec.ValidationError as error:
        _, unknown, name = str(error).partition("unknown field `")
        if unknown:
            raise unknown_field(name.removesuffix("`")[:MAX_NAME_CHARS]) from None
        raise InvalidRequestError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def decode_fields(data: bytes, shape: Shape) -> dict[str, Any]:
    """Decode an object into its fields; raises what :func:`decode` turns into errors for users."""
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
                raise _not_json(error) from None
    return fields


def too_many(param: str, count: int, most: int, what: str = "items") -> InvalidRequestError:
    """The error for a field with at least ``count`` items."""
    text = f"{param} has {short_repr(count)} {what} or more; at most {most} are allowed in one call"
    return InvalidRequestError(text, param=param)


def _large_value(name: str, raw: bytes, decoder: Decode) -> Any:
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
    """Returns the fields of an object that ``shape`` knows, undecoded."""
    kind = _undecoded(shape.model, shape.skipped | shape.refused)
    if len(data) <= json_pieces.AT_ONCE:
        found = structs.asdict(msgspec.json.decode(data, type=kind))
        return {name: bytes(raw) for name, raw in found.items() if raw is not UNSET}
    if not data.startswith(b"{"):
        raise msgspec.ValidationError("Expected `object`")
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
    """Returns a struct with the fields of ``model`` and others, undecoded."""
    names = dict.fromkeys([*model.__struct_encode_fields__, *sorted(others)])
    fields = [(name, Raw | UnsetType, UNSET) for name in names]
    strict = model.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=strict)


def _not_json(error: object) -> SegueError:
    return InvalidRequestError(f"the body is not valid JSON: {error}")
