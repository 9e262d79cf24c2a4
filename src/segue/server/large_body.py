"""Request bodies that are too large to be decoded at once: which fields may be large, and how to decode each.

A body becomes a dictionary as plain decoding would make it, but for values that were checked on the way: they
are :class:`~segue.api.validation.Decoded`. Fields that cannot change the answer are not decoded at all.
Lists with more items than could be accepted are refused by a count, before they are decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from segue.api import native
from segue.api.openai import requests as openai
from segue.api.validation import MAX_NAME_CHARS, Decoded, misfit, unknown_field
from segue.errors import InvalidRequestError, SegueError, shown
from segue.frontend.sampling_options import (
    MAX_STOPS,
    RequestLimits,
    check_batch,
    check_num_entries,
    check_prompt_len,
)
from segue.messages.weight_operations import MAX_PAYLOADS, MAX_TENSORS, Bucket
from segue.server import json_pieces
from segue.server.json_slices import MisfitError, Range, TooManyItemsError, cut, groups

MAX_STRINGS = 1 << 18  # of a conversation, the names of its messages' fields included
MAX_BUCKETS = 1 << 15
MAX_MEMBERS = 1 << 12  # of an object of more than `json_pieces.AT_ONCE` bytes
MAX_MESSAGES = MAX_STRINGS // 4
SMALL = json_pieces.PIECE  # bytes of a value that is decoded at once, whatever it is
MAX_OTHER = json_pieces.PIECE  # bytes of a value of any field that is not made for large ones
NOTHING_ELSE = object()  # in place of a large value of a field that takes none

Decode = Callable[[bytes], Any]
_RULES = {  # of fields that may be large and are of one type
    "messages": "a list of messages",
    "logit_bias": "an object of token ids and numbers",
    "stop_token_ids": "a list of token ids",
    "buckets": "a list of buckets",
    "names": "a list of strings",
    "dtypes": "a list of strings",
    "shapes": "a list of lists of sizes",
    "checksums": "an object of names and integers of 64 bits",
    "serialized_named_tensors": "a list of strings",
}
_NAME = re.compile(rb'\s*("(?:[^"\\]|\\.){0,256})("?)', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")
_Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_plain = msgspec.json.Decoder()
_messages = msgspec.json.Decoder(list[openai.ChatMessage])
_biases = msgspec.json.Decoder(dict[str, int | float])
_checksums = msgspec.json.Decoder(dict[str, int])
_shapes = msgspec.json.Decoder(list[list[_Dimension]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a body may ask for."""

    vocabulary: RequestLimits
    max_prompts: int  # in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An object: its fields, and how those that may be large are decoded."""

    kind: type[msgspec.Struct]  # the fields, undecoded
    large: Mapping[str, Decode]
    rules: Mapping[str, str]  # what fields may be, in words
    skipped: frozenset[str] = frozenset()  # fields that change nothing
    refused: frozenset[str] = frozenset()  # fields that are errors unless they ask for nothing


def decode(data: bytes, shape: Shape) -> dict[str, Any]:
    """Decode a body, which has to be an object, into its fields.

    Raises:
        InvalidRequestError: not well-formed, too many items, or a value of a wrong type.
        UnsupportedFieldError: a field that ``shape`` does not know and does not ignore.
    """
    data = data.strip()
    try:
        return _fields(_members(data, shape.kind), shape)
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


def not_json(error: object) -> SegueError:
    """The error for bytes that are not JSON."""
    return InvalidRequestError(f"the body is not valid JSON: {error}")


def chat(bounds: Bounds) -> Shape:
    """``POST /v1/chat/completions``."""
    return Shape(
        kind=_CHAT,
        large=_sampling(openai.check_num_biases) | {"messages": _conversation},
        rules=openai.RULES | _RULES,
        skipped=openai.HARMLESS,
        refused=frozenset(openai.CHAT_NOT_YET),
    )


def completion(bounds: Bounds) -> Shape:
    """``POST /v1/completions``."""
    return Shape(
        kind=_COMPLETION,
        large=_sampling(openai.check_num_biases) | {"prompt": partial(_prompt, "prompt", bounds)},
        rules=openai.RULES | _RULES,
        skipped=openai.HARMLESS,
        refused=frozenset(openai.COMPLETION_NOT_YET),
    )


def generate(bounds: Bounds) -> Shape:
    """``POST /generate``."""
    params = Shape(
        kind=_PARAMS,
        large=_sampling(check_num_entries),
        rules=native.RULES | _RULES,
        refused=frozenset(native.UNSUPPORTED_SAMPLING),
    )
    return Shape(
        kind=_GENERATE,
        large={
            "text": partial(_prompt, "text", bounds),
            "input_ids": partial(_prompt, "input_ids", bounds),
            "rid": partial(_strings, "rid", bounds.max_prompts),
            "sampling_params": partial(_params, params, bounds.max_prompts),
        },
        rules=native.RULES | _RULES,
        refused=frozenset(native.UNSUPPORTED_FIELDS),
    )


