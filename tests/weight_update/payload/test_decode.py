import base64
import pickle
import random
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from segue.errors import InvalidRequestError
from segue.weight_update.payload import decode as payload_module
from segue.weight_update.payload import unpickle
from segue.weight_update.payload.decode import FlattenedTensorMetadata, Form, decode, encode, from_base64

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]
FORMS: list[Form] = ["safetensors", "flattened_bucket"]


def some_tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (3,), (2, 3), (0, 4), (1, 5, 2)]
    return [
        (f"{dtype}.{shape}", (torch.randn(shape, generator=generator) * 50).to(dtype))
        for dtype in DTYPES
        for shape in shapes
    ]


def refused(payload: bytes, device: torch.device = CPU, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode(payload, device, **options)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000
    return caught.value.message


def assert_equal(decoded: list[tuple[str, Tensor]], sent: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in decoded] == [name for name, _ in sent]
    for (name, got), (_, was) in zip(decoded, sent, strict=True):
        assert (got.dtype, got.shape) == (was.dtype, was.shape), name
        assert torch.equal(got, was), name


@pytest.mark.parametrize("form", FORMS)
def test_decode_inverts_encode(form: Form) -> None:
    sent = some_tensors()
    decoded = decode(encode(sent, form), CPU)
    assert_equal(sorted(decoded), sorted(sent))


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_bucket_is_legal(form: Form) -> None:
    assert decode(encode([], form), CPU) == []


def test_tied_and_strided_tensors_are_encoded_by_value() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    sent = [("a", tensor), ("b", tensor), ("c", tensor.T), ("d", tensor[1:, 2:])]
    for form in FORMS:
        assert_equal(sorted(decode(encode(sent, form), CPU)), sent)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_plain_pickle_of_named_tensors(protocol: int) -> None:
    if protocol == 2:  # pickles bytes by means of a helper function
        assert "_codecs.encode" in refused(pickle.dumps(some_tensors(), protocol))
        return
    assert_equal(decode(pickle.dumps(some_tensors(), protocol), CPU), some_tensors())


def test_views_parameters_and_shared_storages_of_a_plain_pickle() -> None:
    whole = torch.arange(24.0).view(4, 6)
    sent = [
        ("T", whole.T),
        ("part", whole[1:3, 2:5]),
        ("parameter", torch.nn.Parameter(whole)),
        ("again", whole),
    ]
    assert_equal(decode(pickle.dumps(sent), CPU), [(name, tensor.detach()) for name, tensor in sent])


def test_empty_storages_of_a_forking_pickle() -> None:
    assert_equal(
        decode(bytes(ForkingPickler.dumps([("e", torch.empty(0, 3))])), CPU), [("e", torch.empty(0, 3))]
    )


def test_a_bucket_whose_indices_count_elements() -> None:  # older clients' buckets, of one dtype
    flat = torch.arange(10, dtype=torch.bfloat16)
    metadata = [
        FlattenedTensorMetadata("a", torch.Size([2, 3]), torch.bfloat16, 0, 6, 6),
        FlattenedTensorMetadata("b", torch.Size([4]), torch.bfloat16, 6, 10, 4),
    ]
    decoded = decode(bucket(flat, metadata), CPU)
    assert_equal(decoded, [("a", flat[:6].view(2, 3)), ("b", flat[6:])])


@dataclass
class LocalSerializedTensor:
    values: list[bytes]


def test_a_tensor_pickled_for_each_rank() -> None:
    values = [torch.full((2,), float(rank)) for rank in range(3)]
    payload = pickle.dumps([("a", LocalSerializedTensor([pickle.dumps(value) for value in values]))])
    for rank, value in enumerate(values):
        assert_equal(decode(payload, CPU, rank=rank), [("a", value)])
    assert "cannot be built" in refused(payload, rank=3)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_tensors_in_shared_memory_of_the_host_are_refused_with_a_remedy(strategy: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        payload = bytes(ForkingPickler.dumps([("a", torch.ones(4))]))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert "shared memory" in refused(payload)
    assert "safetensors" in refused(payload)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x80", b"\x80\x04", b"PK\x03\x04", b"hello", b"\x00" * 64, pickle.dumps({"a": 1}),
     pickle.dumps([1]), pickle.dumps(None), pickle.dumps([("a", 1)]), pickle.dumps([("a", torch.ones(2), 3)]),
     pickle.dumps([(1, torch.ones(2))]), pickle.dumps({"flattened_tensor": 1, "metadata": [1]}),
     encode([("a", torch.ones(9))])[:-1], encode([("a", torch.ones(9))]) + b"\x00",
     encode([("a", torch.ones(9))], "flattened_bucket")[:-40]],
)  # fmt: skip
def test_unknown_payloads_are_refused(payload: bytes) -> None:
    refused(payload)


