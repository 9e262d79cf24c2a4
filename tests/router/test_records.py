"""What a router makes of workers' records."""

from __future__ import annotations

import pytest

from segue.router.records import as_reached, wrong_role
from tests.router.workers import record


@pytest.mark.parametrize(
    ("address", "url", "reached"),
    [
        ("10.0.0.1:8998", "http://gpu-1:30000", "10.0.0.1:8998"),
        ("0.0.0.0:8998", "http://gpu-1:30000", "gpu-1:8998"),
        ("[::]:8998", "http://gpu-1", "gpu-1:8998"),
        ("[::]:8998", "http://[fd00::1]:30000", "[fd00::1]:8998"),
        ("", "http://gpu-1:30000", ""),
    ],
)
def test_an_address_that_means_any_is_replaced_by_the_host_of_the_url(
    address: str, url: str, reached: str
) -> None:
    found = as_reached(record("own", "prefill", kv_address=address), "gpu-1:30000", url)
    assert (found.worker_id, found.url, found.kv_address) == ("gpu-1:30000", url, reached)


def test_a_worker_must_have_the_role_that_the_options_say() -> None:
    assert wrong_role(record("w", "decode"), "decode") is None and wrong_role(record("w"), None) is None
    said = wrong_role(record("w", "decode"), "prefill")
    assert said is not None and "its --role is decode, and the router's --prefill names it" in said
