"""How two workers find out whether they fit together, and show that they know the same key.

    HELLO -> PROOF -> DONE

Both sides send ``Hello`` at once. The side that opened the connection then sends its ``Proof``, and the other
one answers with its own after it has verified that one: a process without the key gets no proof that it could
test guesses on. The proofs authenticate the two ends at the start; the messages after them are neither
encrypted nor signed, so the network between two hosts has to be a trusted one.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Callable, Iterator

import msgspec

from segue.disagg.frames import printable
from segue.disagg.layout import fits
from segue.disagg.transports.choice import TRAITS, TransportTraits
from segue.errors import (
    KVKeyError,
    KVMismatchError,
    KVProtocolError,
    KVRefusedError,
    short_repr,
)
from segue.messages.kv import MAX_LARGE_MESSAGE_BYTES, MAX_MESSAGE_BYTES, Bye, Hello, Proof

# What must be equal, and how to make it so.
SAME_MODEL = "give both the same --model, --load-format and --quantization"
MUST_BE_EQUAL = {
    "protocol": "run the same version of Segue on both",
    "model": SAME_MODEL,
    "tokenizer": "load both from the same checkpoint: their files tokenizer.json differ",
    "layers": SAME_MODEL,
    "kv_heads": SAME_MODEL,
    "head_dim": SAME_MODEL,
    "dtype": "give both the same --dtype",
    "kv_cache": "give both the same --kv-cache-dtype, and the same checkpoint, which may have scales for FP8",
    "page_size": "give both the same --page-size",
    "deterministic": "give --deterministic to both or to neither",
}
SAME_NUMERICS = "run both on the same device and software, with the same --tp, or without --deterministic"
SAME_KEY = "start both with the same --pd-key"
PROOF_LABEL = b"segue kv proof"


class LinkSide(enum.Enum):
    """Which end of a connection a worker is; the value is part of what it signs."""

    CONNECTING = b"connecting"
    ACCEPTING = b"accepting"

    @property
    def other(self) -> LinkSide:
        """The other end."""
        return LinkSide.ACCEPTING if self is LinkSide.CONNECTING else LinkSide.CONNECTING


class HandshakePhase(enum.Enum):
    """What has to come next from the other side."""

    HELLO = enum.auto()
    PROOF = enum.auto()
    DONE = enum.auto()


# The message that ends a phase, and the phase that follows.
EXPECTED: dict[HandshakePhase, tuple[type[Hello | Proof], HandshakePhase]] = {
    HandshakePhase.HELLO: (Hello, HandshakePhase.PROOF),
    HandshakePhase.PROOF: (Proof, HandshakePhase.DONE),
}


class _AnyHello(msgspec.Struct, tag="Hello"):
    """What every version's ``Hello`` has."""

    protocol: int


_decode_opening: Callable[[bytes], Hello | Proof] = msgspec.msgpack.Decoder(Hello | Proof).decode
_decode_any_hello = msgspec.msgpack.Decoder(_AnyHello).decode
_decode_bye: Callable[[bytes], Bye] = msgspec.msgpack.Decoder(Bye).decode
_encode = msgspec.msgpack.Encoder().encode


