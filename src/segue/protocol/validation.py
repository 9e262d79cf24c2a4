"""From a parsed JSON body to a pydantic model, with errors that name the field and the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from segue.errors import InvalidRequestError, UnsupportedFieldError

Model = TypeVar("Model", bound=BaseModel)
SHOWN_CHARS = 80  # of a wrong value, in an error message


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


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


def _field_error(invalid: ValidationError, rules: Mapping[str, str], prefix: str) -> InvalidRequestError:
    error = invalid.errors(include_url=False, include_context=False)[0]
    location, rule = _cut(error["loc"], rules)
    param = _path(location, prefix)
    if error["type"] == "extra_forbidden":
        return UnsupportedFieldError(f"{param}: this field is not known here; leave it out", param=param)
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
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
