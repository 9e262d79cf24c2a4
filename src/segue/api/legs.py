"""The requests of a leg: those of the client's body, with what the router has decided about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from segue.errors import InvalidRequestError, WrongRoleError, invalid_value, short_repr
from segue.frontend.choices import SEED_LIMIT
from segue.frontend.request import GenerateRequest
from segue.frontend.thread_pool import turn
from segue.frontend.tokenizer import PromptEncoder
from segue.messages.leg import Leg, LegOutput, unpack_logprobs
from segue.messages.requests import Finished, Handoff, unpack_ids

MOST_ROOMS = 1 << 63
_PEER = re.compile(r".+:([0-9]{1,5})")
_decode = msgspec.msgpack.Decoder(Leg).decode
_decode_end = msgspec.msgpack.Decoder(Finished).decode
pack_end = msgspec.msgpack.Encoder().encode  # of a `Finished`, for `LegOutput.end`


def parse_leg(data: bytes) -> Leg:
    """Decode a leg and check the fields that depend on its kind; raises InvalidRequestError."""
    try:
        leg = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"this is no leg of a router (segue.messages.leg): {error}") from None
    if leg.kind != "whole" and not leg.room:
        raise invalid_value("room", leg.room, f"a leg of kind {leg.kind} needs a number above 0")
    port = _PEER.fullmatch(leg.peer)
    if leg.kind == "decode" and not (port and 0 < int(port[1]) <= 65535):
        raise invalid_value("peer", leg.peer, "a leg of kind decode needs the prefill worker's host:port")
    return leg


def check_role(leg: Leg, role: str) -> None:
    """Raise WrongRoleError for a leg that an engine of this ``--role`` does not take.

    Whole requests are the scheduler's business: a prefill engine takes those that need one token.
    """
    if leg.kind not in ("whole", role):
        text = f"this engine's --role is {role}, and the leg is of kind {leg.kind}; send it to an engine with"
        raise WrongRoleError(f"{text} --role {leg.kind}")


async def leg_requests(
    leg: Leg, requests: Sequence[GenerateRequest], encoder: PromptEncoder, *, is_trusted: bool = False
) -> list[GenerateRequest]:
    """Return the requests of the client's body as the leg wants them.

    With ``is_trusted`` whoever sends the leg may control this engine. Only then is it believed that another
    engine decides about a grammar: the one that has made the outputs, or the prefill engine of the pair.

    Handoffs and seeds depend on the leg and on the prompt's index alone, so both workers of a pair have the
    same ones, and so has every later leg of the request.

    Raises:
        InvalidRequestError: the body names a prefill engine itself, or the outputs do not fit the requests.
    """
    if leg.kind != "whole" and any(request.bootstrap is not None for request in requests):
        text = "a router chooses the prefill engine; leave the bootstrap fields out, or send to an engine"
        raise InvalidRequestError(f"bootstrap_room: {text}", param="bootstrap_room")
    outputs: dict[int, LegOutput] = {}
    for output in leg.outputs:
        if not 0 <= output.index < len(requests) or output.index in outputs:
            text = f"outputs of prompt {output.index}, of {len(requests)}; each prompt may have them once"
            raise InvalidRequestError(f"{text}, and the first has the index 0")
        outputs[output.index] = output
    is_accepted = is_trusted and (leg.kind == "decode" or bool(leg.outputs))
    found = []
    for index, request in enumerate(requests):
        seed = (leg.seed + index) % SEED_LIMIT
        handoff = _handoff(leg, index)
        request = replace(request, leg=leg.id, handoff=handoff, seed=seed, is_accepted=is_accepted)
        if (given := outputs.get(index)) is not None:
            request = await _begun(request, given, encoder)
        found.append(request)
        await turn(index)
    return found


def _handoff(leg: Leg, index: int) -> Handoff | None:
    """Return the part of a prompt that this worker does; None: all of it.

    The decode worker does not compute the prompt itself if its KV does not come: without the first token the
    request fails, and the router chooses another pair.
    """
    if leg.kind == "whole":
        return None
    peer = leg.peer if leg.kind == "decode" else ""
    return Handoff(id=(leg.room + index) % MOST_ROOMS, part=leg.kind, peer=peer, whole=False)


async def _begun(request: GenerateRequest, given: LegOutput, encoder: PromptEncoder) -> GenerateRequest:
    """Return a request that begins with the output that the client has already."""
    num_ids, rest = divmod(len(given.ids), 4)
    if rest or num_ids >= encoder.limits.max_seq_len:
        text = f"outputs: {len(given.ids)} bytes are not the ids of fewer than {encoder.limits.max_seq_len}"
        raise InvalidRequestError(f"{text} tokens, 4 bytes each")
    ids = unpack_ids(given.ids)
    logprobs = await encoder.thread_pool.build(
        lambda: unpack_logprobs(given.logprobs, ids) if given.logprobs else [],
        len(given.logprobs) // 9,  # bytes of the smallest record
    )
    return replace(request, outputs=ids, output_logprobs=logprobs, output_end=_end(given))


def _end(given: LegOutput) -> Finished | None:
    """Return how an output has ended, as a worker has encoded it."""
    if not given.end:
        return None
    try:
        end = _decode_end(given.end)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = (
            f"outputs: the end of prompt {given.index} is {short_repr(given.end)}, which no worker has sent"
        )
        raise InvalidRequestError(f"{text}: {error}") from None
    if end.error is not None or end.reason in ("error", "handoff"):
        raise InvalidRequestError(f"outputs: prompt {given.index} has ended with {end.reason}; send it anew")
    return end
