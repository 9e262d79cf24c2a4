"""What a hostile payload may cost: time and memory in proportion to its size, whatever it says."""

import json
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from segue.errors import InvalidRequestError
from segue.weights.sync.payload import decode
from tests.weights.sync.test_payload import METADATA, named, reduce, saved, value, whole

CPU = torch.device("cpu")
BYTES_PER_BYTE = 50  # of memory for one of the payload
FREE_BYTES = 1 << 20
SECONDS_PER_BYTE = 30e-6  # pickletools takes some 2 µs for an opcode, with tracemalloc some more
FREE_S = 1.0


def cost(payload: bytes) -> tuple[str, int, float]:
    """What is said of a payload, the peak of memory that reading it takes, and the seconds."""
    tracemalloc.start()
    began = time.process_time()
    said = ""
    try:
        kept = decode(payload, None, CPU)
        del kept
    except InvalidRequestError as error:
        said = error.message
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return said, peak, seconds


def assert_cheap(payload: bytes) -> str:
    said, peak, seconds = cost(payload)
    assert peak <= BYTES_PER_BYTE * len(payload) + FREE_BYTES, f"{peak / len(payload):.0f} bytes a byte"
    assert seconds <= SECONDS_PER_BYTE * len(payload) + FREE_S
    assert len(said) < 1000
    return said


def get(index: int) -> bytes:
    """Push an entry of the memo."""
    return b"j" + index.to_bytes(4, "little")


def doubled(opcodes: bytes, times: int = 60) -> bytes:
    """A tuple of two tuples that are one, and so on: 2 ** times leaves in a few bytes."""
    return opcodes + b"\x94" + b"".join(get(index) * 2 + b"\x86\x94" for index in range(times))


