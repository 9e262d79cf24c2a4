from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from segue.config import EngineConfig, default_cache_dir
from segue.errors import ConfigError
from segue.options import parse_sizes


def test_every_option_has_a_group_and_a_help_text() -> None:
    for option in fields(EngineConfig):
        assert option.metadata["group"], option.name
        assert option.metadata["help"].endswith("."), option.name


def test_explicit_options_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {"SEGUE_PORT": "1", "SEGUE_TP": "2", "OTHER": "x"}
    config = EngineConfig.create(environment, port=3)
    assert (config.port, config.tp, config.host) == (3, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("variable", "value", "name", "expected"),
    [
        ("SEGUE_DISABLE_OVERLAP", "1", "disable_overlap", True),
        ("SEGUE_DISABLE_OVERLAP", "no", "disable_overlap", False),
        ("SEGUE_MEMORY_RATIO", "0.5", "memory_ratio", 0.5),
        ("SEGUE_PAGE_SIZE", "4", "page_size", 4),
        ("SEGUE_DTYPE", "float16", "dtype", "float16"),
        ("SEGUE_MODEL", "x", "model", "x"),
    ],
)
def test_variables_become_typed_options(variable: str, value: str, name: str, expected: Any) -> None:
    assert getattr(EngineConfig.create({variable: value}), name) == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SEGUE_PORT", "many"),
        ("SEGUE_DISABLE_OVERLAP", "perhaps"),
        ("SEGUE_MEMORY_RATIO", "half"),
        ("SEGUE_TP", "0"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"(?i){variable[6:]}"):
        EngineConfig.create({variable: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 65536}, "port=65536: must be at most 65535"),
        ({"page_size": 0}, "page_size=0: must be at least 1"),
        ({"page_size": 1.5}, "page_size=1.5: expected int or None"),
        ({"tp": True}, "tp=True: expected int"),
        ({"dtype": "int8"}, "dtype='int8': choose one of auto, float32, bfloat16, float16"),
        ({"memory_ratio": 2}, "must be at most 1"),
        ({"memory_ratio": float("nan")}, "memory_ratio=nan: must be at least 0.01"),
        ({"weight_staging_gb": float("inf")}, "weight_staging_gb=inf: must be at most 1000000.0"),
        ({"weights_master_allow": "lan-1,10.0.0.0/99"}, "'10.0.0.0/99' is neither a host name"),
        ({"weights_master_allow": "lan-1 lan-2"}, "'lan-1 lan-2' is neither a host name"),
        ({"model": 5}, "expected str or None"),
        ({"chunked_prefill_size": 10**9}, "chunked_prefill_size=1000000000: must be at most 1048576"),
        ({"api_key": ""}, "api_key='': must not be empty"),
        (
            {"batch_prefill_batch_sizes": "1,,2"},
            "batch_prefill_batch_sizes='1,,2': expected numbers from 1 on",
        ),
        ({"batch_prefill_seq_lengths": "16,0"}, "expected numbers from 1 on, separated by commas"),
        ({"precompile_bs_paddings": [4, 0]}, "precompile_bs_paddings='4,0': expected numbers from 1 on"),
        ({"precompile_token_paddings": ()}, "precompile_token_paddings='': must not be empty"),
        (
            {"root_path": "segue"},
            "root_path='segue': expected a path like /segue, without a slash at its end",
        ),
        ({"root_path": "/"}, "root_path='/': expected a path"),
        ({"root_path": "/a/../b"}, "root_path='/a/../b': expected a path"),
        ({"root_path": "/a b"}, "root_path='/a b': expected a path"),
        ({"log_format": "xml"}, "log_format='xml': choose one of text, json"),
        ({"colour": 1}, "unknown option 'colour'; known: "),
    ],
)
def test_a_wrong_option_names_value_and_rule(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig.create({}, **options)
    assert words in raised.value.message
    assert raised.value.param == next(iter(options))


def test_sizes_are_separated_by_commas_or_spaces() -> None:
    assert parse_sizes(EngineConfig().batch_prefill_batch_sizes, "") == [1, 2, 4, 8]
    assert parse_sizes(EngineConfig().batch_prefill_seq_lengths, "") == [16, 32, 64, 128, 256]
    assert parse_sizes("3, 5", "") == parse_sizes(" 3 5 ", "") == [3, 5]


def test_lists_of_sizes_are_taken_too() -> None:
    config = EngineConfig(precompile_bs_paddings=[4, 8], batch_prefill_batch_sizes=(2,))
    assert (config.precompile_bs_paddings, config.batch_prefill_batch_sizes) == ("4,8", "2")


def test_hosts_addresses_and_networks_may_be_allowed() -> None:
    allowed = "localhost, gpu_1.lan,10.0.0.1,10.0.0.7/8,::1,fd00::/8"
    assert EngineConfig.create({}, weights_master_allow=allowed).weights_master_allow == allowed


def test_a_copy_is_checked_too() -> None:
    assert replace(EngineConfig(), port=5).port == 5
    with pytest.raises(ConfigError):
        replace(EngineConfig(), port=-1)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == "/somewhere/segue"


@pytest.mark.parametrize(("mode", "role"), [("null", "both"), ("prefill", "prefill"), ("decode", "decode")])
def test_the_role_has_sglangs_name_too(mode: str, role: str) -> None:
    assert EngineConfig.create({}, disaggregation_mode=mode).role == role
    assert EngineConfig.create({"SEGUE_DISAGGREGATION_MODE": mode}).role == role
    assert EngineConfig.create({}, disaggregation_mode=mode, role=role).role == role


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"disaggregation_mode": "decode", "role": "prefill"},
            "disaggregation_mode='decode' contradicts role='prefill': both name the same option; give one",
        ),
        ({"disaggregation_mode": "null", "role": "decode"}, "disaggregation_mode='null' contradicts"),
        ({"disaggregation_mode": "both"}, "disaggregation_mode='both': choose one of null, prefill, decode"),
        ({"disaggregation_mode": None}, "disaggregation_mode=None: choose one of"),
    ],
)
def test_two_names_of_the_role_may_not_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig.create({}, **options)
    assert words in raised.value.message and raised.value.param == "disaggregation_mode"


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "register_key"])
def test_a_key_with_the_line_break_of_its_file_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: the key begins or ends with white space"):
        EngineConfig.create({f"SEGUE_{name.upper()}": "secret\n"})


def test_the_model_may_have_several_names() -> None:
    assert EngineConfig.create({}).served_model_names == []
    assert EngineConfig.create({"SEGUE_SERVED_MODEL_NAME": "a, b/c"}).served_model_names == ["a", "b/c"]
    assert EngineConfig.create({}, served_model_name=["a", "b"]).served_model_names == ["a", "b"]
    for wrong, said in (("a,,b", "separated by ','"), ("a,a", "'a' comes twice")):
        with pytest.raises(ConfigError, match=said):
            EngineConfig.create({}, served_model_name=wrong)
