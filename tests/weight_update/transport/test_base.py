import pytest
import torch

from segue.messages.weight_operations import Bucket, Manifest
from segue.weight_update.transport.base import plan, receive_buffer_size


@pytest.mark.parametrize(("flattened", "sizes"), [(False, [12, 4, 0]), (True, [16])])
def test_a_plan_has_torchs_dtypes_and_the_bytes_of_each_broadcast(flattened: bool, sizes: list[int]) -> None:
    bucket = Bucket(names=["a", "b", "c"], dtypes=["bf16", "torch.float32", "half"], shapes=[[2, 3], [], [0]])
    manifest = Manifest(group_name="g", buckets=[bucket], flattened=flattened)
    broadcasts = plan(manifest, None, torch.device("cpu"))
    assert [each.num_bytes for each in broadcasts] == sizes
    assert receive_buffer_size(broadcasts) == max(sizes)
    pieces = [(piece.name, piece.dtype, piece.num_bytes) for each in broadcasts for piece in each.pieces]
    assert pieces == [("a", torch.bfloat16, 12), ("b", torch.float32, 4), ("c", torch.float16, 0)]
