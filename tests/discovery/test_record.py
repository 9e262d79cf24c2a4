"""A record of another version does not count, and of a cohort the highest epoch does."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from segue.discovery.record import highest, pack_record, unpack_record
from tests.discovery.contract import record


def test_a_record_survives_the_way() -> None:
    assert unpack_record(pack_record(record())) == record()


@pytest.mark.parametrize("data", ["", "{}", "[1]", "\\", json.dumps({"cohort": "a", "epoch": "x"})])
def test_what_is_no_record_is_none(data: str) -> None:
    assert unpack_record(data) is None


def test_a_record_of_another_version_is_none() -> None:
    assert unpack_record(pack_record(structs.replace(record(), protocol=2))) is None


def test_the_highest_epoch_of_each_cohort_counts() -> None:
    records = [record("a", 1, "x"), record("b", 3, "x"), record("c", 2, "x"), record("a", 1, "w")]
    assert highest(records) == [record("a", 1, "w"), record("b", 3, "x")]
