"""Two workers compare what they say of themselves, and prove that they know one key. No socket is needed."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from segue.disagg.handshake import (
    Handshake,
    HandshakePhase,
    LinkSide,
    common_transports,
    compare,
    sign,
    verify,
)
from segue.errors import KVKeyError, KVMismatchError, KVProtocolError, KVRefusedError
from segue.messages.kv import (
    MAX_LARGE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OFFERS,
    MAX_RANKS,
    Bye,
    Gone,
    Hello,
    Proof,
    RankAddress,
    TransportOffer,
)
from tests.support.kv_hello import DIFFERENCES, hello

encode = msgspec.msgpack.encode


def handshake(
    side: LinkSide, ours: Hello, key: bytes | None = b"key", *, is_local: bool = False
) -> Handshake:
    return Handshake(side, replace(ours, nonce=os.urandom(32)), key, is_local=is_local)


def pair(key: bytes | None, other: bytes | None, *, is_local: bool = False) -> tuple[Handshake, Handshake]:
    """The connecting and the accepting side; each has taken the other one's Hello."""
    first = handshake(LinkSide.CONNECTING, hello("decode"), key, is_local=is_local)
    second = handshake(LinkSide.ACCEPTING, hello("prefill"), other, is_local=is_local)
    assert second.take(first.opening) is None
    return first, second


def complete(first: Handshake, second: Handshake) -> None:
    proof = first.take(second.opening)
    assert proof is not None
    answer = second.take(proof)
    assert answer is not None
    assert first.take(answer) is None


# --- the comparison ---


def test_workers_that_fit_together_pass() -> None:
    compare(hello("prefill"), hello("decode"))


@pytest.mark.parametrize(("field", "value", "remedy"), DIFFERENCES, ids=[name for name, *_ in DIFFERENCES])
def test_a_difference_is_named_with_both_values_and_the_remedy(field: str, value: Any, remedy: str) -> None:
    ours, theirs = hello("prefill"), hello("decode", **{field: value})
    for mine, other in ((ours, theirs), (theirs, ours)):
        with pytest.raises(KVMismatchError) as caught:
            compare(mine, other)
        text = caught.value.message
        assert f"{field} is {getattr(mine, field)!r} here and " in text
        assert field == "incarnation" or f"{getattr(other, field)!r} there" in text
        assert remedy in text
        assert "prefill-1" in text and "decode-1" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_pages", 7),
        ("max_seq_len", 9),
        ("identity", None),
        ("engine_id", "x"),
        ("epoch", 3),
    ],
)
def test_what_may_differ_passes(field: str, value: Any) -> None:
    theirs = hello("decode")
    changed = replace(theirs.identity, version="v2") if field == "identity" else value
    compare(hello("prefill"), replace(theirs, **{field: changed}))


def test_every_field_is_compared_or_may_differ() -> None:
    compared = {field for field, *_ in DIFFERENCES} | {"numerics"}  # numerics: in deterministic mode
    may_differ = {"num_pages", "max_seq_len", "identity", "engine_id", "epoch"}
    transports = {"boot_id", "tp", "ranks"}  # together they decide by which transport pages can move
    assert compared | may_differ | transports | {"nonce"} == set(Hello.__struct_fields__)


def test_the_numbers_of_ranks_may_differ() -> None:
    theirs = hello("decode")
    compare(hello("prefill"), replace(theirs, tp=2, ranks=theirs.ranks * 2))


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(KVMismatchError, match=r"dtype is .* page_size is "):
        compare(hello("prefill"), hello("decode", page_size=16, dtype="float16"))


def test_numerics_may_differ_unless_results_have_to_be_deterministic() -> None:
    compare(hello("prefill"), hello("decode", numerics="A100"))
    with pytest.raises(KVMismatchError, match=r"numerics is 'H200' here and 'A100' there; .*--deterministic"):
        compare(hello("prefill", deterministic=True), hello("decode", deterministic=True, numerics="A100"))


@pytest.mark.parametrize("work", [["prefill", "decode"], ["decode"]])
def test_a_worker_that_does_both_fits_to_any_other(work: Any) -> None:
    compare(hello("prefill", work=["prefill", "decode"]), hello("decode", work=work))