# --- crafted pickles ---


def reduce(module: str, name: str, *arguments: object, old: bool = False) -> bytes:
    """Returns the opcodes of the call ``module.name(*arguments)``; arguments of type bytes are opcodes."""
    function = f"c{module}\n{name}\n".encode() if old else value(module) + value(name) + b"\x93"
    inner = b"".join(item if isinstance(item, bytes) else value(item) for item in arguments)
    return function + b"(" + inner + b"tR"


def value(item: object) -> bytes:
    return pickle.dumps(item, 4).removeprefix(b"\x80\x04")[:-1]


def whole(opcodes: bytes) -> bytes:
    return b"\x80\x04" + opcodes + b"."


def named(opcodes: bytes) -> bytes:
    """Returns a pickle of a list with one named tensor, which ``opcodes`` should make."""
    return whole(b"](" + value("name") + opcodes + b"\x86e")


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "module, name, arguments",
    [
        ("os", "system", ("touch {}",)),
        ("posix", "system", ("touch {}",)),
        ("subprocess", "check_output", (["touch", "{}"],)),
        ("builtins", "eval", ("open('{}', 'w')",)),
        ("builtins", "exec", ("open('{}', 'w')",)),
        ("builtins", "open", ("{}", "w")),
        ("builtins", "__import__", ("os",)),
        ("builtins", "getattr", (reduce("builtins", "__import__", "os"), "system")),
        ("operator", "methodcaller", ("system", "touch {}")),
        ("functools", "partial", (reduce("os", "system", "touch {}"),)),
        ("copyreg", "_reconstructor", (1, 2, 3)),
        ("_codecs", "encode", ("a", "latin1")),
        ("pickle", "loads", (pickle.dumps(1),)),
        ("torch", "load", ("{}",)),
        ("torch", "os.system", ("touch {}",)),
        ("torch", "Size.__class__", (1,)),
        ("torch", "UntypedStorage", (1 << 40,)),
        ("torch", "Tensor.numpy", (1,)),
        ("torch", "empty", (1 << 40,)),
        ("torch.serialization", "load", ("{}",)),
        ("torch.hub", "load", ("{}", "x")),
        ("torch.jit", "load", ("{}",)),
        ("torch._utils", "_rebuild_tensor", (1, 2, 3, 4)),
        ("torch._utils", "_rebuild_tensor_v3", (1, 2, 3, 4)),
        ("torch._utils", "_rebuild_wrapper_subclass", (1,)),
        ("torch._tensor", "_rebuild_from_type_v2", (1,)),
        ("torch.storage", "_load_from_bytes.__globals__", (1,)),
        ("torch.storage", "TypedStorage", (1,)),
        ("torch.multiprocessing.reductions", "rebuild_storage_fd", (1, 2, 3)),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename", (1, 2, 3, 4)),
        ("torch.multiprocessing.reductions", "os.system", ("touch {}",)),
        ("multiprocessing.resource_sharer", "DupFd", (1,)),
        ("numpy.core.multiarray", "_reconstruct", (1,)),
        ("segue.weight_update.payload.decode", "pickle.loads", (1,)),
        ("segue.weight_update.payload.unpickle", "Function", (1,)),
    ],
)
def test_nothing_that_is_not_on_the_list_is_called(
    module: str, name: str, arguments: tuple[Any, ...], old: bool, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    filled = [item.format(mark) if isinstance(item, str) else item for item in arguments]
    opcodes = reduce(module, name, *filled, old=old)
    for payload in (whole(opcodes), named(opcodes), named(reduce("torch", "Size", opcodes))):
        refused(payload)
    inner = reduce("torch.storage", "_load_from_bytes", value(b"\x80\x02" + opcodes + b"."))
    refused(named(reduce("torch._utils", "_rebuild_tensor_v2", inner, 0, (1,), (1,), False, b"N")))
    per_rank = b"c" + b"x\nLocalSerializedTensor\n)\x81}" + value("values") + value([whole(opcodes)]) + b"sb"
    refused(named(per_rank))
    assert not Path(mark).exists()


def test_the_message_names_the_global_and_the_remedy() -> None:
    message = refused(whole(reduce("os", "system", "true")))
    assert "'os.system'" in message and "safetensors" in message


METADATA = b"csglang\nFlattenedTensorMetadata\n"


@pytest.mark.parametrize(
    "opcodes",
    [
        b"Pid\n",  # a persistent id
        b"\x82\x01",  # an extension
        b"(cos\nsystem\no", b"(S'true'\nios\nsystem\n",  # old-style instances
        b"I1\n", b"V1\n", b"L1L\n", b"S'a'\n", b"p0\n",  # text
        b"\x96" + bytes(8), b"\x8f", b"2", b"0",
    ],
)  # fmt: skip
def test_opcodes_that_no_pickle_of_tensors_has_are_refused(opcodes: bytes) -> None:
    for payload in (named(opcodes), whole(opcodes)):
        assert "has opcode" in (message := refused(payload)) or "'os.system'" in message


@pytest.mark.parametrize(
    "opcodes",
    [
        b"ctorch\nSize\n" + value((None, {"_function": 1})) + b"b",  # state of a function
        b"ctorch\nSize\n" + value({"__call__": 1}) + b"b",
        METADATA + value((None, {"__setstate__": 1})) + b"b",  # state of a class
        METADATA + value({"a": 1}) + b"b",
        b"ctorch\nfloat32\n" + value((None, {"itemsize": 1})) + b"b",
        reduce("torch.storage", "_load_from_bytes"), reduce("torch.storage", "_load_from_bytes", 1),
        reduce("torch._utils", "_rebuild_tensor_v2", 1, 2, 3, 4),
        reduce("torch.multiprocessing.reductions", "rebuild_cuda_tensor", *range(15)),
        METADATA + b")\x81", value("id") + b"Q",
    ],
)  # fmt: skip
def test_odd_arguments_and_states_are_refused(opcodes: bytes) -> None:
    refused(named(opcodes))
    refused(whole(opcodes))


def test_valid_payloads_are_decoded_after_refused_ones() -> None:
    assert_equal(decode(encode(some_tensors(), "flattened_bucket"), CPU), some_tensors())


@pytest.mark.parametrize("opcode", [b"r\xff\xff\xff\x7f", b"q\xff"])
def test_a_memo_that_would_take_gigabytes_is_refused(opcode: bytes) -> None:
    assert "memo" in refused(whole(b"]" + opcode))


@pytest.mark.parametrize(
    "opcodes",
    [b"B" + b"\xff" * 4, b"\x8b\xff\xff\xff\x7f", *(c + b"\xff" * 7 + b"\0" for c in (b"\x8e", b"\x95"))],
)  # fmt: skip
def test_lengths_beyond_the_payload_are_refused(opcodes: bytes) -> None:
    refused(whole(opcodes))


def test_pickles_of_very_many_opcodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.weight_update.payload.pickle_machine._MAX_OPCODES", 1000)
    assert "1000 opcodes" in refused(whole(b"]" + b"Na" * 1000))


def saved(tensor: Tensor) -> bytes:
    """Returns the bytes that pickle writes for a tensor's storage."""
    storage = torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    )
    content: bytes = storage.__reduce__()[1][0]
    return content