def control(kind: type[msgspec.Struct], _: Bounds) -> Shape:
    """A control call, of the weights or of the engine; unknown fields are ignored."""
    return Shape(kind=_control_kind(kind), large=_CONTROL, rules=_RULES)


def _members(data: bytes, kind: type[msgspec.Struct]) -> dict[str, bytes]:
    """The fields of an object that ``kind`` knows, undecoded."""
    if len(data) <= json_pieces.AT_ONCE:
        return _known(msgspec.json.decode(data, type=kind))
    strict = kind.__struct_config__.forbid_unknown_fields
    if not data.startswith(b"{"):
        raise msgspec.ValidationError("Expected `object`")
    found: dict[str, bytes] = {}
    for start, end in cut(data, MAX_MEMBERS):
        member = _NAME.match(data, start, end)
        if member is None:
            raise MisfitError
        if not member[2]:  # longer than any that is known
            if strict:
                raise unknown_field(shown(member[1].decode("utf-8", "replace")))
            continue
        name, colon = _plain.decode(member[1] + member[2]), _COLON.match(data, member.end(), end)
        if colon is None:
            raise MisfitError
        if name in kind.__struct_fields__:
            found[name] = data[colon.end() : end].rstrip()
        elif strict:
            raise unknown_field(name[:MAX_NAME_CHARS])
    return found


def _known(found: msgspec.Struct) -> dict[str, bytes]:
    values = ((name, getattr(found, name)) for name in found.__struct_fields__)
    return {name: bytes(raw) for name, raw in values if raw is not UNSET}


