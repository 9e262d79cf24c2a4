from dataclasses import replace

import pytest
import torch

from segue.kernels.fp8 import FP8
from segue.kvcache.pool import KVPool, KVScales, KVShape


def shape_of(page_size: int = 4, dtype: torch.dtype = torch.bfloat16) -> KVShape:
    return KVShape(num_pages=5, num_layers=3, page_size=page_size, num_kv_heads=2, head_dim=8, dtype=dtype)


def make(page_size: int = 4, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    shape = shape_of(page_size, dtype)
    return KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8))


def test_the_last_page_is_the_scratch_page() -> None:
    pool = make()
    assert pool.data.shape == (6, 3, 2, 4, 2, 8)
    assert pool.scratch_page == 5


def test_a_pool_lies_in_the_memory_that_it_is_given() -> None:
    shape = shape_of()
    data = torch.zeros(shape.num_bytes, dtype=torch.uint8)
    pool = KVPool(shape, data)
    pool.data.fill_(1)
    assert pool.data.data_ptr() == data.data_ptr() and bool(data.view(torch.bfloat16).eq(1).all())
    with pytest.raises(RuntimeError):
        KVPool(shape, data[: shape.page_bytes - 2])


def test_page_bytes_include_all_layers() -> None:
    assert make().page_bytes == 3 * 2 * 4 * 2 * 8 * 2


def test_page_bytes_of_smollm2() -> None:
    # 30 layers, 3 KV heads of 64, bfloat16: 23,040 bytes per token
    def page_bytes(page_size: int, num_kv_heads: int) -> int:
        sizes = {"num_pages": 0, "num_layers": 30, "head_dim": 64, "dtype": torch.bfloat16}
        return KVShape(page_size=page_size, num_kv_heads=num_kv_heads, **sizes).page_bytes  # type: ignore[arg-type]

    assert page_bytes(1, 3) == 23_040
    assert page_bytes(16, 3) == 368_640
    assert page_bytes(16, 1) == 122_880  # one of three ranks


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_write_changes_its_kv_slots_in_its_layer_and_nothing_else(page_size: int) -> None:
    pool = make(page_size, torch.float32)
    slots = torch.tensor([page_size, 5 * page_size - 1, pool.scratch_page * page_size])
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(1, pool.token_rows(slots), key, value)
    expected = torch.zeros_like(pool.data)
    for i, slot in enumerate(slots.tolist()):
        expected[slot // page_size, 1, 0, slot % page_size] = key[i]
        expected[slot // page_size, 1, 1, slot % page_size] = value[i]
    assert torch.equal(pool.data, expected)


def make_fp8(scales: KVScales | None = None, dtype: torch.dtype = torch.float32) -> KVPool:
    shape = replace(shape_of(dtype=dtype), fp8=True)
    return KVPool(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8), scales)


def test_a_pool_in_fp8_has_a_byte_per_number() -> None:
    pool = make_fp8()
    assert pool.data.dtype == FP8 and pool.dtype == torch.float32
    assert pool.page_bytes == make().page_bytes // 2 == pool.data[0].nbytes


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.03), (3.0, 100.0)])
def test_a_write_in_fp8_returns_what_is_stored_times_its_scale(scales: tuple[float, float]) -> None:
    pool = make_fp8([(7.0, 7.0), scales, (7.0, 7.0)])
    rows = pool.token_rows(torch.tensor([3, 9]))
    given = [torch.linspace(-2.0, 2.0, 32).reshape(2, 2, 8) * scale for scale in scales]  # none is 0
    for views, before, after, scale in zip(
        (pool.key_rows, pool.value_rows), given, pool.write(1, rows, *given), scales, strict=True
    ):
        assert torch.equal(views[1][rows].float() * scale, after.flatten(1))
        torch.testing.assert_close(after, before, rtol=2**-4, atol=scale * 2**-10)
    assert int(pool.data.float().ne(0).sum()) == 2 * 2 * 2 * 8


def test_what_is_too_large_for_fp8_is_stored_as_its_greatest_value() -> None:
    pool = make_fp8([(1.0, 0.5)] * 3, torch.bfloat16)
    large = torch.tensor([[[500.0, -1e30, 448.0, float("nan")] * 2] * 2]).bfloat16()
    key, value = pool.write(0, torch.tensor([0]), large, large)
    assert key[0, 0, :3].tolist() == [448.0, -448.0, 448.0] and bool(key[0, 0, 3].isnan())
    assert value[0, 0, :3].tolist() == [224.0, -224.0, 224.0] and bool(value[0, 0, 3].isnan())


def test_pools_that_cannot_read_each_others_pages_have_different_formats() -> None:
    one, other = [(0.5, 1.0)] * 3, [(1.0, 0.5)] * 3
    found = [make(), make(dtype=torch.float32), make_fp8(), make_fp8(one), make_fp8(other)]
    assert [pool.format for pool in found[:3]] == ["bfloat16", "float32", "fp8"]
    assert len({pool.format for pool in found}) == 5
    assert make_fp8(list(one)).format == found[3].format and make_fp8([(1.0, 1.0)] * 3).format == "fp8"