class Handshake:
    """One side's part of the handshake, without its socket.

    ``hello`` has a new nonce. ``is_local`` says that both ends are on loopback or unix addresses, where no
    key is needed. :attr:`opening` is the encoded ``Hello``, which is sent first of all.

    Raises:
        KVProtocolError: ``hello`` is over its limit.
    """

    def __init__(self, side: LinkSide, hello: Hello, key: bytes | None, *, is_local: bool) -> None:
        self.phase = HandshakePhase.HELLO
        self.opening = _encode(hello)
        if len(self.opening) > MAX_LARGE_MESSAGE_BYTES:
            raise KVProtocolError(
                f"this worker's Hello has {len(self.opening)} bytes; its limit is {MAX_LARGE_MESSAGE_BYTES}. "
                "Offer fewer transports, or run fewer ranks"
            )
        self.theirs: Hello | None = None  # known from phase PROOF on
        self._side = side
        self._ours = hello
        self._key = key
        self._is_local = is_local
        self._hellos = (b"", b"")  # both as they were sent, that of the connecting side first

    @property
    def session(self) -> str:
        """The name of the connection, which is the same on both sides and never occurs again."""
        return hashlib.sha256(b"".join(self._hellos)).hexdigest()[:32]

    def take(self, body: bytes) -> bytes | None:
        """Take the other side's next message, and return the encoded answer if one is due.

        Raises:
            KVProtocolError: it is not the message that has to come now.
            KVMismatchError: the workers differ in what must be equal.
            KVKeyError: a key is missing, or the proof does not fit.
            KVRefusedError: the other side says that it refuses the connection.
        """
        message = _decode(body, self._ours)
        expected, following = EXPECTED[self.phase]
        if not isinstance(message, expected):
            raise KVProtocolError(
                f"{type(message).__name__} came during the handshake, where {expected.__name__} has to come; "
                "run the same version of Segue on both"
            )
        answer = self._on_hello(message, body) if isinstance(message, Hello) else self._on_proof(message)
        self.phase = following
        return answer

    def _on_hello(self, theirs: Hello, body: bytes) -> bytes | None:
        compare(self._ours, theirs)
        if self._key is None and not self._is_local:
            raise KVKeyError(f"a connection between two hosts needs a key, and this one has none; {SAME_KEY}")
        self.theirs = theirs
        connecting = self._side is LinkSide.CONNECTING
        self._hellos = (self.opening, body) if connecting else (body, self.opening)
        return self._proof() if connecting else None

    def _on_proof(self, proof: Proof) -> bytes | None:
        if (self._key is None) != (not proof.mac):
            with_key, without = ("here", "there") if self._key is not None else ("there", "here")
            raise KVKeyError(f"there is a key {with_key} and none {without}; {SAME_KEY}")
        if self._key is not None and not verify(self._key, self._side.other, *self._hellos, proof.mac):
            raise KVKeyError(f"the proof of the connection's other end does not fit the key here; {SAME_KEY}")
        return self._proof() if self._side is LinkSide.ACCEPTING else None

    def _proof(self) -> bytes:
        mac = b"" if self._key is None else sign(self._key, self._side, *self._hellos)
        return _encode(Proof(mac))


def _decode(body: bytes, ours: Hello) -> Hello | Proof:
    """Returns a message of the handshake. No other one is decoded: its sender has not proven anything yet.

    Raises:
        KVProtocolError: it is none, or one over its limit.
        KVMismatchError: it is the ``Hello`` of another version.
        KVRefusedError: it is a ``Bye``.
    """
    is_array = bool(body) and body[0] & 0xF0 == 0x90  # as all messages but `Hello` and `Proof`
    try:
        message = _decode_bye(body) if is_array else _decode_opening(body)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's errors, and invalid UTF-8
        _check_protocol(body, ours)
        reason = printable(str(error))
        raise KVProtocolError(
            f"a frame of {len(body)} bytes is no message of a handshake ({reason}); connect prefill and "
            "decode workers of the same version of Segue"
        ) from None
    if isinstance(message, Bye):
        raise KVRefusedError(f"the connection was refused: {printable(message.reason)}")
    if isinstance(message, Proof) and len(body) > MAX_MESSAGE_BYTES:
        raise KVProtocolError(f"Proof has {len(body)} bytes; its limit is {MAX_MESSAGE_BYTES}")
    return message


def _check_protocol(body: bytes, ours: Hello) -> None:
    """Raise KVMismatchError if ``body`` is the ``Hello`` of another version, which may look different."""
    try:
        protocol = _decode_any_hello(body).protocol
    except (ValueError, RecursionError):
        return
    if protocol != ours.protocol:
        raise KVMismatchError(_difference("protocol", ours.protocol, protocol, MUST_BE_EQUAL["protocol"]))


def compare(ours: Hello, theirs: Hello) -> None:
    """Check that KV of one worker is of use to the other one. Both sides come to the same result.

    Raises:
        KVMismatchError: something must be equal and is not; the text has both values of everything that
            differs, and the option to change.
        KVProtocolError: ``theirs`` contradicts itself.
    """
    if theirs.tp != len(theirs.ranks):
        raise KVProtocolError(
            f"Hello has tp={theirs.tp} and addresses of {len(theirs.ranks)} ranks; it must have one per rank"
        )
    if not fits(theirs.tp, theirs.kv_heads):
        raise KVProtocolError(
            f"Hello has tp={theirs.tp} and kv_heads={theirs.kv_heads}; one of the two must divide the other"
        )
    if problems := list(_problems(ours, theirs)):
        names = f"{short_repr(ours.engine_id)} here and {short_repr(theirs.engine_id)} there"
        raise KVMismatchError(f"the workers {names} do not fit together: {'. '.join(problems)}")