def _fields(found: Mapping[str, bytes], shape: Shape, prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, raw in found.items():
        if name in shape.skipped:
            continue
        size = len(raw)
        if size > SMALL and name in shape.refused:
            fields[name] = NOTHING_ELSE
            continue
        try:
            fields[name] = _value(raw, size, shape.large.get(name), prefix + name)
        except (MisfitError, msgspec.DecodeError) as error:
            if size <= SMALL:
                raise not_json(error) from None
            rule = shape.rules.get(name, "another type of value")
            raise InvalidRequestError(f"{prefix}{name}: expected {rule}", param=prefix + name) from None
        except (UnicodeDecodeError, RecursionError) as error:
            raise not_json(error) from None
        except OverflowError:
            rule = "token ids of at most 32 bits"
            raise InvalidRequestError(f"{prefix}{name}: expected {rule}", param=prefix + name) from None
    return fields


def _value(raw: bytes, size: int, large: Decode | None, param: str) -> Any:
    if size > SMALL and large is not None:
        return large(raw)
    if size > MAX_OTHER:
        text = f"{param} has {size} bytes of JSON; at most {MAX_OTHER} are allowed"
        raise InvalidRequestError(text, param=param)
    return _plain.decode(raw)


def _sampling(check_biases: Callable[[int], None]) -> dict[str, Decode]:
    return {
        "logit_bias": lambda data: json_pieces.members(data, _biases, check_biases),
        "stop_token_ids": lambda data: Decoded(json_pieces.token_ids(data, check_num_entries).tolist()),
        "stop": partial(_strings, "stop", MAX_STOPS),
    }


def _prompt(param: str, bounds: Bounds, data: bytes) -> Any:
    def check_count(count: int) -> None:
        if count > bounds.max_prompts:
            check_batch(count, bounds.max_prompts, param)

    def check_len(count: int) -> None:
        if count >= bounds.vocabulary.max_seq_len:
            check_prompt_len(count, bounds.vocabulary, param)

    if param != "input_ids":
        if data.startswith(b'"'):
            return _plain.decode(data)
        if json_pieces.first_byte(data) == b'"':
            return json_pieces.strings(data, check_count)
        if param == "text":
            raise MisfitError
    if json_pieces.first_byte(data) == b"[":
        return Decoded(json_pieces.id_lists(data, check_count, check_len))
    return Decoded(json_pieces.token_ids(data, check_len))


def _strings(param: str, most: int, data: bytes) -> Any:
    if data.startswith(b'"'):
        return _plain.decode(data)
    return json_pieces.strings(data, partial(_check_count, param, most))


def _conversation(data: bytes) -> Decoded:
    if (count := json_pieces.count_strings(data)) > MAX_STRINGS:
        raise _too_many("messages", count, MAX_STRINGS, "strings, the names of fields included")
    messages: list[openai.ChatMessage] = []
    for first, group in _groups(data, "messages", MAX_MESSAGES, "messages"):
        try:
            messages += _messages.decode(group)
        except msgspec.ValidationError as error:
            raise misfit(error, "messages", openai.RULES, first) from None
    return Decoded(messages)


def _groups(data: bytes, param: str, most: int, what: str) -> Iterable[tuple[int, bytes]]:
    """Arrays of neighbouring items of an array, each with the index of its first item."""
    if len(data) <= json_pieces.AT_ONCE:
        return [(0, data)]
    return groups(data, _cut(data, param, most, what))


def _cut(data: bytes, param: str, most: int, what: str) -> list[Range]:
    if not data.startswith(b"["):
        raise MisfitError
    try:
        return cut(data, most)
    except TooManyItemsError as error:
        raise _too_many(param, error.args[0], most, what) from None


def _params(shape: Shape, most: int, data: bytes) -> dict[str, Any] | list[dict[str, Any]]:
    if data.startswith(b"{"):
        try:
            return _fields(_members(data, shape.kind), shape)
        except TooManyItemsError as error:
            raise _too_many("sampling_params", error.args[0], MAX_MEMBERS, "fields") from None
    if len(data) > json_pieces.AT_ONCE:
        ranges = _cut(data, "sampling_params", most, "objects")
        return [_fields(_members(data[start:end].strip(), shape.kind), shape) for start, end in ranges]
    try:
        each = msgspec.json.decode(data, type=_array_of(shape.kind, most))
    except msgspec.ValidationError as error:
        if "of at most length" in str(error):
            raise _too_many("sampling_params", most + 1, most, "objects") from None
        raise
    found = (getattr(each, name) for name in each.__struct_fields__)
    return [_fields(_known(params), shape) for params in found if params is not UNSET]


class _Bucket(msgspec.Struct):
    names: Raw
    dtypes: Raw
    shapes: Raw


def _buckets(data: bytes) -> Decoded:
    most = 2 * MAX_TENSORS + 3 * MAX_BUCKETS
    if (count := json_pieces.count(data, b'"') // 2) > most:
        raise _too_many("buckets", count, most, "strings, the names of fields included")
    found: list[_Bucket] = []
    for first, group in _groups(data, "buckets", MAX_BUCKETS, "buckets"):
        try:
            found += msgspec.json.decode(group, type=list[_Bucket])
        except msgspec.ValidationError as error:
            raise misfit(error, "buckets", {}, first) from None
    if len(found) > MAX_BUCKETS:
        raise _too_many("buckets", len(found), MAX_BUCKETS, "buckets")
    return Decoded([_bucket(each) for each in found])


def _bucket(bucket: _Bucket) -> Bucket:
    names, dtypes = _names(bytes(bucket.names)), _names(bytes(bucket.dtypes))
    return Bucket(names=names.value, dtypes=dtypes.value, shapes=_all_shapes(bytes(bucket.shapes)).value)


def _names(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of names", MAX_TENSORS)
    found = json_pieces.strings(data, check)
    check(len(found))  # before it was decoded, an escape could hide strings from the count
    return Decoded(found)


def _all_shapes(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of shapes", MAX_TENSORS)
    return Decoded(json_pieces.small_arrays(data, _shapes, check))


def _all_checksums(data: bytes) -> Decoded:
    found = json_pieces.members(data, _checksums, partial(_check_count, "checksums", MAX_TENSORS))
    if any(not 0 <= checksum < 1 << 64 for checksum in found.values()):
        raise MisfitError
    return Decoded(found)


def _check_count(param: str, most: int, count: int) -> None:
    if count > most:
        raise _too_many(param, count, most, "items")


def _too_many(param: str, count: int, most: int, what: str) -> InvalidRequestError:
    text = f"{param} has {shown(count)} {what} or more; at most {most} are allowed in one call"
    return InvalidRequestError(text, param=param)


def _kind(
    model: type[msgspec.Struct], others: Iterable[str] = (), *, strict: bool = False
) -> type[msgspec.Struct]:
    """The fields of a model and others, undecoded."""
    names = dict.fromkeys([*model.__struct_encode_fields__, *others])
    fields = [(name, Raw | UnsetType, UNSET) for name in names]
    return msgspec.defstruct(model.__name__, fields, forbid_unknown_fields=strict)


_control_kind = lru_cache(_kind)


@lru_cache(maxsize=8)
def _array_of(kind: type[msgspec.Struct], most: int) -> type[msgspec.Struct]:
    """An array of at most so many objects; decoding stops at the first that is too many."""
    fields = [(f"item_{index}", kind | UnsetType, UNSET) for index in range(most)]
    return msgspec.defstruct("Items", fields, array_like=True, forbid_unknown_fields=True)


_CHAT = _kind(openai.ChatCompletionRequest, [*openai.HARMLESS, *openai.CHAT_NOT_YET], strict=True)
_COMPLETION = _kind(openai.CompletionRequest, [*openai.HARMLESS, *openai.COMPLETION_NOT_YET], strict=True)
_GENERATE = _kind(native.NativeGenerate, native.UNSUPPORTED_FIELDS)
_PARAMS = _kind(native.NativeSampling, native.UNSUPPORTED_SAMPLING)
_CONTROL: Mapping[str, Decode] = {
    "buckets": _buckets,
    "names": _names,
    "dtypes": _names,
    "shapes": _all_shapes,
    "checksums": _all_checksums,
    "serialized_named_tensors": partial(_strings, "serialized_named_tensors", MAX_PAYLOADS),
}
