"""Formats of strings in JSON schemas: their texts have an end, and no sensible one is lost."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from segue.guided.beginning import END, ByteVocabulary
from segue.guided.formats import BOUNDS, bounded
from segue.guided.grammars import check, to_llguidance
from segue.messages.guided import GrammarSpec

LABELS = ".".join(["a" * 63] * 3)
CASES = [
    ("time", "10:20:30.123456789Z", "10:20:30.1234567890Z"),
    ("time", "10:20:30.5-02:30", "10:20:30."),
    ("time", "10:20:60Z", "10:20:30"),
    ("date-time", "2024-02-29t10:20:30.123456789+01:00", "2024-02-29T10:20:30.1234567890+01:00"),
    ("date", "2024-02-29", "2023-02-29"),
    ("date", "2000-02-29", "1900-02-29"),
    ("date", "1999-12-31", "1999-12-32"),
    ("date-time", "2004-02-29T00:00:00Z", "2100-02-29T00:00:00Z"),
    ("date-time", "2024-02-29T10:20:30z", "2024-02-29 10:20:30Z"),
    ("duration", "P1Y2M3DT4H5M6S", "P1H"),
    ("duration", "PT123456789012S", "PT1234567890123S"),
    ("duration", "P4W", "P1Y1234567890123M"),
    ("email", f"{'x' * 64}@b.de", f"{'x' * 65}@b.de"),
    ("email", f"a@{LABELS}.{'b' * 63}", f"a@{LABELS}.{'b' * 63}.c"),
    ("email", "a.b+c@[127.0.0.1]", "a@b@c"),
    ("hostname", f"{LABELS}.{'b' * 61}", f"{LABELS}.{'b' * 62}"),
]
FINITE = [*BOUNDS, "ipv4", "ipv6", "uuid"]


def matcher(schema: dict[str, Any]) -> LLMatcher:
    spec = GrammarSpec("json_schema", json.dumps(schema))
    check(spec)
    return LLMatcher(LLTokenizer(ByteVocabulary()), to_llguidance(spec), log_level=0)


def bits(mask: bytes) -> list[int]:
    return [index for index in range(END + 1) if mask[index // 8] >> index % 8 & 1]


def accepts(schema: dict[str, Any], value: object) -> bool:
    found, data = matcher(schema), list(json.dumps(value).encode())
    return bool(found.try_consume_tokens(data) == len(data) and found.is_accepting())


@pytest.mark.parametrize(("name", "text", "wrong"), CASES)
def test_a_format_takes_what_its_standard_has_up_to_the_bound(name: str, text: str, wrong: str) -> None:
    for more in ({}, {"pattern": "^[^_]*$"}, {"maxLength": 400}, {"pattern": "^[^_]*$", "allOf": [{}]}):
        schema = {"type": "string", "format": name, **more}
        assert accepts(schema, text) and not accepts(schema, wrong)
    assert accepts({"format": name}, 12)  # a format is about strings alone


@pytest.mark.parametrize("name", FINITE)
def test_whoever_never_wants_to_end_comes_to_an_end(name: str) -> None:
    """Draws favourite bytes wherever they may stand, and otherwise any but the closing quote."""
    for favourites in (b"1", b"a", b".1", b"-.a1"):
        found, random = matcher({"type": "string", "format": name}), Random(1)
        for _ in range(400):
            allowed = bits(found.compute_bitmask())
            others = [byte for byte in allowed if byte != ord('"')] or allowed
            favourite = next((byte for byte in favourites if byte in allowed), None)
            found.consume_token(random.choice(others) if favourite is None else favourite)
        assert found.is_stopped() and not found.is_error()


def test_formats_are_bounded_wherever_a_schema_may_stand_and_nowhere_else() -> None:
    inner, found = {"format": "time"}, {"format": "time", "pattern": BOUNDS["time"]}
    for wrap in (
        lambda x: x,
        lambda x: {"items": x},
        lambda x: {"items": [x]},
        lambda x: {"anyOf": [{}, x], "oneOf": [x], "allOf": [x], "prefixItems": [x]},
        lambda x: {"properties": {"format": x}, "$defs": {"a": x}, "patternProperties": {"b": x}},
        lambda x: {"items": {"additionalProperties": x}, "definitions": {"items": x}},
    ):
        given = wrap(inner)
        before = json.dumps(given)
        assert bounded(given) == wrap(found) and json.dumps(given) == before
    for other in (
        {"const": inner, "enum": [inner], "default": inner, "examples": [inner]},
        {"properties": {"format": True, "pattern": {"type": "null"}}},
        {"format": "uri"},
        {"format": ["time"]},
    ):
        assert bounded(other) == other