def _problems(ours: Hello, theirs: Hello) -> Iterator[str]:
    for name, remedy in MUST_BE_EQUAL.items():
        if getattr(ours, name) != getattr(theirs, name):
            yield _difference(name, getattr(ours, name), getattr(theirs, name), remedy)
    if (ours.deterministic or theirs.deterministic) and ours.numerics != theirs.numerics:
        yield _difference("numerics", ours.numerics, theirs.numerics, SAME_NUMERICS)
    if ours.incarnation == theirs.incarnation:
        yield f"incarnation is {short_repr(ours.incarnation)} here and there; connect to another worker"
    ways = [
        (source, target)
        for source, target in ((ours, theirs), (theirs, ours))
        if "prefill" in source.work and "decode" in target.work
    ]
    if not ways:
        rule = "one of them must prefill and the other one decode; change --role of one"
        yield _difference("work", ours.work, theirs.work, rule)
    elif missing := [way for way in ways if not common_transports(*way)]:
        yield from _transport_problems(*missing[0], ours, theirs)


def _transport_problems(source: Hello, target: Hello, ours: Hello, theirs: Hello) -> Iterator[str]:
    """Yields why ``source`` has no way of writing into ``target``'s KV pools; these are the two workers."""
    if _shared_kinds(source, target):  # all of these need access to a peer's GPU
        hidden, reached = _unreachable(source, target), [rank.reaches for rank in source.ranks]
        yield (
            f"the GPUs of {short_repr(target.engine_id)} are {short_repr(hidden)}, and those that the ranks "
            f"of {short_repr(source.engine_id)} can write to are {short_repr(reached)}; start each with "
            "CUDA_VISIBLE_DEVICES that lists the GPUs of both, its own first, and use GPUs with peer access "
            "to each other"
        )
        return
    rule = "they have no transport in common; give both the same --device and --pd-transport"
    if ours.boot_id != theirs.boot_id:
        local = " and ".join(sorted(kind for kind, traits in TRAITS.items() if traits.one_host))
        rule = (
            f"they have no transport in common that joins two hosts, and {local} work on one host only; run "
            "both on one host with the same --device, or install NIXL on both (pip install 'segue[nixl]') "
            "and give both a --pd-key"
        )
    yield _difference("transports", _kinds(ours), _kinds(theirs), rule)


def _difference(name: str, ours: object, theirs: object, remedy: str) -> str:
    return f"{name} is {short_repr(ours)} here and {short_repr(theirs)} there; {remedy}"


def _kinds(hello: Hello) -> list[str]:
    """Returns the kinds of transport that every rank offers, in the first rank's order."""
    offers = [[offer.kind for offer in rank.offers] for rank in hello.ranks]
    return [kind for kind in offers[0] if all(kind in kinds for kinds in offers)] if offers else []


def common_transports(source: Hello, target: Hello) -> list[str]:
    """Returns the kinds of transport by which ``source`` can write into ``target``'s KV pools.

    All ranks of both offer each of these kinds. They are in the order of ``target``, the best first, so that
    both sides choose the same one.
    """
    return [kind for kind in _shared_kinds(source, target) if _joins(TRAITS[kind], source, target)]


def _shared_kinds(source: Hello, target: Hello) -> list[str]:
    """Returns the known kinds that all ranks offer and that join their hosts, in the target's order."""
    known = [kind for kind in _kinds(target) if kind in TRAITS and kind in _kinds(source)]
    same_host = source.boot_id == target.boot_id
    return [kind for kind in known if same_host or not TRAITS[kind].one_host]


def _joins(traits: TransportTraits, source: Hello, target: Hello) -> bool:
    """Whether a kind that joins the hosts of two workers joins their ranks too."""
    return not traits.peer_access or not _unreachable(source, target)


def _unreachable(source: Hello, target: Hello) -> list[str]:
    """Returns the GPUs of ``target`` that some rank of ``source`` cannot write to."""
    devices = [rank.device for rank in target.ranks]
    return [each for each in devices if any(each not in rank.reaches for rank in source.ranks)]


def sign(key: bytes, signer: LinkSide, first: bytes, second: bytes) -> bytes:
    """Returns a side's HMAC-SHA256 over both encoded ``Hello`` messages, that of the connecting side first.

    It holds for one side of one connection: the side is signed too, so a proof that is sent back proves
    nothing, and each ``Hello`` has a nonce.
    """
    mac = hmac.new(key, digestmod="sha256")
    for part in (PROOF_LABEL, signer.value, first, second):
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()


def verify(key: bytes, signer: LinkSide, first: bytes, second: bytes, mac: bytes) -> bool:
    """Whether ``mac`` is what :func:`sign` returns; the time taken does not tell where it differs."""
    return hmac.compare_digest(sign(key, signer, first, second), mac)
