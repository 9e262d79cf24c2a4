"""Which fields of each route's body may be large, and how each is decoded.

Lists with more items than could be accepted are refused by a count, before they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Raw

from segue.api import native
from segue.api.openai import requests as openai
from segue.api.validation import Decoded, misfit
from segue.frontend.sampling_options import MAX_STOPS, check_batch, check_num_entries, check_prompt_len
from segue.frontend.tokenizer import ServedModel
from segue.messages.weight_operations import MAX_PAYLOADS, MAX_TENSORS, Bucket
from segue.server import json_pieces
from segue.server.body import Decode, Shape, decode_fields, too_many
from segue.server.json_pieces import MisfitError

MAX_STRINGS = 1 << 18  # of a conversation, the names of its messages' fields included
MAX_MESSAGES = MAX_STRINGS // 4
MAX_BUCKETS = 1 << 15

_messages = msgspec.json.Decoder(list[openai.ChatMessage])
_biases = msgspec.json.Decoder(dict[str, int | float])
_checksums = msgspec.json.Decoder(dict[str, int])
_sizes = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]])


class _Bucket(msgspec.Struct):
    names: Raw
    dtypes: Raw
    shapes: Raw


_buckets = msgspec.json.Decoder(list[_Bucket])

# --- the shapes of bodies ---


def chat(model: ServedModel) -> Shape:
    """``POST /v1/chat/completions``."""
    return Shape(
        model=openai.ChatCompletionRequest,
        large={**_OPENAI_SAMPLING, "messages": _conversation},
        skipped=openai.HARMLESS,
        refused=frozenset(openai.CHAT_NOT_YET),
    )


def completion(model: ServedModel) -> Shape:
    """``POST /v1/completions``."""
    return Shape(
        model=openai.CompletionRequest,
        large={**_OPENAI_SAMPLING, "prompt": partial(_prompt, "prompt", model)},
        skipped=openai.HARMLESS,
        refused=frozenset(openai.COMPLETION_NOT_YET),
    )


def generate(model: ServedModel) -> Shape:
    """``POST /generate``."""
    return Shape(
        model=native.NativeGenerate,
        large={
            "text": partial(_prompt, "text", model),
            "input_ids": partial(_prompt, "input_ids", model),
            "rid": partial(_strings, "rid", model.max_prompts),
            "sampling_params": partial(_params, model.max_prompts),
        },
        refused=frozenset(native.UNSUPPORTED_FIELDS),
    )


def control(kind: type[msgspec.Struct], _: ServedModel) -> Shape:
    """A control call, of the weights or of the engine; unknown fields are ignored."""
    return Shape(model=kind, large=_CONTROL)


# --- prompts and options ---


def _prompt(param: str, model: ServedModel, data: bytes) -> Any:
    def check_count(count: int) -> None:
        check_batch(max(count, 1), model.max_prompts, param)  # 0 may be a lower bound

    check_len = partial(check_prompt_len, limits=model.encoder.limits, param=param)
    if param != "input_ids":
        if data.startswith(b'"'):
            return msgspec.json.decode(data)
        if json_pieces.first_byte(data) == b'"':
            return json_pieces.strings(data, check_count)
        if param == "text":
            raise MisfitError
    if json_pieces.first_byte(data) == b"[":
        return Decoded(json_pieces.arrays(data, partial(json_pieces.token_ids, check=check_len), check_count))
    return Decoded(json_pieces.token_ids(data, check_len))


def _strings(param: str, most: int, data: bytes) -> Any:
    if data.startswith(b'"'):
        return msgspec.json.decode(data)
    return json_pieces.strings(data, partial(_check_count, param, most))


def _sampling(check_biases: Callable[[int], None]) -> dict[str, Decode]:
    return {
        "logit_bias": lambda data: json_pieces.members(data, _biases, check_biases),
        "stop_token_ids": lambda data: Decoded(json_pieces.token_ids(data, check_num_entries).tolist()),
        "stop": partial(_strings, "stop", MAX_STOPS),
    }


def _params(most: int, data: bytes) -> Any:
    if data.startswith(b"{"):
        return decode_fields(data, _PARAMS)
    if json_pieces.first_byte(data) not in b"{]":
        raise MisfitError
    ranges = json_pieces.cut(data, most, "objects")
    return [decode_fields(data[start:end].strip(), _PARAMS) for start, end in ranges]


def _conversation(data: bytes) -> Decoded:
    if (count := json_pieces.count_strings(data)) > MAX_STRINGS:
        raise too_many("messages", count, MAX_STRINGS, "strings, the names of fields included")
    return Decoded(_structs("messages", _messages, MAX_MESSAGES, data))


def _structs(param: str, decoder: msgspec.json.Decoder[list[Any]], most: int, data: bytes) -> list[Any]:
    found: list[Any] = []
    for first, group in json_pieces.groups(data, most, param):
        try:
            found += decoder.decode(group)
        except msgspec.ValidationError as error:
            raise misfit(error, param, openai.RULES, first) from None
    return found


# --- tensors ---


def _all_buckets(data: bytes) -> Decoded:
    most = 2 * MAX_TENSORS + 3 * MAX_BUCKETS
    if (count := json_pieces.count(data, b'"') // 2) > most:
        raise too_many("buckets", count, most, "strings, the names of fields included")
    found = _structs("buckets", _buckets, MAX_BUCKETS, data)
    if len(found) > MAX_BUCKETS:
        raise too_many("buckets", len(found), MAX_BUCKETS, "buckets")
    return Decoded([_bucket(each) for each in found])


def _bucket(bucket: _Bucket) -> Bucket:
    names, dtypes, shapes = _names(bytes(bucket.names)), _names(bytes(bucket.dtypes)), bytes(bucket.shapes)
    return Bucket(names=names.value, dtypes=dtypes.value, shapes=_shapes(shapes).value)


def _names(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of names", MAX_TENSORS)
    found = json_pieces.strings(data, check)
    check(len(found))  # before it was decoded, an escape could hide strings from the count
    return Decoded(found)


def _shapes(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of shapes", MAX_TENSORS)
    return Decoded(json_pieces.arrays(data, _shape, check))


def _shape(data: bytes) -> list[int]:
    if len(data) > json_pieces.PIECE:
        raise MisfitError
    return _sizes.decode(data)


def _all_checksums(data: bytes) -> Decoded:
    found = json_pieces.members(data, _checksums, partial(_check_count, "checksums", MAX_TENSORS))
    if any(not 0 <= checksum < 1 << 64 for checksum in found.values()):
        raise MisfitError
    return Decoded(found)


def _check_count(param: str, most: int, count: int) -> None:
    if count > most:
        raise too_many(param, count, most)


_OPENAI_SAMPLING = _sampling(openai.check_num_biases)
_PARAMS = Shape(
    model=native.NativeSampling,
    large=_sampling(check_num_entries),
    refused=frozenset(native.UNSUPPORTED_SAMPLING),
)
_CONTROL: dict[str, Decode] = {
    "buckets": _all_buckets,
    "names": _names,
    "dtypes": _names,
    "shapes": _shapes,
    "checksums": _all_checksums,
    "serialized_named_tensors": partial(_strings, "serialized_named_tensors", MAX_PAYLOADS),
}