MIB = 1 << 20
MANY = 200_000
BLOB = b"B" + MIB.to_bytes(4, "little") + bytes(MIB) + b"\x94"  # memo entry 0
STRIDED = (0, (), (), False, b"N")
SAVED = saved(torch.zeros(MIB // 4))


def bombs() -> dict[str, bytes]:
    numbers = b"".join(b"K\x01" for _ in range(64))
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n\x94"
    record = METADATA + b"\x94)\x81}("
    return {
        "a size of bytes": whole(
            b"](" + BLOB + b"ctorch\nSize\n\x94" + (get(1) + get(0) + b"\x85R") * 300 + b"e"
        ),
        "a size of text": named(b"ctorch\nSize\n" + value("1" * MIB) + b"\x85R"),
        "a dict of pairs": whole(
            b"](" + b"](" + value(("a", 1)) * 1000 + b"e\x94ccollections\nOrderedDict\n\x94"
            + (get(1) + get(0) + b"\x85R") * 1000 + b"e"
        ),
        "a key that is hashed": whole(b"}" + doubled(b"K\x01") + b"Ns"),
        "keys that are compared": whole(
            b"](" + value("a" * MIB) + b"\x94" + value("a" * MIB) + b"\x94}\x94"
            + b"".join(b"}(" + get(0) + b"N" + get(1) + b"Nu" for _ in range(1000)) + b"e"
        ),
        "a name that is printed": whole(b"](" + doubled(b"K\x01") + b"N\x86e"),
        "a dtype that is printed": named(
            METADATA + b")\x81}(" + value("name") + doubled(b"K\x01", 30) + b"ub"
        ),
        "keys of a storage that are compared": named(
            reduce("torch._utils", "_rebuild_tensor_v2",
                   reduce("torch.storage", "_load_from_bytes", value(
                       value(0x1950A86A20F9469CFC6C) + b"." + value(1001) + b"." + b"}."
                       + doubled(value("storage"), 40) + b"." + b"]" + doubled(value("storage"), 40) + b"a."
                   )), *STRIDED)
        ),
        "one storage copied for each of many": whole(
            b"](" + value(SAVED) + b"\x94ctorch.storage\n_load_from_bytes\n\x94" + rebuild
            + (value("a") + get(2) + b"(" + get(1) + get(0) + b"\x85RK\x00))\x89NtR\x86") * 1000 + b"e"
        ),
        "one pickle read for each of many": whole(
            b"](" + value(whole(b"](" + b"N" * MANY + b"e")) + b"\x94"
            + b"cx\nLocalSerializedTensor\n)\x81}" + value("values") + b"](" + get(0) + b"e" + b"sb\x94"
            + (value("a") + get(1) + b"\x86") * 1000 + b"e"
        ),
        "one tensor many times": whole(
            b"](" + value("a") + b"(" + reduce("torch._utils", "_rebuild_tensor_v2",
                   reduce("torch.storage", "_load_from_bytes", value(saved(torch.zeros(1)))), *STRIDED)
            + b"t\x94" + get(0) * 200_000 + b"e"
        ),
        "pieces that overlap": overlapping(),
        "lists": whole(b"](" + b"]" * MANY + b"e"),
        "dicts": whole(b"](" + b"}" * MANY + b"e"),
        "marks": whole(b"(" * MANY),
        "memo": whole(b"N" + b"\x94" * MANY),
        "deep lists": whole(b"]" * 100_000 + b"a" * 99_999),
        "deep tuples": whole(b"N" + b"\x85" * MANY),
        "calls": whole(
            b"ctorch\nSize\n\x94(" + numbers + b"t\x85\x94](" + (get(0) + get(1) + b"R") * 100_000 + b"e"
        ),
        "objects": whole(b"](" + METADATA + b"\x94" + (get(0) + b")\x81") * 100_000 + b"e"),
        "an object in itself": whole(record + value("name") + get(1) + b"ub"),
        "a long tuple": whole(b"(" + b"N" * MANY + b"t"),
        "a list in itself": whole(b"]\x94" + get(0) + b"a"),
        "large integers": whole(b"](" + (b"\x8a\xff" + b"\x7f" * 255) * 4000 + b"e"),
        "a huge name": whole(b"](" + value("a" * MIB) + b"N\x86e"),
        "a huge global": whole(b"c" + b"a" * MIB + b"\nb\n"),
        "a persistent id": whole(doubled(b"K\x01") + b"Q"),
    }  # fmt: skip


SCALARS = [
    b"N", b"\x88", b"K\x05", b"M\x01\x02", b"J\xff\xff\xff\xff", b"\x8a\x05\xff\xff\xff\xff\0", b"G" + bytes(8),
    b"\x8c\x01a", b"\x8c\x04name", b"C\x03abc", b"C\xff" + bytes(255), b"ctorch\nfloat32\n", b")",
]  # fmt: skip
CALLS = [
    b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"ctorch.storage\n_load_from_bytes\n", METADATA,
    b"cx\nLocalSerializedTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n",
]  # fmt: skip
VALUES = [b"(K\x01K\x02t\x94\x85", value(saved(torch.arange(6.0))), value([("a", {"b": (1, 2)})])]
OTHERS = [bytes([opcode]) for opcode in b"(]}aesut\x85\x86\x87\x94\x94\x94RR\x81bQ"]


def any_opcodes(random_: random.Random) -> bytes:
    """Opcodes in any order; some are repeated, as a bomb would."""
    parts: list[bytes] = []
    for _ in range(random_.randrange(1, 60)):
        part = (
            get(random_.randrange(6))
            if random_.random() < 0.25
            else random_.choice(SCALARS + CALLS + VALUES + OTHERS)
        )
        parts.append(part * random_.choice((1, 1, 1, 2, 3, 100)))
    return b"".join(parts)


def grown(random_: random.Random) -> bytes:
    """Pushes, each of them sound, so that more of it is read: values made of values made before."""
    result = b"]("
    for num_entries in range(random_.randrange(5, 120)):
        made = random_.choice(SCALARS + CALLS)
        if num_entries and random_.random() < 0.7:
            few = random_.choice((1, 2, 3, 64))
            items = b"(" + b"".join(get(random_.randrange(num_entries)) for _ in range(few)) + b"t"
            made = random_.choice((items, items, CALLS[0] + items + b"\x85R", CALLS[0] + items + b"R"))
        result += made + b"\x94"
    return result + b"e"


@pytest.mark.parametrize("make", [any_opcodes, grown])
def test_any_opcodes_cost_no_more_than_their_size(make: Callable[[random.Random], bytes]) -> None:
    random_ = random.Random(3)
    for _ in range(200):
        opcodes = make(random_)
        for payload in (whole(opcodes), named(opcodes)):
            assert_cheap(payload)


@pytest.mark.parametrize("dtype, shape", [("U8", [1] * 100_000), ("F32", [1 << 62, 0]), ("U8", [1 << 40])])
def test_a_safetensors_header_costs_no_more_than_its_size(dtype: str, shape: list[int]) -> None:
    assert_cheap(safetensors({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 1]}}, b"1"))


def test_many_tensors_of_a_safetensors_header_cost_no_more_than_its_size() -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    assert_cheap(safetensors({str(index): empty for index in range(20_000)}, b""))
    overlap = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    assert "no whole safetensors" in assert_cheap(safetensors({"a": overlap, "b": overlap}, b"1234"))


def safetensors(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def overlapping() -> bytes:
    """Records of a bucket that say that each has all of it, at an odd place: each would be a copy."""
    flat = torch.zeros(MIB + 1, dtype=torch.uint8)
    fields = (
        value("name")
        + value("x")
        + value("shape")
        + value((MIB // 4,))
        + value("dtype")
        + b"ctorch\nfloat32\n"
    )
    fields += value("start_idx") + value(1) + value("end_idx") + value(MIB + 1)
    record = METADATA + b")\x81}(" + fields + b"ub\x94"
    content = pickle.dumps(flat, 4).removeprefix(b"\x80\x04")[:-1]
    num_entries = content.count(b"\x94") + 100  # of the memo, at most
    metadata = (
        b"](" + record.replace(b"\x94", b"r" + num_entries.to_bytes(4, "little")) + get(num_entries) * 1000
    )
    return whole(b"}(" + value("flattened_tensor") + content + value("metadata") + metadata + b"eu")


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_costs_no_more_than_its_size(name: str) -> None:
    assert assert_cheap(bombs()[name]), "it should be refused"
