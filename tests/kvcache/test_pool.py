import pytest
import torch

from segue.kvcache import pool as pool_module
from segue.kvcache.pool import KVPool


def make(page_size: int = 4, dtype: torch.dtype = torch.bfloat16) -> KVPool:
    return KVPool(
        num_pages=5, num_layers=3, page_size=page_size, num_kv_heads=2, head_dim=8, dtype=dtype, device="cpu"
    )


def test_a_new_pool_is_zero_and_its_last_page_is_the_scratch_page() -> None:
    pool = make()
    assert pool.data.shape == (6, 3, 2, 4, 2, 8)
    assert pool.data.count_nonzero() == 0
    assert (pool.scratch_page, pool.scratch_slot) == (5, 20)


def test_the_pool_works_on_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module.mmap, "MADV_HUGEPAGE", 12345, raising=False)  # madvise raises EINVAL
    assert make().data.count_nonzero() == 0


def test_page_bytes_include_all_layers() -> None:
    assert make().page_bytes == 3 * 2 * 4 * 2 * 8 * 2


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_write_changes_its_kv_slots_in_its_layer_and_nothing_else(page_size: int) -> None:
    pool = make(page_size, torch.float32)
    slots = torch.tensor([page_size, 5 * page_size - 1, pool.scratch_slot])
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(1, pool.token_rows(slots), key, value)
    expected = torch.zeros_like(pool.data)
    for i, slot in enumerate(slots.tolist()):
        expected[slot // page_size, 1, 0, slot % page_size] = key[i]
        expected[slot // page_size, 1, 1, slot % page_size] = value[i]
    assert torch.equal(pool.data, expected)
