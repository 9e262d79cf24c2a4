"""What a router knows of a request, without a tokenizer: from its body's bytes, and from earlier replies.

It only decides where a request goes; the worker counts exactly, and checks the body.
"""

from __future__ import annotations

import re

import msgspec

from segue.router.fleet import is_common
from segue.router.index import Keys, keys_of

FIRST_GUESS = 4.0  # bytes per token, before the first reply
LEARNED = 0.1  # weight of one more reply
SEVERAL = 2  # output tokens of a request that may have more than one: how many it will have nobody knows
_NUM_TOKENS = re.compile(rb'"prompt_tokens": ?(\d+)')
_CACHED_TOKENS = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')
# In `/v1/responses` this counts all tokens of the prompt, in Anthropic's API those that no cache had.
_INPUT_TOKENS = re.compile(rb'"input_tokens": ?(\d+)')
_READ_TOKENS = re.compile(rb'"cache_read_input_tokens": ?(\d+)')
_EMPTY = msgspec.Raw(b"")


class _Body(msgspec.Struct, frozen=True):
    """The fields of all dialects that matter here, not decoded."""

    messages: msgspec.Raw = _EMPTY
    system: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    text: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    token_ids: msgspec.Raw = _EMPTY
    tokens: msgspec.Raw = _EMPTY
    stream: msgspec.Raw = _EMPTY
    max_tokens: msgspec.Raw = _EMPTY
    max_completion_tokens: msgspec.Raw = _EMPTY
    max_output_tokens: msgspec.Raw = _EMPTY
    sampling_params: msgspec.Raw = _EMPTY
    cache_salt: msgspec.Raw = _EMPTY


class _Params(msgspec.Struct, frozen=True):
    """The field of `sampling_params` that matters here, as the native API and vLLM's name it."""

    max_new_tokens: msgspec.Raw = _EMPTY
    max_tokens: msgspec.Raw = _EMPTY


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the body of a request says, as far as a router needs it."""

    num_tokens: int  # of all prompts together, estimated; at least 1
    num_bytes: int  # of their text; 0: nothing can be learned from the reply
    prompt_bytes: int = 0  # of all prompts together, as they stand in the body
    keys: Keys = []  # of their blocks, for the prefix index
    native_route: str = ""  # the route, if not every worker has it
    is_stream: bool = False
    max_new_tokens: int = SEVERAL  # 1: at most one; or SEVERAL


_decode = msgspec.json.Decoder(_Body).decode
_decode_params = msgspec.json.Decoder(_Params).decode


class BytesPerToken:
    """Learns, for each route, how many bytes of a prompt make a token."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def rate(self, path: str) -> float:
        """Returns the bytes per token on a route."""
        return self._rates.get(path, FIRST_GUESS)

    def facts(self, path: str, body: bytes) -> RequestFacts:
        """Returns what a request's body says.

        A body that is not JSON counts as text: its worker refuses it.
        """
        try:
            fields = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = _Body(text=msgspec.Raw(body))
        ids = _json(fields.input_ids, fields.token_ids, fields.tokens)
        text = _json(fields.input, fields.messages, fields.prompt, fields.text)
        # Templates put the tools before the messages; instructions and a system text become the first one.
        if (fields.messages or fields.input) and not ids:
            text = _json(fields.tools) + _json(fields.instructions) + _json(fields.system) + text
        if ids or _is_ids(text):
            text = ids or text
            num_tokens, num_bytes = text.count(b",") + 1, 0
        else:
            num_tokens, num_bytes = max(1, round(len(text) / self.rate(path))), len(text)
            # The replies to a native batch count the tokens of each prompt apart.
            if _json(fields.text)[:1] == b"[":
                num_bytes = 0
        return RequestFacts(
            num_tokens=num_tokens,
            num_bytes=num_bytes,
            prompt_bytes=len(text),
            keys=keys_of(text, _json(fields.cache_salt)),
            native_route="" if is_common(path) else path,
            is_stream=bytes(fields.stream) == b"true",
            max_new_tokens=_max_new_tokens(fields, by_vllm=bool(_json(fields.token_ids))),
        )

    def learn(self, path: str, facts: RequestFacts, reply: bytes) -> None:
        """Take the number of prompt tokens from a reply, or from a part of it; nothing if it has none."""
        if not facts.num_bytes or not (tokens := prompt_tokens(reply)):
            return
        rate = self.rate(path)
        self._rates[path] = rate + LEARNED * (facts.num_bytes / tokens - rate)


def prompt_tokens(reply: bytes) -> int | None:
    """Returns how many tokens a prompt had; None: the reply does not say it."""
    if (found := _last(_NUM_TOKENS, reply)) is None and (found := _last(_INPUT_TOKENS, reply)) is not None:
        found += _last(_READ_TOKENS, reply) or 0
    return found


def cached_tokens(reply: bytes) -> int | None:
    """Returns how many prompt tokens a worker had in its prefix cache; None: the reply does not say it."""
    return _last(_CACHED_TOKENS, reply)


def _last(pattern: re.Pattern[bytes], reply: bytes) -> int | None:
    """Returns the last number that a pattern finds: events of one payload may count the same tokens twice."""
    found = pattern.findall(reply)
    return int(found[-1]) if found else None


def _max_new_tokens(fields: _Body, by_vllm: bool) -> int:
    """Returns 1 if the body asks for at most one token, else SEVERAL; of a list of parameters, SEVERAL.

    ``by_vllm``: its parameters have vLLM's names.
    """
    limit = _json(fields.max_completion_tokens, fields.max_output_tokens, fields.max_tokens)
    if given := _json(fields.sampling_params):
        try:
            params = _decode_params(given)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return SEVERAL
        limit = _json(params.max_tokens if by_vllm else params.max_new_tokens)
    return 1 if limit in (b"0", b"1") else SEVERAL


def _json(*fields: msgspec.Raw) -> bytes:
    """Returns the JSON of the first field that is there and not null; empty: there is none."""
    return next((data for data in map(bytes, fields) if data not in (b"", b"null")), b"")


def _is_ids(text: bytes) -> bool:
    """Whether the JSON of a prompt is a list of token ids, or of such lists."""
    return text[:1] == b"[" and text.lstrip(b"[ \n")[:1].isdigit()
