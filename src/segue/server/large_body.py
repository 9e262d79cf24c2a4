"""Decodes bodies that are too large to be decoded in one call, field by field and in pieces.

A body is decoded as the :class:`Shape` of its route says: which fields may be large, and how each is decoded.
Lists with more items than could be accepted are refused by a count, before they are decoded. The body becomes
a dictionary as plain decoding would make it, but for values that were checked on the way: they are
:class:`~segue.api.validation.Decoded`. Fields that cannot change the answer are not decoded at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType, structs

from segue.api import native, tokenization
from segue.api import token_generate as tokens
from segue.api.asks_nothing import harmless, unsupported
from segue.api.guided import FIELD_NAMES
from segue.api.openai import requests as openai
from segue.api.openai.chat_fields import MAX_TOOLS, Tool
from segue.api.openai.responses import fields as response_fields
from segue.api.validation import MAX_NAME_CHARS, Decoded, check_batch, misfit, unknown_field
from segue.api.vllm import MAX_ABORTED, UpdateInfo
from segue.errors import InvalidRequestError, SegueError, short_repr
from segue.frontend.sampling_options import MAX_STOPS, check_num_entries
from segue.frontend.tokenizer import ServedModel, check_prompt_len
from segue.guided.grammars import MAX_GRAMMAR_BYTES
from segue.messages.weight_operations import MAX_PAYLOADS, MAX_TENSORS, Bucket
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError, TooManyItemsError, cut

T = TypeVar("T")
Decode = Callable[[bytes], Any]  # from the JSON of one value, without white space around it
MAX_MEMBERS = 1 << 12  # of an object of more than `json_pieces.AT_ONCE` bytes
SMALL = json_pieces.PIECE  # bytes of a value that is decoded at once, whatever it is
MAX_OTHER = json_pieces.PIECE  # bytes of a value of any field that is not made for large ones

MAX_GRAMMAR_JSON = 2 * MAX_GRAMMAR_BYTES  # bytes of a field that guides the output: escapes take more
MAX_STRINGS = 1 << 18  # of a conversation, the names of its messages' fields included
MAX_MESSAGES = MAX_STRINGS // 4
MAX_BUCKETS = 1 << 15
MAX_TOOL_BYTES = 1 << 16  # of one tool

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
_messages = msgspec.json.Decoder(list[openai.ChatMessage])
_tool_list = msgspec.json.Decoder(list[Tool], float_hook=float)
_response_items = msgspec.json.Decoder(list[response_fields.InputItem])
_response_tools = msgspec.json.Decoder(list[response_fields.ResponsesTool], float_hook=float)
_biases = msgspec.json.Decoder(dict[str, int | float])
_checksums = msgspec.json.Decoder(dict[str, int])
_sizes = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An object: its fields, and how those that may be large are decoded."""

    model: type[msgspec.Struct]
    large: Mapping[str, Decode]
    skipped: frozenset[str] = frozenset()  # further fields, which change nothing
    refused: frozenset[str] = frozenset()  # further fields, which are errors unless they ask for nothing


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
        large={**_OPENAI_SAMPLING, "messages": _conversation, "tools": _chat_tools},
        skipped=harmless("chat"),
        refused=unsupported("chat"),
    )


def chat_tokens(model: ServedModel) -> Shape:
    """``POST /v1/chat/completions/tokens``."""
    of_chat = chat(model)
    return replace(
        of_chat,
        model=openai.ChatTokensRequest,
        large={**of_chat.large, "tokens": partial(_token_ids, "tokens", model)},
    )


def completion(model: ServedModel) -> Shape:
    """``POST /v1/completions``."""
    return Shape(
        model=openai.CompletionRequest,
        large={**_OPENAI_SAMPLING, "prompt": partial(_prompt, "prompt", model)},
        skipped=harmless("completions"),
        refused=unsupported("completions"),
    )


def responses(model: ServedModel) -> Shape:
    """``POST /v1/responses``."""
    return Shape(
        model=response_fields.ResponsesRequest,
        large={
            "input": _input,
            "instructions": partial(_text, "instructions"),
            "tools": partial(tools_of, _response_tools, response_fields.RULES),
            "text": _text_config,
            "stop": partial(strings_of, "stop", MAX_STOPS),
        },
        skipped=harmless("responses"),
        refused=unsupported("responses"),
    )


def generate(model: ServedModel) -> Shape:
    """``POST /generate``."""
    return Shape(
        model=native.NativeGenerate,
        large={
            "text": partial(_prompt, "text", model),
            "input_ids": partial(_prompt, "input_ids", model),
            "rid": partial(strings_of, "rid", model.max_prompts),
            "request_id": partial(strings_of, "request_id", model.max_prompts),
            "sampling_params": partial(_params, model.max_prompts),
        },
        refused=unsupported("native"),
    )


