"""The cost of hostile payloads: time and memory stay in proportion to their size."""

import json
import pickle
import pickletools
import random
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from segue.errors import InvalidRequestError
from segue.weight_update.payload.decode import decode
from tests.weight_update.payload.test_decode import METADATA, saved, whole

CPU = torch.device("cpu")
BYTES_PER_BYTE = 50  # allowed memory per byte of the payload
FREE_BYTES = 1 << 20
SECONDS_PER_BYTE = 30e-6  # pickletools takes some 2 µs per opcode, and more with tracemalloc
FREE_S = 1.0


def cost(payload: bytes) -> tuple[str, int, float]:
    """Returns the error for a payload, the peak memory of reading it, and the seconds."""
    tracemalloc.start()
    began = time.process_time()
    message = ""
    try:
        kept = decode(payload, CPU)
        del kept
    except InvalidRequestError as error:
        message = error.message
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return message, peak, seconds


def assert_cheap(payload: bytes) -> str:
    message, peak, seconds = cost(payload)
    assert peak <= BYTES_PER_BYTE * len(payload) + FREE_BYTES, f"{peak / len(payload):.0f} bytes per byte"
    assert seconds <= SECONDS_PER_BYTE * len(payload) + FREE_S
    assert len(message) < 1000
    return message


def get(index: int) -> bytes:
    """Returns the opcode that pushes an entry of the memo."""
    return b"j" + index.to_bytes(4, "little")


def value(item: object) -> bytes:
    """Returns the opcodes of a value, without memo entries."""
    return pickletools.optimize(pickle.dumps(item, 3)).removeprefix(b"\x80\x03")[:-1]


