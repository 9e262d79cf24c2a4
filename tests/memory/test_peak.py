"""Tests of the peak meter."""

import mmap

import torch

from segue.memory.peak import PeakMeter

MIB = 1 << 20


def _touch(num_bytes: int) -> None:
    # Not with malloc, which may reuse memory that it holds.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, num_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    memory.close()


def test_peak_counts_memory_that_is_given_back_again():
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    _touch(64 * MIB)
    assert 60 * MIB <= meter.stop() < 100 * MIB


def test_an_earlier_peak_does_not_count():
    _touch(128 * MIB)
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    assert meter.stop() < 64 * MIB
