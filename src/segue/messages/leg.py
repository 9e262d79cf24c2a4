"""What a router sends a worker for one client's request, and the frames that the worker answers with.

A *leg* is one request at one worker. The router sends it by ``POST /leg``, as msgpack, with the content type
``application/json`` or none: the guard against web pages lets no other type pass. A leg carries the client's
body as it came, which the worker parses: the router knows neither templates nor tokens. If the worker takes
the request, it answers with status 200 and frames; else with the error that the client's own route would
give.

A frame is its length in 4 bytes, big-endian, and then msgpack. Frames name every token that the payload
shows, so that the router can send the request to another worker when this one dies: the second leg has these
tokens as ``outputs``, and its payload begins where that of the first one ended. To make them, the router
joins what the frames of all legs named, in their order: ids with ids, logprobs with logprobs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from segue.errors import InvalidRequestError
from segue.messages.requests import TokenLogprob

LEG_PATH = "/leg"
LEG_CONTENT = "application/vnd.segue.leg"  # content type of a reply that consists of frames
# A frame holds a whole reply, or the next event of a stream, whose texts and logprobs `/generate` sums up.
MOST_FRAME_BYTES = 1 << 30
MOST_OUTPUTS = 1 << 16  # of a leg, one per prompt
MOST_ID_CHARS = 200  # of a leg's id: each prompt adds its number, and a rid has at most 256 characters

# Which part of a request a worker does. whole: all of it. prefill: the prompt and the next token, whose KV
# it then hands over; the payload is empty. decode: it takes the KV over, and answers the client.
LegKind = Literal["whole", "prefill", "decode"]

# Codes of errors after which another worker, or another pair of workers, may succeed; whether the error comes
# as the answer to a leg or as `LegFailed`.
RETRYABLE = frozenset(
    {
        *("engine_dead", "engine_hung", "engine_not_ready", "draining", "overloaded", "paused"),
        *(
            "weights_poisoned",
            "weights_released",
            "kv_peer_lost",
            "kv_capacity_lost",
            "guide_lost",
            "stale_epoch",
            "wrong_role",
        ),
    }
)


class LegOutput(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were generated for one prompt of the request."""

    index: int  # of the prompt in the request's batch
    ids: bytes = b""  # int32, little-endian
    logprobs: bytes = b""  # of these tokens, by `pack_logprobs`; b"": the reply shows none
    end: bytes = b""  # how the prompt's output ended, as the worker encodes it; b"": it goes on


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One request at one worker."""

    path: str  # the client's route, such as /v1/chat/completions
    body: bytes  # as the client sent it
    kind: LegKind
    epoch: int = 0  # of the worker that is meant; another one refuses the leg
    # Of the reply on OpenAI's routes, such as "chatcmpl-…", and the beginning of each request's rid. A body
    # may have ids of its own, which are used instead.
    id: Annotated[str, Meta(min_length=1, max_length=MOST_ID_CHARS)]
    created: int  # seconds since 1970, of the reply on OpenAI's routes
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # from which requests without a seed get theirs
    # From which each prompt's handoff gets its number, drawn anew for each pair of legs; 0: kind is whole.
    room: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    peer: str = ""  # where the prefill worker accepts connections, as host:port; "": kind is not decode
    # What the client has already of each prompt that has any, at most one per prompt.
    outputs: Annotated[list[LegOutput], Meta(max_length=MOST_OUTPUTS)] = []


class Data(msgspec.Struct, frozen=True, tag=0, array_like=True):
    """A part of the reply. One without payload and outputs only shows that the worker lives."""

    payload: bytes  # bytes for the client; b"" where the reply is not a stream
    outputs: list[LegOutput]  # the tokens since the frame before


class End(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The last frame of a leg that went well."""

    payload: bytes  # the whole body where the reply is not a stream; else its last bytes


class LegFailed(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """The last frame of a leg that failed after it had begun."""

    status: int  # of the error, as the client's route would have answered it
    code: str  # of the error; "": it has none
    retryable: bool  # whether another worker may succeed
    payload: bytes  # what the client gets if nobody tries again: an event of a stream, or a whole body


Frame = Data | End | LegFailed

_encode = msgspec.msgpack.Encoder().encode
_RECORD, _TOP = struct.Struct("<dB"), struct.Struct("<id")


def pack_frame(frame: Frame) -> bytes:
    """Returns a frame as it is sent, its length first; raises ValueError above ``MOST_FRAME_BYTES``."""
    data = _encode(frame)
    if len(data) > MOST_FRAME_BYTES:
        raise ValueError(f"a frame has {len(data)} bytes; at most {MOST_FRAME_BYTES} are allowed")
    return len(data).to_bytes(4, "big") + data


def pack_logprobs(entries: Sequence[TokenLogprob]) -> bytes:
    """Returns the logprobs of tokens as one record per token, so that records can simply be joined.

    A record is the token's logprob (float64), the number of likeliest tokens (1 byte), and of each of those
    its id (int32) and logprob (float64). The token's own id is not in it.
    """
    parts = []
    for entry in entries:
        parts.append(_RECORD.pack(entry.logprob, len(entry.top)))
        parts += [_TOP.pack(token, logprob) for token, logprob in entry.top]
    return b"".join(parts)


def unpack_logprobs(data: bytes, ids: Sequence[int]) -> list[TokenLogprob]:
    """Returns the logprobs of the tokens ``ids``: the inverse of :func:`pack_logprobs`.

    Raises:
        InvalidRequestError: the data are not exactly one record per token.
    """
    entries, at = [], 0
    try:
        for token in ids:
            logprob, count = _RECORD.unpack_from(data, at)
            begin, at = at + _RECORD.size, at + _RECORD.size + count * _TOP.size
            entries.append(TokenLogprob(token, logprob, list(_TOP.iter_unpack(data[begin:at]))))
    except struct.error:
        at = -1
    if at != len(data):
        text = (
            f"outputs: {len(data)} bytes of logprobs are not those of {len(ids)} tokens; send one record each"
        )
        raise InvalidRequestError(text)
    return entries
