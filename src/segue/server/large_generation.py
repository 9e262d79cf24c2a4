"""How large bodies of the routes that generate or tokenize are decoded; see :mod:`segue.server.large_body`.

:mod:`segue.server.large_messages` has those of Anthropic's routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from segue.api import native, tokenization
from segue.api import token_generate as tokens
from segue.api.asks_nothing import harmless, unsupported
from segue.api.guided import FIELD_NAMES
from segue.api.openai import requests as openai
from segue.api.openai.chat_fields import MAX_TOOLS, Tool
from segue.api.openai.responses import fields as response_fields
from segue.api.validation import Decoded, check_batch, misfit
from segue.errors import InvalidRequestError
from segue.frontend.sampling_options import MAX_STOPS, check_num_entries
from segue.frontend.tokenizer import ServedModel, check_prompt_len
from segue.guided.grammars import MAX_GRAMMAR_BYTES
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError, cut
from segue.server.large_body import Decode, Shape, decode_fields, not_json, strings_of, structs_of, too_many

T = TypeVar("T")
MAX_GRAMMAR_JSON = 2 * MAX_GRAMMAR_BYTES  # bytes of a field that guides the output: escapes take more
MAX_STRINGS = 1 << 18  # of a conversation, the names of its messages' fields included
MAX_MESSAGES = MAX_STRINGS // 4
MAX_TOOL_BYTES = 1 << 16  # of one tool
_messages = msgspec.json.Decoder(list[openai.ChatMessage])
_tool_list = msgspec.json.Decoder(list[Tool], float_hook=float)
_response_items = msgspec.json.Decoder(list[response_fields.InputItem])
_response_tools = msgspec.json.Decoder(list[response_fields.ResponsesTool], float_hook=float)
_biases = msgspec.json.Decoder(dict[str, int | float])


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