def token_generate(model: ServedModel) -> Shape:
    """``POST /inference/v1/generate``."""
    return Shape(
        model=tokens.TokenGenerate,
        large={
            "token_ids": partial(_token_ids, "token_ids", model),
            "sampling_params": partial(_one_params, _TOKEN_PARAMS),
        },
        refused=unsupported("tokens"),
    )


def tokenize(model: ServedModel) -> Shape:
    """``POST /tokenize``."""
    return Shape(
        model=tokenization.TokenizeBody,
        large={"prompt": partial(_text, "prompt"), "messages": _conversation, "tools": _chat_tools},
    )


def detokenize(model: ServedModel) -> Shape:
    """``POST /detokenize``."""
    check = partial(tokenization.check_num_ids, model)
    return Shape(
        model=tokenization.DetokenizeBody,
        large={"tokens": lambda data: Decoded(json_pieces.token_ids(data, check))},
    )


def control(kind: type[msgspec.Struct], _: ServedModel) -> Shape:
    """A control call, of the weights or of the engine; unknown fields are ignored."""
    return Shape(model=kind, large=_CONTROL)


# --- prompts and options ---


def _prompt(param: str, model: ServedModel, data: bytes) -> Any:
    """Decode a prompt, or a batch of them, as the field ``param`` takes it: texts, token ids or both.

    Its first bytes tell which of the four forms it has. Items are counted before they are decoded.
    """

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


def _token_ids(param: str, model: ServedModel, data: bytes) -> Decoded:
    """Decode the token ids of one prompt, the field ``param``, which have to fit the context."""
    check = partial(check_prompt_len, limits=model.encoder.limits, param=param)
    return Decoded(json_pieces.token_ids(data, check))


def _text(param: str, data: bytes) -> Any:
    """Decode a string, the only form that the field ``param`` takes."""
    if not data.startswith(b'"'):
        raise InvalidRequestError(f"{param}: expected a string", param=param)
    return msgspec.json.decode(data)


def strings_of(param: str, most: int, data: bytes) -> Any:
    """Decode a string, or a list of at most ``most`` strings; ``param`` is the field, for errors."""
    if data.startswith(b'"'):
        return msgspec.json.decode(data)
    return json_pieces.strings(data, partial(_check_count, param, most))


def _sampling(check_biases: Callable[[int], None]) -> dict[str, Decode]:
    """Returns how the sampling options that may be large are decoded.

    ``check_biases`` raises an error for a number of entries of ``logit_bias`` that is too high.
    """
    return {
        "logit_bias": lambda data: json_pieces.members(data, _biases, check_biases),
        **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _option_ids),
        "stop": partial(strings_of, "stop", MAX_STOPS),
        **{name: partial(grammar_of, name) for name in FIELD_NAMES},
    }


def _option_ids(data: bytes) -> Decoded:
    """Decode a list of token ids that is an option."""
    return Decoded(json_pieces.token_ids(data, check_num_entries).tolist())


def grammar_of(param: str, data: bytes) -> Any:
    """Decode a field with a schema or a grammar; the size bound keeps the call short."""
    if len(data) > MAX_GRAMMAR_JSON:
        text = f"{param} has {len(data)} bytes of JSON; at most {MAX_GRAMMAR_JSON} are allowed"
        raise InvalidRequestError(text, param=param)
    return msgspec.json.decode(data)


def _params(most: int, data: bytes) -> Any:
    """Decode ``sampling_params``: one object, or a list of at most ``most``, one per prompt."""
    if data.startswith(b"{"):
        return decode_fields(data, _PARAMS)
    if json_pieces.first_byte(data) not in b"{]":
        raise MisfitError
    ranges = json_pieces.cut(data, most, "objects")
    return [decode_fields(data[start:end].strip(), _PARAMS) for start, end in ranges]


def _one_params(shape: Shape, data: bytes) -> Any:
    """Decode ``sampling_params`` where it is one object, of fields as ``shape`` has them."""
    if not data.startswith(b"{"):
        raise InvalidRequestError("sampling_params: expected an object", param="sampling_params")
    return decode_fields(data, shape)


def _conversation(data: bytes) -> Decoded:
    """Decode ``messages``; the strings are counted first, because one message may have many parts."""
    if (count := json_pieces.count_strings(data)) > MAX_STRINGS:
        raise too_many("messages", count, MAX_STRINGS, "strings, the names of fields included")
    return Decoded(structs_of("messages", _messages, MAX_MESSAGES, data))