def test_two_decode_workers_do_not_fit() -> None:
    with pytest.raises(KVMismatchError, match=r"work is \['decode'\] here and \['decode'\] there"):
        compare(hello("prefill", work=["decode"]), hello("decode"))


def test_a_hello_must_have_an_address_per_rank() -> None:
    with pytest.raises(KVProtocolError, match=r"tp=2 and addresses of 1 ranks"):
        compare(hello("prefill"), hello("decode", tp=2))


# --- the transports ---


def offering(role: Any, *kinds: str, **changes: Any) -> Hello:
    return hello(role, ranks=[RankAddress("", "", [TransportOffer(kind, b"") for kind in kinds])], **changes)


def test_transports_are_in_the_order_of_the_side_that_is_written_to() -> None:
    source, target = offering("prefill", "nixl", "shm", "fake"), offering("decode", "shm", "nixl")
    assert common_transports(source, target) == ["shm", "nixl"]
    assert common_transports(target, source) == ["nixl", "shm"]


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc"])
def test_transports_by_shared_memory_need_one_host(kind: str) -> None:
    source, target = offering("prefill", kind, "nixl"), offering("decode", kind, "nixl", boot_id="host-2")
    assert common_transports(source, target) == ["nixl"]


def test_a_transport_must_be_offered_by_every_rank() -> None:
    both, one = offering("decode", "nixl", "shm").ranks[0], offering("decode", "shm").ranks[0]
    target = hello("decode", tp=2, ranks=[both, one])
    assert common_transports(offering("prefill", "shm", "nixl"), target) == ["shm"]


def test_workers_without_a_common_transport_do_not_fit() -> None:
    compare(offering("prefill", "shm"), offering("decode", "shm"))
    with pytest.raises(
        KVMismatchError,
        match=r"transports is \['shm'\] here and \['shm'\] there; .*one host only; run both on one host",
    ):
        compare(offering("prefill", "shm"), offering("decode", "shm", boot_id="host-2"))
    with pytest.raises(KVMismatchError, match=r"transports is \[\] here"):
        compare(offering("prefill"), offering("decode", "shm"))


def on_gpus(role: Any, devices: list[str], reaches: list[str], *kinds: str, **changes: Any) -> Hello:
    """The ``Hello`` of a worker whose ranks have these GPUs, and can all write to those of ``reaches``."""
    offers = [TransportOffer(kind, b"") for kind in kinds or ("cuda_ipc",)]
    ranks = [RankAddress("", device, offers, reaches) for device in devices]
    return hello(role, tp=len(ranks), ranks=ranks, **changes)


def test_gpus_hand_over_kv_if_every_source_reaches_every_target() -> None:
    source, target = on_gpus("prefill", ["a"], ["a", "b", "c"]), on_gpus("decode", ["b", "c"], ["b", "c"])
    compare(source, target)
    assert common_transports(source, target) == ["cuda_ipc"]
    assert common_transports(on_gpus("prefill", ["a"], ["a"]), on_gpus("decode", ["a"], [])) == ["cuda_ipc"]


def test_a_gpu_that_the_prefill_worker_does_not_see_is_named_on_both_sides() -> None:
    source, target = on_gpus("prefill", ["a"], ["a", "b"]), on_gpus("decode", ["b", "c"], ["b", "c"])
    for ours, theirs in ((source, target), (target, source)):
        with pytest.raises(
            KVMismatchError,
            match=r"decode-1' are \['c'\].*prefill-1' can write.*'a', 'b'.*CUDA_VISIBLE_DEVICES",
        ):
            compare(ours, theirs)


def test_one_source_that_does_not_reach_a_target_is_enough() -> None:
    source, target = on_gpus("prefill", ["a", "b"], ["a", "b", "c"]), on_gpus("decode", ["c"], ["c"])
    compare(source, target)
    ranks = [source.ranks[0], replace(source.ranks[1], reaches=["b"])]
    with pytest.raises(KVMismatchError, match=r"\['c'\].*\['b'\]"):
        compare(replace(source, ranks=ranks), target)


def test_gpus_that_do_not_reach_each_other_use_another_transport() -> None:
    source = on_gpus("prefill", ["a"], ["a"], "cuda_ipc", "nixl")
    target = on_gpus("decode", ["b"], ["b"], "cuda_ipc", "nixl")
    compare(source, target)
    assert common_transports(source, target) == ["nixl"]


