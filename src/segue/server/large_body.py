"""Request bodies that are too large to be decoded at once: which fields may be large, and how to decode each.

A body becomes a dictionary as plain decoding would make it, but for values that were checked on the way: they
are :class:`~segue.protocol.validation.Decoded`. Fields that cannot change the answer are not decoded at all.
Lists with more items than could be accepted are refused by a count, before they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import BaseModel

from segue.errors import InvalidRequestError, SegueError
from segue.frontend.sampling import MAX_STOPS, Vocabulary, check_batch, check_num_entries, check_prompt_len
from segue.protocol import native, openai
from segue.protocol.validation import MAX_NAME_CHARS, Decoded, misfit, shown, unknown_field
from segue.protocol.weight_control import MAX_PAYLOADS, MAX_TENSORS
from segue.protocol.weights import Bucket
from segue.server import pieces
from segue.server.pieces import MisfitError

MAX_STRINGS = 1 << 18  # of a conversation, the names of its messages' fields included
MAX_BUCKETS = 1 << 15
MAX_MEMBERS = 1 << 17  # of a body, or of the sampling parameters of all its prompts
SMALL = pieces.PIECE  # bytes of a value that is decoded at once, whatever it is
MAX_OTHER = pieces.PIECE  # bytes of a value of any field that is not made for large ones
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
_Dimension = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_plain = msgspec.json.Decoder()
_messages = msgspec.json.Decoder(list[openai.ChatMessage])
_biases = msgspec.json.Decoder(dict[str, int | float])
_checksums = msgspec.json.Decoder(dict[str, int])
_shapes = msgspec.json.Decoder(list[list[_Dimension]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a body may ask for."""

    vocabulary: Vocabulary
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
    """The fields of an object that is a whole body.

    Raises:
        InvalidRequestError: not well-formed, too many items, or a value of a wrong type.
        UnsupportedFieldError: a field that ``shape`` does not know and does not ignore.
    """
    _check_num_members(data, 1)
    try:
        found = msgspec.json.decode(data, type=shape.kind)
    except msgspec.ValidationError as error:
        _, unknown, name = str(error).partition("unknown field `")
        if unknown:
            raise unknown_field(name.removesuffix("`")[:MAX_NAME_CHARS]) from None
        raise InvalidRequestError("the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    return _fields(found, shape)


def not_json(error: Exception) -> SegueError:
    """The error for bytes that are not JSON."""
    return InvalidRequestError(f"the body is not valid JSON: {error}")


def chat(bounds: Bounds) -> Shape:
    """``POST /v1/chat/completions``."""
    return Shape(
        kind=_CHAT,
        large=_sampling(bounds, openai.MAX_BIASES) | {"messages": _conversation},
        rules=openai.RULES | _RULES,
        skipped=openai.HARMLESS,
        refused=frozenset(openai.CHAT_NOT_YET),
    )


def completion(bounds: Bounds) -> Shape:
    """``POST /v1/completions``."""
    return Shape(
        kind=_COMPLETION,
        large=_sampling(bounds, openai.MAX_BIASES) | {"prompt": partial(_prompt, "prompt", bounds)},
        rules=openai.RULES | _RULES,
        skipped=openai.HARMLESS,
        refused=frozenset(openai.COMPLETION_NOT_YET),
    )


def generate(bounds: Bounds) -> Shape:
    """``POST /generate``."""
    params = Shape(
        kind=_PARAMS,
        large=_sampling(bounds, None),
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


def control(model: type[BaseModel], _: Bounds) -> Shape:
    """A control call, of the weights or of the engine; unknown fields are ignored."""
    return Shape(kind=_control_kind(model), large=_CONTROL, rules=_RULES)


def _fields(found: msgspec.Struct, shape: Shape, prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in found.__struct_fields__:
        raw = getattr(found, name)
        if raw is UNSET or name in shape.skipped:
            continue
        size = memoryview(raw).nbytes
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


def _value(raw: Raw, size: int, large: Decode | None, param: str) -> Any:
    if size > SMALL and large is not None:
        return large(bytes(raw))
    if size > MAX_OTHER:
        text = f"{param} has {size} bytes of JSON; at most {MAX_OTHER} are allowed"
        raise InvalidRequestError(text, param=param)
    return _plain.decode(raw)


def _sampling(bounds: Bounds, most_biases: int | None) -> dict[str, Decode]:
    def check_biases(count: int) -> None:
        if most_biases is None:
            check_num_entries(count)
        elif count > most_biases:
            text = f"logit_bias: {openai.too_many_biases(count)}"
            raise InvalidRequestError(text, param="logit_bias")

    return {
        "logit_bias": lambda data: pieces.members(data, _biases, check_biases),
        "stop_token_ids": lambda data: Decoded(pieces.token_ids(data, check_num_entries).tolist()),
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
        if pieces.first_byte(data) == b'"':
            return pieces.strings(data, check_count)
        if param == "text":
            raise MisfitError
    if pieces.first_byte(data) == b"[":
        return Decoded(pieces.id_lists(data, check_count, check_len))
    return Decoded(pieces.token_ids(data, check_len))


def _strings(param: str, most: int, data: bytes) -> Any:
    if data.startswith(b'"'):
        return _plain.decode(data)
    return pieces.strings(data, partial(_check_count, param, most))


def _conversation(data: bytes) -> Decoded:
    if (count := pieces.count_strings(data)) > MAX_STRINGS:
        raise _too_many("messages", count, MAX_STRINGS, "strings, the names of fields included")
    try:
        return Decoded(_messages.decode(data))
    except msgspec.ValidationError as error:
        raise misfit(error, "messages", openai.RULES) from None


def _params(shape: Shape, most: int, data: bytes) -> dict[str, Any] | list[dict[str, Any]]:
    _check_num_members(data, 1 if data.startswith(b"{") else 2)
    if data.startswith(b"{"):
        return _fields(msgspec.json.decode(data, type=shape.kind), shape)
    try:
        each = msgspec.json.decode(data, type=_array_of(shape.kind, most))
    except msgspec.ValidationError as error:
        if "of at most length" in str(error):
            raise _too_many("sampling_params", most + 1, most, "objects") from None
        raise
    found = (getattr(each, name) for name in each.__struct_fields__)
    return [_fields(params, shape) for params in found if params is not UNSET]


class _Bucket(msgspec.Struct):
    names: Raw
    dtypes: Raw
    shapes: Raw


def _check_num_members(data: bytes, depth: int) -> None:
    """Raise InvalidRequestError for millions of fields: each costs time, also if all have one name."""
    if pieces.count(data, b":") > MAX_MEMBERS and (count := pieces.count_members(data, depth)) > MAX_MEMBERS:
        rule = f"at most {MAX_MEMBERS} are allowed"
        raise InvalidRequestError(f"an object of this request has {count} fields or more; {rule}")


def _buckets(data: bytes) -> Decoded:
    most = 2 * MAX_TENSORS + 3 * MAX_BUCKETS
    if (count := pieces.count(data, b'"') // 2) > most:
        raise _too_many("buckets", count, most, "strings, the names of fields included")
    try:
        found = msgspec.json.decode(data, type=list[_Bucket])
    except msgspec.ValidationError as error:
        raise misfit(error, "buckets", {}) from None
    if len(found) > MAX_BUCKETS:
        raise _too_many("buckets", len(found), MAX_BUCKETS, "buckets")
    return Decoded([_bucket(each) for each in found])


def _bucket(bucket: _Bucket) -> Bucket:
    names, dtypes = _names(bytes(bucket.names)), _names(bytes(bucket.dtypes))
    return Bucket(names=names.value, dtypes=dtypes.value, shapes=_all_shapes(bytes(bucket.shapes)).value)


def _names(data: bytes) -> Decoded:
    return Decoded(pieces.strings(data, partial(_check_count, "a list of names", MAX_TENSORS)))


def _all_shapes(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of shapes", MAX_TENSORS)
    return Decoded(pieces.small_arrays(data, _shapes, check))


def _all_checksums(data: bytes) -> Decoded:
    found = pieces.members(data, _checksums, partial(_check_count, "checksums", MAX_TENSORS))
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
    model: type[BaseModel], others: Iterable[str] = (), *, strict: bool = False
) -> type[msgspec.Struct]:
    """The fields of a model and others, undecoded."""
    names = dict.fromkeys([*model.model_fields, *others])
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