def _input(data: bytes) -> Any:
    """Decode ``input``: a string, or items, which are bounded as messages are."""
    if data.startswith(b'"'):
        return msgspec.json.decode(data)
    if not data.startswith(b"["):
        raise MisfitError
    if (count := json_pieces.count_strings(data)) > MAX_STRINGS:
        raise too_many("input", count, MAX_STRINGS, "strings, the names of fields included")
    return Decoded(structs_of("input", _response_items, MAX_MESSAGES, data, response_fields.RULES))


def _text_config(data: bytes) -> Any:
    """Decode ``text`` of a response, which may have a schema."""
    try:
        return grammar_of("text", data)
    except msgspec.DecodeError as error:
        raise not_json(error) from None


def tools_of(decoder: msgspec.json.Decoder[list[T]], rules: Mapping[str, str], data: bytes) -> Decoded:
    """Decode ``tools``, one after the other."""
    if not data.startswith(b"["):
        raise MisfitError
    found: list[T] = []
    for index, (start, end) in enumerate(cut(data, MAX_TOOLS, "tools")):
        if end - start > MAX_TOOL_BYTES:
            text = f"tools[{index}] has {end - start} bytes of JSON; at most {MAX_TOOL_BYTES} are allowed"
            raise InvalidRequestError(text, param=f"tools[{index}]")
        try:
            found += decoder.decode(b"[%b]" % data[start:end])
        except msgspec.ValidationError as error:
            raise misfit(error, "tools", rules, index) from None
    return Decoded(found)


_chat_tools = partial(tools_of, _tool_list, openai.RULES)


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


# --- tensors ---


def _all_buckets(data: bytes) -> Decoded:
    """Decode ``buckets``: in a bucket, names, types and shapes are lists with an item per tensor.

    A bucket has three field names, and each tensor has a name and a type: that bounds the strings.
    """
    most = 2 * MAX_TENSORS + 3 * MAX_BUCKETS
    if (count := json_pieces.count(data, b'"') // 2) > most:
        raise too_many("buckets", count, most, "strings, the names of fields included")
    found = structs_of("buckets", _buckets, MAX_BUCKETS, data)
    if len(found) > MAX_BUCKETS:
        raise too_many("buckets", len(found), MAX_BUCKETS, "buckets")
    return Decoded([_bucket(each) for each in found])


def _bucket(bucket: _Bucket) -> Bucket:
    """Decode the three lists of a bucket, which were left as JSON because each may be large."""
    names, dtypes, shapes = _names(bytes(bucket.names)), _names(bytes(bucket.dtypes)), bytes(bucket.shapes)
    return Bucket(names=names.value, dtypes=dtypes.value, shapes=_shapes(shapes).value)


def _names(data: bytes) -> Decoded:
    """Decode the names, or the types, of at most ``MAX_TENSORS`` tensors."""
    check = partial(_check_count, "a list of names", MAX_TENSORS)
    found = json_pieces.strings(data, check)
    check(len(found))  # before it was decoded, an escape could hide strings from the count
    return Decoded(found)


def _shapes(data: bytes) -> Decoded:
    check = partial(_check_count, "a list of shapes", MAX_TENSORS)
    return Decoded(json_pieces.arrays(data, _shape, check))


def _shape(data: bytes) -> list[int]:
    """Decode one tensor's shape; the size bound keeps the call short."""
    if len(data) > json_pieces.PIECE:
        raise MisfitError
    return _sizes.decode(data)


def _all_checksums(data: bytes) -> Decoded:
    """Decode ``checksums``, from names of tensors to unsigned integers of 64 bits."""
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
    refused=unsupported("sampling"),
)
_TOKEN_PARAMS = Shape(
    model=tokens.TokenSampling,
    large=_sampling(check_num_entries),
    refused=unsupported("token_sampling"),
)
_UPDATE_INFO = Shape(
    model=UpdateInfo,
    large={"names": _names, "dtype_names": _names, "shapes": _shapes},
    refused=frozenset(("ipc_handles", "ipc_handles_pickled")),
)
_CONTROL: dict[str, Decode] = {
    "request_ids": partial(strings_of, "request_ids", MAX_ABORTED),
    "update_info": lambda data: Decoded(decode_fields(data, _UPDATE_INFO)),
    "buckets": _all_buckets,
    "names": _names,
    "dtypes": _names,
    "shapes": _shapes,
    "checksums": _all_checksums,
    "serialized_named_tensors": partial(strings_of, "serialized_named_tensors", MAX_PAYLOADS),
}


# --- any body ---


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
