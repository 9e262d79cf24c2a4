"""From a parsed JSON body to a pydantic model, with errors that name the field and the rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from segue.errors import InvalidRequestError, UnsupportedFieldError, shown

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
UNKNOWN_FIELD = "unknown_field"
MAX_NAME_CHARS = 80  # of a field's name, in an error
MAX_MESSAGE_CHARS = 200  # of what a decoder says
MAX_ID_DIGITS = 18

# A list that is given up at its first wrong item: a report of millions takes a minute and gigabytes.
FastList = Annotated[list[Item], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A value that was checked while it was decoded from JSON, so that no model has to go through it."""

    value: Any


def _unless_decoded(value: Any, check: Callable[[Any], Any]) -> Any:
    return value.value if isinstance(value, Decoded) else check(value)


TAKES_DECODED = WrapValidator(_unless_decoded)  # annotates a field of a model


def parse(
    model: type[Model], body: Any, *, rules: Mapping[str, str] | None = None, prefix: str = ""
) -> Model:
    """Validate ``body``; ``rules`` says in words what fields of several types may be.

    Raises:
        InvalidRequestError: the first wrong field.
        UnsupportedFieldError: an unknown field of a model that forbids them.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequestError(
            f"expected a JSON object{f' for {prefix}' if prefix else ''}, got {shown(body)}"
        )
    try:
        return model.model_validate(body)
    except ValidationError as invalid:
        raise _field_error(invalid, rules or {}, prefix) from None


class StrictBody(BaseModel):
    """A body whose unknown fields are errors, the first of them at once."""

    @model_validator(mode="before")
    @classmethod
    def _know_every_field(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields:
                    raise PydanticCustomError(UNKNOWN_FIELD, "{name}", {"name": name})
        return data


def misfit(
    error: msgspec.ValidationError, param: str, rules: Mapping[str, str], first: int = 0
) -> InvalidRequestError:
    """What msgspec found wrong inside the field ``param``, in this API's words.

    ``first``: the index of the first item that it was given of a list.
    """
    message, _, path = str(error).partition(" - at `$")
    steps: list[int | str] = [
        int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|\.(\w+)", path)
    ]
    if steps and isinstance(steps[0], int):
        steps[0] += first
    if field := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", message, re.DOTALL):
        steps.append(field[2])
    location, rule = _cut([param, *steps], rules)
    where = _path(location, "")
    if rule is not None:
        return InvalidRequestError(f"{where}: expected {rule}", param=where)
    if field is None:
        return InvalidRequestError(
            f"{where}: {message[0].lower()}{message[1:MAX_MESSAGE_CHARS]}", param=where
        )
    if field[1] == "missing required":
        return InvalidRequestError(f"{where}: this field is required", param=where)
    return unknown_field(where)


def unknown_field(param: str) -> UnsupportedFieldError:
    """The error for a field that the API does not have."""
    return UnsupportedFieldError(f"{param}: this field is not known here; leave it out", param=param)


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema with what each ``$ref`` refers to in its place; our models do not recurse."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                return resolve(definitions[reference.rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(each) for each in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def token_biases(value: Any) -> dict[int, float]:
    """``logit_bias``, whose keys are strings in JSON."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ValueError(f"the bias of token {shown(token)} must be a number")
        if not str(token).isascii() or not str(token).isdigit() or len(str(token)) > MAX_ID_DIGITS:
            raise ValueError(f"{shown(token)} is not a token id")
        biases[int(token)] = bias
    return biases


BIAS_SCHEMA = WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(token_biases),
    BIAS_SCHEMA,
]


def _field_error(invalid: ValidationError, rules: Mapping[str, str], prefix: str) -> InvalidRequestError:
    error = invalid.errors(include_url=False)[0]
    location, rule = _cut(error["loc"], rules)
    if error["type"] == UNKNOWN_FIELD:
        location, rule = [*location, error["ctx"]["name"]], None
    param = _path(location, prefix)
    if error["type"] == UNKNOWN_FIELD:
        return unknown_field(param)
    if error["type"] == "missing":
        return InvalidRequestError(f"{param}: this field is required", param=param)
    if rule is not None:
        return InvalidRequestError(f"{param}: expected {rule}", param=param)
    message = error["msg"].removeprefix("Value error, ")
    return InvalidRequestError(
        f"{param}={shown(error['input'])}: {message[0].lower()}{message[1:]}", param=param
    )


def _cut(location: Sequence[int | str], rules: Mapping[str, str]) -> tuple[Sequence[int | str], str | None]:
    """Leave out what follows a field of several types: the alternatives that did not match."""
    for index, part in enumerate(location):
        if isinstance(part, str) and part in rules:
            return location[: index + 1], rules[part]
    return location, None


def _path(location: Sequence[int | str], prefix: str) -> str:
    path = prefix
    for part in location:
        name = str(part)[:MAX_NAME_CHARS]
        path += f"[{name}]" if isinstance(part, int) else f".{name}" if path else name
    return path
