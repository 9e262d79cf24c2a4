import torch

from segue.kvcache.page_table import PageTable


def make() -> PageTable:
    return PageTable(max_running=3, max_seq_len=100, page_size=4, scratch_page=9, device="cpu")


def test_rows_are_aligned_and_hold_the_scratch_page_at_first() -> None:
    table = make()
    assert table.data.shape == (4, 32)
    assert table.data.dtype == torch.int32
    assert table.dummy_slot == 3
    assert (table.data == 9).all()


def test_assigned_pages_start_at_their_column() -> None:
    table = make()
    table.assign(1, 2, [7, 5])
    assert table.data[1, :5].tolist() == [9, 9, 7, 5, 9]


def test_kv_slots_are_computed_from_page_and_offset() -> None:
    table = make()
    table.assign(0, 0, [6, 2])
    table.assign(2, 0, [8])
    assert table.kv_slots(torch.tensor([0, 0, 2]), torch.tensor([3, 4, 1])).tolist() == [27, 8, 33]
