"""The options of a router."""

from __future__ import annotations

import pytest

from segue.errors import ConfigError
from segue.router.config import RouterConfig


@pytest.mark.parametrize(
    "text", ["http://a:1,http://b:2", "http://a:1 http://b:2/", " http://a:1/ , http://b:2"]
)
def test_workers_are_urls_with_commas_or_spaces(text: str) -> None:
    assert RouterConfig(worker=text).urls == [("http://a:1", None), ("http://b:2", None)]


@pytest.mark.parametrize(
    "text",
    ["a:1", "ftp://a:1", "http://a:1/v1", "http://a:x", "http://me:secret@a:1", "http://", "http://a:1,"],
)
def test_what_is_no_url_of_a_server_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a server's URL, like http://gpu-1:30000"):
        RouterConfig(worker=text)


def test_the_rules_of_a_choice_come_from_the_options() -> None:
    rules = RouterConfig(policy="round_robin", laps_alloc_threshold=99, laps_overflow_ms=20.0).rules
    assert (rules.prefill_policy, rules.decode_policy) == ("round_robin", "round_robin")
    assert (rules.laps_threshold, rules.laps_overflow_s) == (99, 0.02)


def test_each_part_of_a_pair_may_have_a_policy_of_its_own() -> None:
    options = {"prefill_policy": "power_of_two", "decode_policy": "cost", "local_prefill_tokens": 7}
    rules = RouterConfig(policy="round_robin", **options).rules
    found = (rules.prefill_policy, rules.decode_policy, rules.local_prefill_tokens)
    assert found == ("power_of_two", "cost", 7)


def test_an_option_may_say_which_role_its_workers_have() -> None:
    config = RouterConfig(worker="http://a:1", prefill="http://b:1 http://b:2", decode="http://c:1")
    assert config.urls == [
        ("http://a:1", None),
        ("http://b:1", "prefill"),
        ("http://b:2", "prefill"),
        ("http://c:1", "decode"),
    ]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"worker": "http://a:1,http://a:1/"}, "worker"),
        ({"worker": "http://a:1", "prefill": "http://a:1"}, "prefill"),
        ({"prefill": "http://a:1", "decode": "https://a:1"}, "decode"),
    ],
)
def test_an_engine_that_is_named_twice_is_refused(options: dict[str, str], param: str) -> None:
    with pytest.raises(ConfigError, match=r"a:1 is named already, by --\w+; name") as error:
        RouterConfig(**options)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "worker_api_key", "worker_admin_key"])
@pytest.mark.parametrize("key", ["secret\n", " secret", "sec\r\nx: ret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: the key begins or ends with white space") as error:
        RouterConfig(**{name: key})
    assert "ret" not in error.value.message and error.value.param == name


def test_without_an_option_there_are_no_workers() -> None:
    assert RouterConfig().urls == []
