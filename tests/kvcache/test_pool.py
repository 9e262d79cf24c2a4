import pytest
import torch

from segue.kvcache.pool import KVPool, KVShape


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