def test_gpus_that_do_not_reach_each_other_may_be_of_unequal_ranks() -> None:
    source = on_gpus("prefill", ["a"], ["a"], "cuda_ipc", "nixl")
    target = on_gpus("decode", ["b", "c"], ["b", "c"], "cuda_ipc", "nixl")
    compare(source, target)
    assert common_transports(source, target) == ["nixl"]


def test_a_gpu_and_a_cpu_do_not_fit() -> None:
    with pytest.raises(
        KVMismatchError, match=r"transports is \['cuda_ipc'\] here and \['shm'\].*same --device"
    ):
        compare(on_gpus("prefill", ["a"], ["a"]), offering("decode", "shm"))


# --- the proofs ---


@pytest.mark.parametrize(("key", "is_local"), [(b"key", False), (b"key", True), (None, True)])
def test_both_sides_complete_the_handshake(key: bytes | None, is_local: bool) -> None:
    first, second = pair(key, key, is_local=is_local)
    complete(first, second)
    assert first.phase is HandshakePhase.DONE and second.phase is HandshakePhase.DONE
    assert first.theirs is not None and first.theirs.engine_id == "prefill-1"
    assert second.theirs is not None and second.theirs.engine_id == "decode-1"


def test_a_proof_with_another_key_is_refused_before_an_own_proof_is_sent() -> None:
    first, second = pair(b"key", b"other")
    proof = first.take(second.opening)
    assert proof is not None
    with pytest.raises(KVKeyError, match=r"does not fit the key here; .*--pd-key"):
        second.take(proof)
    assert second.phase is HandshakePhase.PROOF


@pytest.mark.parametrize(
    ("key", "other", "text"),
    [(b"key", None, "a key there and none here"), (None, b"key", "a key here and none there")],
)
def test_a_key_on_one_side_alone_is_refused(key: bytes | None, other: bytes | None, text: str) -> None:
    first, second = pair(key, other, is_local=True)
    proof = first.take(second.opening)
    assert proof is not None
    with pytest.raises(KVKeyError, match=f"{text}; .*--pd-key"):
        second.take(proof)


@pytest.mark.parametrize("side", list(LinkSide))
def test_between_hosts_a_key_is_required(side: LinkSide) -> None:
    ours = handshake(side, hello("decode"), None)
    with pytest.raises(KVKeyError, match=r"between two hosts needs a key.*--pd-key"):
        ours.take(encode(hello("prefill")))


def test_a_proof_that_is_sent_back_proves_nothing() -> None:
    first, second = pair(b"key", b"key")
    proof = first.take(second.opening)
    assert proof is not None
    with pytest.raises(KVKeyError, match="does not fit"):
        first.take(proof)


def test_a_proof_of_another_connection_proves_nothing() -> None:
    first, second = pair(b"key", b"key")
    proof = first.take(second.opening)
    assert proof is not None
    again = handshake(LinkSide.ACCEPTING, hello("prefill"))  # draws a new nonce
    again.take(first.opening)
    with pytest.raises(KVKeyError, match="does not fit"):
        again.take(proof)


def test_every_part_of_a_proof_counts() -> None:
    mac = sign(b"key", LinkSide.CONNECTING, b"first", b"second")
    assert verify(b"key", LinkSide.CONNECTING, b"first", b"second", mac)
    for others in (
        (b"kez", LinkSide.CONNECTING, b"first", b"second"),
        (b"key", LinkSide.ACCEPTING, b"first", b"second"),
        (b"key", LinkSide.CONNECTING, b"second", b"first"),
        (b"key", LinkSide.CONNECTING, b"firsts", b"econd"),
    ):
        assert not verify(*others, mac)
    assert not verify(b"key", LinkSide.CONNECTING, b"first", b"second", mac[:-1])


# --- the order, and what is no message ---


def test_a_message_before_the_handshake_is_refused() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVProtocolError, match=r"no message of a handshake \(Invalid value 'Gone'"):
        ours.take(encode(Gone(handoff=1, lease=1, reason="expired")))


def test_a_proof_before_the_hello_is_refused() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVProtocolError, match="Proof came during the handshake, where Hello has to come"):
        ours.take(encode(Proof(bytes(32))))


