"""Bounds on the formats of strings in a JSON schema, so that a model cannot fill its output within one.

llguidance knows the formats. In some of them a part may be as long as one likes, such as the fraction of a
second. These parts get a bound here: the standard's own, or else one that no sensible value reaches.
"""

from __future__ import annotations

import json
from typing import Any

# llguidance gives every February 29 days. In RFC 3339 only those of leap years have as many.
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP}-02-29)"
# Each pattern is required beside the format itself, so it need not say more than what is bounded.
BOUNDS = {
    # RFC 3339 lets a fraction have any number of digits; nine are nanoseconds.
    "time": r"^[^.]*(\.[0-9]{1,9}[^0-9]*([0-9]{2}:[0-9]{2})?)?$",
    "date": f"^{_DAY}$",
    "date-time": rf"^{_DAY}[tT][^.]*(\.[0-9]{{1,9}}[^0-9]*([0-9]{{2}}:[0-9]{{2}})?)?$",
    # Numbers of any length in RFC 3339; twelve digits of seconds are 31,000 years.
    "duration": r"^PT?([0-9]{1,12}[A-Z]T?)+$",
    # RFC 5321, 4.5.3.1: 64 before the @, 255 behind it; its labels are those of a host name.
    "email": r"^[^@]{1,64}@[^@]{1,255}$",
    # RFC 1123 and RFC 1035: 255 bytes on the wire are 253 in text. llguidance bounds the labels.
    "hostname": r"^.{1,253}$",
}
# Keywords by what they have as their value. All others have values that are no schemas.
_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"),
    *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
)
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_bounds(text: str) -> str:
    """Return a JSON schema, given as its text, whose formats are bounded.

    What is no JSON stays as it is, for llguidance to refuse.
    """
    if '"format"' not in text:
        return text
    try:
        schema = json.loads(text)
        return json.dumps(bounded(schema))
    except (ValueError, RecursionError):
        return text


def bounded(schema: Any) -> Any:
    """Return a schema whose formats are bounded; the one that is given stays as it is.

    Raises:
        RecursionError: it is nested far more deeply than llguidance takes it.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _SCHEMA:
        if isinstance(found.get(key), dict):
            found[key] = bounded(found[key])
    for key in _LIST:
        if isinstance(found.get(key), list):
            found[key] = [bounded(each) for each in found[key]]
    for key in _MAP:
        if isinstance(found.get(key), dict):
            found[key] = {name: bounded(each) for name, each in found[key].items()}
    name = found.get("format")
    pattern = BOUNDS.get(name) if isinstance(name, str) else None
    if pattern is None:
        return found
    if "pattern" not in found:
        return found | {"pattern": pattern}
    others = found.get("allOf", [])
    return found | {"allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else found
