"""How large bodies of Anthropic's routes are decoded; see :mod:`segue.server.large_body`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from segue.api.anthropic.requests import (
    CountTokensRequest,
    InputTool,
    MessagesRequest,
    OnlyTextBlock,
    UndecodedMessage,
)
from segue.api.asks_nothing import harmless, unsupported
from segue.api.openai import requests as openai
from segue.api.validation import Decoded
from segue.frontend.sampling_options import MAX_STOPS
from segue.frontend.tokenizer import ServedModel
from segue.server import json_pieces
from segue.server.json_pieces import MisfitError
from segue.server.large_body import Shape, strings_of, structs_of, too_many
from segue.server.large_generation import MAX_MESSAGES, MAX_STRINGS, grammar_of, tools_of

# Opening brackets in messages, those in texts included. Inputs of calls may be passed over in one call only,
# and a text has hardly that many.
MAX_BRACKETS = 1 << 20
_messages = msgspec.json.Decoder(list[UndecodedMessage])
_texts = msgspec.json.Decoder(list[OnlyTextBlock])
_tools = msgspec.json.Decoder(list[InputTool], float_hook=float)


def messages(model: ServedModel) -> Shape:
    """``POST /v1/messages``."""
    return _shape(MessagesRequest)


def count_tokens(model: ServedModel) -> Shape:
    """``POST /v1/messages/count_tokens``."""
    return _shape(CountTokensRequest)


def _shape(kind: type[CountTokensRequest]) -> Shape:
    return Shape(
        model=kind,
        large={
            "messages": partial(_blocks, "messages", _messages),
            "system": _system,
            "tools": partial(tools_of, _tools, openai.RULES),
            "stop_sequences": partial(strings_of, "stop_sequences", MAX_STOPS),
            "output_config": partial(grammar_of, "output_config"),
        },
        skipped=harmless("messages"),
        refused=unsupported("messages"),
    )


def _blocks(param: str, decoder: msgspec.json.Decoder[list[Any]], data: bytes) -> Decoded:
    """Decode a list of messages or of blocks; strings and brackets are counted first."""
    if (count := json_pieces.count_strings(data)) > MAX_STRINGS:
        raise too_many(param, count, MAX_STRINGS, "strings, the names of fields included")
    brackets = json_pieces.count(data, b"[") + json_pieces.count(data, b"{")
    if brackets > MAX_BRACKETS:
        raise too_many(param, brackets, MAX_BRACKETS, "opening brackets")
    return Decoded(structs_of(param, decoder, MAX_MESSAGES, data, {}))


def _system(data: bytes) -> Any:
    """Decode ``system``: a string, or a list of blocks of text."""
    if data.startswith(b'"'):
        return msgspec.json.decode(data)
    if not data.startswith(b"["):
        raise MisfitError
    return _blocks("system", _texts, data)