def view(offset: object, size: object, stride: object, storage: bytes | None = None) -> bytes:
    content = reduce("torch.storage", "_load_from_bytes", value(storage or saved(torch.arange(6.0))))
    return named(reduce("torch._utils", "_rebuild_tensor_v2", content, offset, size, stride, False, b"N"))


def test_a_view_within_its_storage_is_decoded() -> None:
    [(_, tensor)] = decode(view(1, (2, 2), (1, 2)), CPU)
    assert torch.equal(tensor, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


@pytest.mark.parametrize(
    "offset, size, stride",
    [
        (0, (7,), (1,)), (1, (6,), (1,)), (0, (2, 3), (4, 1)), (0, (2,), (6,)), (6, (), ()), (-1, (2,), (1,)),
        (0, (2,), (-1,)), (0, (-2,), (1,)), (5, (2,), (-1,)), (0, (2,), (1, 1)), (0, (2, 2), (1,)),
        (0, (1 << 40,), (0,)), (0, (1 << 62, 1 << 62), (0, 0)), (0, (1 << 80,), (1,)), (1 << 70, (1,), (1,)),
        (0, (2,), (1 << 70,)), (0, (7,), (0,)), (0.0, (2,), (1,)), (True, (2,), (1,)), (0, "12", "11"),
        (0, (2.0,), (1,)), (0, None, None), (0, (1,) * 65, (1,) * 65), (0, {1: 2}, {1: 2}),
        (0, (0, 1 << 61, 1 << 61), (1, 1, 1)),
    ],
)  # fmt: skip
def test_a_view_beyond_its_storage_is_refused(offset: object, size: object, stride: object) -> None:
    message = refused(view(offset, size, stride))
    assert any(
        part in message for part in ("does not lie within", "arguments that do not fit", "65 items", "keys")
    )


def bucket(flat: Tensor, metadata: object) -> bytes:
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})


