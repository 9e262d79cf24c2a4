"""Payloads with handles to another process's GPU memory, made by SGLang's clients and by `encode`."""

import multiprocessing
import pickle
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from segue.errors import InvalidRequestError
from segue.weight_update.payload.decode import decode, encode

pytestmark = pytest.mark.gpu

TIMEOUT = 60.0
SHAPES = [(), (5,), (300, 70), (0, 3), (1024, 1024)]


def values(device: str) -> list[tuple[str, torch.Tensor]]:
    dtypes = (torch.bfloat16, torch.float32, torch.int8)
    return [
        (f"{dtype}.{shape}", torch.full(shape, float(index), device=device).to(dtype))
        for index, (dtype, shape) in enumerate((dtype, shape) for dtype in dtypes for shape in SHAPES)
    ]


class Beyond:
    """A handle that claims a storage larger than its allocation."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        from torch.multiprocessing.reductions import reduce_tensor

        function, arguments = reduce_tensor(self.tensor)
        size = 1 << 36
        handle, rest = arguments[4:8], arguments[9:]
        return function, (arguments[0], (size,), (1,), 0, *handle, 4 * size, *rest)


def sender(form: str, pipe: Connection) -> None:
    torch.cuda.set_device(0)
    tensors = values("cuda")
    if form == "ours":
        payload = encode(tensors, "flattened_bucket")
    elif form == "theirs":
        from multiprocessing.reduction import ForkingPickler

        payload = bytes(ForkingPickler.dumps(tensors))
    elif form == "beyond":
        payload = pickle.dumps([("a", Beyond(torch.zeros(1024, device="cuda")))])
    torch.cuda.synchronize()
    pipe.send_bytes(payload)
    assert pipe.poll(TIMEOUT)
    pipe.recv_bytes()
    torch.cuda.ipc_collect()
    pipe.send_bytes(str(torch.cuda.memory_allocated()).encode())


def exchange(form: str, look: Any) -> int:
    """Call ``look`` with another process's payload; returns the bytes it has allocated afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=sender, args=(form, theirs))
    process.start()
    try:
        assert ours.poll(TIMEOUT), "the sender sent nothing"
        look(ours.recv_bytes())
        ours.send_bytes(b"done")
        assert ours.poll(TIMEOUT), "the sender did not end"
        return int(ours.recv_bytes())
    finally:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()


@pytest.mark.parametrize("form", ["ours", "theirs"])
def test_tensors_of_another_process_are_decoded_and_given_back(form: str) -> None:
    def look(payload: bytes) -> None:
        decoded = decode(payload, torch.device("cuda", 0))
        assert [name for name, _ in decoded] == [name for name, _ in values("cpu")]
        for (name, got), (_, was) in zip(decoded, values("cpu"), strict=True):
            assert got.is_cuda and (got.dtype, got.shape) == (was.dtype, was.shape), name
            assert torch.equal(got.cpu(), was), name

    left = exchange(form, look)
    total = sum(tensor.nbytes for _, tensor in values("cpu"))
    assert left <= total + 512 * len(values("cpu")), "the bucket was not taken back"


def test_a_storage_beyond_its_allocation_is_refused() -> None:
    def look(payload: bytes) -> None:
        with pytest.raises(InvalidRequestError, match="its allocation has fewer"):
            decode(payload, torch.device("cuda", 0))
        torch.cuda.synchronize()  # the context is alive

    exchange("beyond", look)


def test_a_handle_of_a_process_that_ended_is_refused() -> None:
    kept: list[bytes] = []
    exchange("ours", kept.append)
    with pytest.raises(InvalidRequestError):
        decode(kept[0], torch.device("cuda", 0))
