"""Masks in memory that other processes map, and that a GPU may read until they are closed."""

import mmap
import os

import numpy as np
import pytest
import torch

from segue.memory import backing
from segue.model_runner.mask_table import MaskTable


@pytest.fixture
def locked(monkeypatch):
    """The tensors that are locked for the GPU, which this machine need not have."""
    found = []
    monkeypatch.setattr(backing, "lock", lambda rows, loss: not found.append(rows))
    monkeypatch.setattr(backing, "unlock", lambda rows: found.pop())
    return found


def test_other_processes_write_what_the_device_reads(locked):
    table = MaskTable(3, 70, torch.device("cuda"), shared=True)
    assert table.rows.shape == (3, 3) and (table.host == -1).all()
    assert [rows.data_ptr() for rows in locked] == [table.rows.data_ptr()]
    other = np.frombuffer(mmap.mmap(table.descriptor, table.rows.nbytes), dtype=np.int32).reshape(3, 3)
    other[1] = (5, 6, 7)
    assert table.rows[1].tolist() == [5, 6, 7]
    descriptor = table.descriptor
    table.close()
    table.close()
    assert not locked
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_masks_that_the_device_cannot_read_are_not_shared(monkeypatch):
    pinned, before = [], os.listdir("/proc/self/fd")
    monkeypatch.setattr(backing, "lock", lambda rows, loss: False)
    monkeypatch.setattr(
        backing,
        "pinned",
        lambda shape, dtype, device: pinned.append(device) or torch.empty(shape, dtype=dtype),
    )
    table = MaskTable(3, 70, torch.device("cuda"), shared=True)
    assert table.descriptor is None and (table.host == -1).all() and len(pinned) == 1
    table.close()
    assert os.listdir("/proc/self/fd") == before


def test_memory_that_goes_without_a_close_is_unlocked_before(locked):
    table = MaskTable(3, 70, torch.device("cuda"), shared=True)
    descriptor = table.descriptor
    assert len(locked) == 1
    del table
    assert not locked
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