def reduce(module: str, name: str, arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + b"(" + arguments + b"tR"


def pair(opcodes: bytes) -> bytes:
    return value("name") + opcodes + b"\x86"


def listed(opcodes: bytes) -> bytes:
    return b"](" + opcodes + b"e"


def doubled(leaf: bytes, times: int = 60, first: int = 0) -> bytes:
    """Returns opcodes that nest tuples of one tuple used twice: 2 ** ``times`` leaves in a few bytes.

    ``first``: the number of memo entries made before.
    """
    made = leaf + b"\x94" + b"".join(get(first + index) * 2 + b"\x86\x94" for index in range(times))
    return listed(made) + get(first + times) + b"\x86"


MIB = 1 << 20
MANY = 100_000
SAVED = saved(torch.zeros(MIB // 4))
SMALL = saved(torch.zeros(1))
REST = value(0) + b"))\x89N"  # of a view: offset, size, stride, requires_grad, hooks


def view(storage: bytes) -> bytes:
    """Returns the opcodes of a scalar tensor; ``storage`` pushes its storage's bytes."""
    return reduce(
        "torch._utils", "_rebuild_tensor_v2", reduce("torch.storage", "_load_from_bytes", storage) + REST
    )


def bombs() -> dict[str, bytes]:
    blob, long = value(bytes(MIB)), value("a" * MIB)
    size, numbers = b"ctorch\nSize\n", b"(" + b"K\x01" * 64 + b"t"
    record = METADATA + b")\x81"
    inner = value(whole(listed(b"N" * MANY) + view(value(SMALL))))
    per_rank = b"cx\nLocalSerializedTensor\n)\x81}" + value("values") + listed(inner) + b"sb"
    header = b"".join(value(part) + b"." for part in (0x1950A86A20F9469CFC6C, 1001, {}))
    nested = doubled(value("x"), 40)
    storage = b"(" + value("storage") + b"ctorch\nFloatStorage\n" + nested + value("cpu") + value(0) + b"Nt."
    compared = header + storage + listed(nested) + b"." + bytes(8)
    handle = b"cx\n_rebuild_cuda_tensor_modified\n(" + value(("a", (1,), (1,), 0, "b"))[1:-1]
    return {
        "a size of bytes": whole(listed(blob + b"\x94" + (size + get(0) + b"\x85R") * 300)),
        "a size of text": whole(listed(long + b"\x94" + (size + get(0) + b"\x85R") * 300)),
        "a dict of pairs": whole(
            listed(
                value([("a", 1)] * 1000) + b"\x94ccollections\nOrderedDict\n\x94"
                + (get(1) + get(0) + b"\x85R") * 1000
            )
        ),
        "a key that is hashed": whole(listed(doubled(b"K\x01") + b"}" + get(60) + b"Ns")),
        "keys that are compared": whole(
            listed(long + b"\x94" + long + b"\x94" + (b"}(" + get(0) + b"N" + get(1) + b"Nu") * 30_000)
        ),
        "a dtype that is printed": whole(
            listed(pair(handle + doubled(b"N", 40) + b"N" * 9 + b"tR"))
        ),
        "a dtype of a piece that is printed": overlapping(1, doubled(b"N", 27)),
        "keys of a storage that are compared": whole(listed(pair(view(value(compared))))),
        "one storage copied for each of many": whole(
            listed(pair(view(value(SAVED) + b"\x94")) + pair(view(get(0))) * 1000)
        ),
        "one pickle read for each of many": whole(
            listed(pair(per_rank + b"\x94") + pair(get(0)) * 1000)
        ),
        "one tensor many times": whole(listed(pair(view(value(SMALL))) + b"\x94" + get(0) * MANY)),
        "pieces that overlap": overlapping(1000, b"ctorch\nfloat32\n"),
        "lists": whole(listed(b"]" * MANY)),
        "dicts": whole(listed(b"}" * MANY)),
        "marks": whole(b"(" * MANY),
        "memo": whole(b"N" + b"\x94" * MANY),
        "deep lists": whole(b"]" * 100_000 + b"a" * 99_999),
        "deep tuples": whole(b"N" + b"\x85" * MANY),
        "calls": whole(listed(size + b"\x94" + numbers + b"\x85\x94" + (get(0) + get(1) + b"R") * MANY)),
        "objects": whole(listed(METADATA + b"\x94" + (get(0) + b")\x81") * MANY)),
        "an object in itself": whole(record + b"\x94}(" + value("name") + get(0) + b"ub"),
        "a long tuple": whole(b"(" + b"N" * MANY + b"t"),
        "a list in itself": whole(b"]\x94" + get(0) + b"a"),
        "a parameter of many tuples": whole(
            listed(
                numbers + b"\x94" + b"ctorch._utils\n_rebuild_parameter\n" + listed(b"h\0" * MANY) + b"\x85R"
            )
        ),
        "hooks of many tuples": whole(
            listed(
                numbers + b"\x94" + b"ctorch._utils\n_rebuild_parameter\n(" + view(value(SMALL)) + b"\x88}("
                + b"".join(value(str(index)) + b"h\0" for index in range(MANY // 10)) + b"utR"
            )
        ),
        "fields of many tuples": whole(
            listed(
                numbers + b"\x94" + METADATA + b")\x81}("
                + b"".join(value(str(index)) + b"h\0" for index in range(MANY // 10)) + b"ub"
            )
        ),
        "a size of many tuples": whole(listed(numbers + b"\x94" + size + listed(b"h\0" * MANY) + b"\x85R")),
        "values of many tuples": whole(
            listed(
                numbers + b"\x94" + b"cx\nLocalSerializedTensor\n)\x81}" + value("values")
                + listed(b"h\0" * MANY) + b"sb"
            )
        ),
        "arguments of many tuples": whole(listed(numbers + b"\x94" + size + listed(b"h\0" * MANY) + b"R")),
        "large integers": whole(listed((b"\x8a\xff" + b"\x7f" * 255) * 4000)),
        "a huge name": whole(listed(long + b"N\x86")),
        "a huge global": whole(b"c" + b"a" * MIB + b"\nb\n"),
    }  # fmt: skip


def overlapping(times: int, dtype: bytes) -> bytes:
    """A bucket whose records each claim all of it but a byte, misaligned: each would be a copy."""
    fields = value("name") + value("x") + value("shape") + value((MIB // 4,)) + value("dtype") + dtype
    fields += value("start_idx") + value(1) + value("end_idx") + value(MIB + 1) + value("numel") + value(MIB)
    record = METADATA + b")\x81}(" + fields + b"ub\x94"
    flat = value(torch.zeros(MIB + 1, dtype=torch.uint8))
    return whole(
        b"}("
        + value("flattened_tensor")
        + flat
        + value("metadata")
        + listed(record + get(0) * (times - 1))
        + b"u"
    )


SCALARS = [
    b"N", b"\x88", b"K\x05", b"M\x01\x02", b"J\xff\xff\xff\xff", b"\x8a\x05\xff\xff\xff\xff\0",
    b"G" + bytes(8), b"\x8c\x01a", b"\x8c\x04name", b"C\x03abc", b"C\xff" + bytes(255),
    b"ctorch\nfloat32\n", b")",
]  # fmt: skip
CALLS = [
    b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"ctorch.storage\n_load_from_bytes\n", METADATA,
    b"cx\nLocalSerializedTensor\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch._utils\n_rebuild_parameter\n",
]  # fmt: skip
VALUES = [b"(K\x01K\x02t\x94\x85", value(saved(torch.arange(6.0))), value([("a", {"b": (1, 2)})])]
OTHERS = [bytes([opcode]) for opcode in b"(]}aesut\x85\x86\x87\x94\x94\x94RR\x81bQ"]


def any_opcodes(random_: random.Random) -> bytes:
    """Returns opcodes in random order; some are repeated, as in a bomb."""
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
    """Returns valid opcodes, so that more of them are read: values made of values made before."""
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
        for payload in (whole(opcodes), whole(listed(pair(opcodes)))):
            assert_cheap(payload)


@pytest.mark.parametrize("dtype, shape", [("U8", [1] * 100_000), ("F32", [1 << 62, 0]), ("U8", [1 << 40])])
def test_a_safetensors_header_costs_no_more_than_its_size(dtype: str, shape: list[int]) -> None:
    assert_cheap(safetensors({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 1]}}, b"1"))


def test_many_tensors_of_a_safetensors_header_cost_no_more_than_its_size() -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    assert_cheap(safetensors({str(index): empty for index in range(20_000)}, b""))
    overlap = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    assert "not a complete safetensors" in assert_cheap(safetensors({"a": overlap, "b": overlap}, b"1234"))


def safetensors(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", bombs(), ids=lambda name: name.replace(" ", "_"))
def test_a_bomb_costs_no_more_than_its_size(name: str) -> None:
    is_sound = name.startswith(
        ("one storage", "one pickle")
    )  # they are read once, however often they are used
    assert (assert_cheap(bombs()[name]) == "") == is_sound


@pytest.mark.parametrize(
    "opcodes",
    [b"]\x94" + get(0), b"}\x94" + get(0), b"N\x85\x85\x94" + get(0), b"]\x85\x94" + get(0)],
    ids=["list", "dict", "nested tuple", "tuple with a list"],
)
def test_only_leaves_may_be_used_twice(opcodes: bytes) -> None:
    assert "twice (memo entry 0)" in assert_cheap(whole(listed(opcodes)))


def test_tuples_are_short() -> None:
    content = pair(b"ctorch\nSize\n((" + b"K\x01" * 65 + b"ttR")
    assert "a tuple of 65 items; the limit is 64" in assert_cheap(whole(listed(content)))


def test_keys_are_short_text() -> None:
    for key in (value("a" * 65), value(b"a"), value(1), value(("a",))):
        assert "whose keys are not text" in assert_cheap(whole(b"}" + key + b"Ns"))
