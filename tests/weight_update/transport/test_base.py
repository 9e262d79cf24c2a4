from collections.abc import Sequence

import pytest
import torch

from segue.memory import backing
from segue.messages.weight_operations import Bucket, Manifest
from segue.weight_update.transport.base import allocate_buffers, plan, receive_buffer_size


@pytest.mark.parametrize(("flattened", "sizes"), [(False, [12, 4, 0]), (True, [16])])
def test_a_plan_has_torchs_dtypes_and_the_bytes_of_each_broadcast(flattened: bool, sizes: list[int]) -> None:
    bucket = Bucket(names=["a", "b", "c"], dtypes=["bf16", "torch.float32", "half"], shapes=[[2, 3], [], [0]])
    manifest = Manifest(group_name="g", buckets=[bucket], flattened=flattened)
    broadcasts = plan(manifest, None, torch.device("cpu"))
    assert [each.num_bytes for each in broadcasts] == sizes
    assert receive_buffer_size(broadcasts) == max(sizes)
    pieces = [(piece.name, piece.dtype, piece.num_bytes) for each in broadcasts for piece in each.pieces]
    assert pieces == [("a", torch.bfloat16, 12), ("b", torch.float32, 4), ("c", torch.float16, 0)]


def test_scratch_on_the_host_is_never_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from pinned memory to a CUDA device may read it after the next tensor has overwritten it."""
    kinds: list[tuple[int, str]] = []

    def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        kinds.append((shape[0], device.type))
        return torch.empty(*shape, dtype=dtype)

    monkeypatch.setattr(backing, "pinned", pinned)
    bucket = Bucket(names=["a", "b"], dtypes=["bf16", "float32"], shapes=[[3], [2]])
    manifest = Manifest(group_name="g", buckets=[bucket], flattened=True)
    broadcasts = plan(manifest, None, torch.device("cpu"))
    buffers, scratch = allocate_buffers(broadcasts, torch.device("cpu"), pinned=True)
    assert len(buffers) == 2 and scratch.numel() == 8
    assert kinds == [(14, "cuda"), (14, "cuda"), (8, "cpu")]