def test_a_second_hello_is_refused() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    ours.take(encode(hello("decode")))
    with pytest.raises(KVProtocolError, match=r"Hello came .*, where Proof has to come"):
        ours.take(encode(hello("decode")))


def test_the_other_sides_refusal_is_shown_in_one_line() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVRefusedError, match=r"refused: too late\?\?\[31m"):
        ours.take(encode(Bye("too late\n\x1b[31m")))


def test_a_hello_of_another_version_is_named_as_such_even_if_it_has_other_fields() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVMismatchError, match="protocol is 1 here and 7 there"):
        ours.take(encode({"type": "Hello", "protocol": 7, "shape": "another"}))


@pytest.mark.parametrize("field", ["dtype", "kv_cache", "layers", "kv_heads", "head_dim", "page_size"])
def test_a_hello_must_say_how_its_kv_is_stored(field: str) -> None:
    fields = msgspec.msgpack.decode(encode(hello("decode")))
    del fields[field]
    with pytest.raises(KVProtocolError, match=f"missing required field `{field}`"):
        handshake(LinkSide.ACCEPTING, hello("prefill")).take(encode(fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"\x91\xa3Bye",
        b"\x92\xa3Bye\xa2\xff\xfe",
        b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 100_000,
        encode({"type": "Hello", "protocol": 1}),
    ],
)
def test_bytes_that_are_no_message_are_named(body: bytes) -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVProtocolError, match=f"a frame of {len(body)} bytes is no message of a handshake"):
        ours.take(body)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": [RankAddress("", "", [])] * (MAX_RANKS + 1)}, "length <= 64"),
        ({"ranks": [RankAddress("", "", [TransportOffer("x", b"")] * (MAX_OFFERS + 1))]}, "length <= 8"),
        ({"ranks": [RankAddress("", "", [TransportOffer("x", bytes(65537))])]}, "length <= 65536"),
        ({"nonce": bytes(31)}, "length >= 32"),
        ({"work": ["prefill"] * 3}, "length <= 2"),
        ({"work": ["train"]}, "Invalid enum value 'train'"),
    ],
)
def test_a_hello_over_its_limits_is_refused(changes: dict[str, Any], text: str) -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVProtocolError, match=text):
        ours.take(encode(hello("decode", **changes)))


def test_a_large_message_of_another_type_is_refused() -> None:
    ours = handshake(LinkSide.ACCEPTING, hello("prefill"))
    with pytest.raises(KVProtocolError, match=f"Proof has .* bytes; its limit is {MAX_MESSAGE_BYTES}"):
        ours.take(encode({"type": "Proof", "mac": b"", "more": bytes(MAX_MESSAGE_BYTES)}))


def test_an_own_hello_over_the_limit_is_refused() -> None:
    with pytest.raises(KVProtocolError, match=r"this worker's Hello has .* bytes; its limit is"):
        handshake(LinkSide.ACCEPTING, hello("prefill", engine_id="x" * MAX_LARGE_MESSAGE_BYTES))


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc", "nixl"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (8, 2)])
def test_every_transport_joins_unequal_ranks(kind: str, sizes: tuple[int, int]) -> None:
    source, target = (
        on_gpus(role, ["a"] * size, ["a"], kind)
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    compare(source, target)
    assert common_transports(source, target) == [kind]


@pytest.mark.parametrize(("tp", "kv_heads"), [(3, 8), (1, 0), (3, 0)])
def test_a_hello_whose_ranks_cannot_share_its_heads_contradicts_itself(tp: int, kv_heads: int) -> None:
    theirs = hello("decode", kv_heads=kv_heads, tp=tp, ranks=hello("decode").ranks * tp)
    with pytest.raises(KVProtocolError, match=f"tp={tp} and kv_heads={kv_heads}; one of the two must divide"):
        compare(hello("prefill"), theirs)


def test_two_hosts_without_nixl_are_told_how_to_get_it() -> None:
    with pytest.raises(KVMismatchError, match=r"install NIXL on both .* give both a --pd-key"):
        compare(offering("prefill", "shm"), offering("decode", "shm", "nixl", boot_id="host-2"))


def test_one_host_with_different_transports_is_told_the_option() -> None:
    with pytest.raises(
        KVMismatchError, match=r"transports is .*'shm'.* here and .*'nixl'.* there; .*-transport"
    ):
        compare(offering("prefill", "shm"), offering("decode", "nixl"))