@pytest.mark.parametrize(
    "shape, dtype, start, end",
    [
        ((3,), torch.float32, 0, 13), ((3,), torch.float32, 8, 20), ((4,), torch.float32, 0, 12),
        ((3,), torch.float64, 0, 12), ((3,), torch.float32, -12, 0), ((3,), torch.float32, 12, 0),
        ((3,), torch.float32, 8, 1 << 70), ((-3,), torch.float32, 0, 12),
        ((3, 1 << 70), torch.float32, 0, 12), ((3,), torch.complex64, 0, 24), ((3,), "float32", 0, 12),
        ((3,), None, 0, 12), (3, torch.float32, 0, 12),
        (None, torch.float32, 0, 12), ((3,), torch.float32, None, 12), ((3,), torch.float32, 0.0, 12.0),
        ((1,) * 65, torch.float32, 0, 4), ((0, 1 << 61, 1 << 61), torch.float32, 0, 0),
    ],
)  # fmt: skip
def test_a_piece_beyond_its_bucket_is_refused(shape: Any, dtype: Any, start: Any, end: Any) -> None:
    flat = torch.zeros(16, dtype=torch.uint8)
    message = refused(bucket(flat, [FlattenedTensorMetadata("a", shape, dtype, start, end, 0)]))
    assert any(
        part in message for part in ("does not fill", "fields do not fit", "torch.complex64", "65 items")
    )


def test_pieces_of_a_bucket_need_not_be_aligned() -> None:
    sent = [("a", torch.ones(3, dtype=torch.int8)), ("b", torch.arange(5.0)), ("c", torch.arange(2))]
    decoded = decode(encode(sent, "flattened_bucket"), CPU)
    assert_equal(decoded, sent)
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for _, tensor in decoded)


def test_one_storage_that_many_tensors_refer_to_is_copied_once() -> None:
    tensor = torch.zeros(1 << 20)
    sent = [(str(index), tensor) for index in range(100)]
    typed = pickle.dumps(sent)
    decoded = decode(typed, CPU)
    assert len({tensor.data_ptr() for _, tensor in decoded}) == 1


def test_a_storage_that_is_not_what_its_header_says_is_refused() -> None:
    content = saved(torch.arange(6.0))
    count = struct.pack("<q", 6)
    assert content.count(count) == 1 and content.count(b"FloatStorage") == 1
    for wrong in (
        content[:-4],
        content + bytes(4),
        content.replace(count, struct.pack("<q", 7)),
    ):
        assert "inlined storage" in refused(view(0, (0,), (1,), wrong))
    refused(view(0, (6,), (1,), content[:40]))
    refused(view(0, (6,), (1,), content.replace(b"FloatStorage", b"UntypedStorage")))
    decode(view(0, (6,), (1,), content), CPU)


def cuda(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "tensor_class": b"ctorch\nTensor\n", "size": (4,), "stride": (1,), "offset": 0,
        "storage_class": b"ctorch.storage\nTypedStorage\n", "dtype": b"ctorch\nfloat32\n", "device": "GPU-x",
        "handle": value(b"\x01c" + bytes(64)), "storage_bytes": 16, "storage_offset": 0,
        "requires_grad": False, "counter_handle": value(b"/torch_1_2_3"), "counter_offset": 0,
        "event_handle": value(bytes(64)), "needs_event": True,
    } | changes  # fmt: skip
    return named(reduce("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified", *fields.values()))


def test_handles_to_gpu_memory_need_a_gpu() -> None:
    assert "safetensors" in refused(cuda())


@pytest.mark.parametrize(
    "changes",
    [
        {"counter_offset": 10_000}, {"counter_offset": -1}, {"counter_handle": value(b"/torch_1/../x")},
        {"counter_handle": value(b"/etc")}, {"counter_handle": "/torch_1_2_3"}, {"event_handle": value(b"")},
        {"needs_event": 1}, {"handle": "x"}, {"storage_bytes": -16}, {"storage_bytes": 1 << 70},
        {"storage_offset": -1}, {"size": (5,)}, {"stride": (2,)}, {"offset": 1}, {"device": "GPU-y"},
        {"device": -1}, {"dtype": 1},
    ],
)  # fmt: skip
def test_invalid_handles_are_refused_before_torch_uses_them(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(payload_module, "_shared_file_size", lambda handle: 1 << 20)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *args: opened.append(args))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("P", (), {"uuid": "GPU-x"}))
    device = torch.device("cuda", 0)
    with pytest.raises(InvalidRequestError):
        decode(cuda(**changes), device)
    assert not opened
    with pytest.raises(InvalidRequestError):  # the fake opens nothing; it only records its call
        decode(cuda(), device)
    assert opened == [(0, b"\x01c" + bytes(64), 16, 0, b"/torch_1_2_3", 0, bytes(64), True)]


@pytest.mark.parametrize("num_bytes, is_mapped", [(1, True), (60, True), (160, True), (161, False)])
def test_a_storage_must_end_within_mapped_memory(
    num_bytes: int, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = [(1000, 100), (1100, 100), (1300, 100)]  # address, bytes

    def address_range(base: Any, size: Any, address: Any) -> int:
        for start, count in mapped:
            if start <= address.value < start + count:
                base._obj.value, size._obj.value = start, count
                return 0
        return 1

    driver = SimpleNamespace(cuMemGetAddressRange_v2=address_range)
    monkeypatch.setattr(payload_module.ctypes, "CDLL", lambda name: driver)
    storage: Any = SimpleNamespace(data_ptr=lambda: 1040, nbytes=lambda: num_bytes)
    with nullcontext() if is_mapped else pytest.raises(InvalidRequestError, match="has fewer"):
        payload_module._check_allocation("a", storage)


def test_mutated_payloads_are_refused_or_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutated bytes of valid payloads give refusals as the only errors, and stand-ins as the only globals."""
    found: set[type] = set()
    resolve = unpickle.resolve

    def note(module: str, name: str) -> Any:
        result = resolve(module, name)
        found.add(type(result))
        return result

    monkeypatch.setattr(unpickle, "resolve", note)
    random_ = random.Random(7)
    sent = some_tensors()
    good = [
        encode(sent),
        encode(sent, "flattened_bucket"),
        pickle.dumps(sent[:8]),
        cuda(),
        view(1, (2,), (1,)),
    ]
    num_refused = 0
    for _ in range(3000):
        try:
            for _, tensor in decode(mutated(random_.choice(good), random_), CPU):
                tensor.sum()  # reads every byte
        except InvalidRequestError:
            num_refused += 1
    assert 1000 < num_refused < 3000
    assert found == {unpickle.Function, type(unpickle.PerRank), torch.dtype, str}


def mutated(payload: bytes, random_: random.Random) -> bytes:
    result = bytearray(payload)
    for _ in range(random_.choice((1, 1, 2, 8))):
        at = random_.randrange(len(result))
        some = slice(at, at + random_.randrange(1, 9))
        match random_.randrange(4):
            case 0:
                result[at] = random_.randrange(256)
            case 1:
                result[at] ^= 1 << random_.randrange(8)
            case 2:
                del result[some]
            case 3:
                result[at:at] = result[some]
    return bytes(result)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 29, 30, 31, 59, 60, 61, 200])
def test_base64_is_decoded_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "BASE64_PIECE", 40)
    payload = random.Random(size).randbytes(size)
    assert from_base64(base64.b64encode(payload).decode()) == payload
