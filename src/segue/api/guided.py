"""The fields that guide an output, under the names of OpenAI, vLLM and SGLang, and the grammar they ask for.

A field that is null asks for nothing, and so does an empty text of SGLang's, which writes out its defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec import json as msgspec_json

from segue.api.openai.token_fields import TokenFields
from segue.errors import InvalidRequestError, UnsupportedFieldError, invalid_value, short_repr
from segue.guided.grammars import MAX_CHOICES
from segue.messages.guided import ANY_JSON_OBJECT, GrammarSpec

Schema = dict[str, Any] | bool | str  # a string is its JSON
TextChoices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
Found = tuple[str, GrammarSpec]  # the field's name, and what it asks for
RULES = {
    "guided_json": "a JSON schema, as an object or a string",
    "json_schema": "a JSON schema, as an object or a string",
    "structured_outputs.json": "a JSON schema, as an object or a string",
}
# Of `structured_outputs`: how vLLM should choose among its libraries, or form JSON.
_IGNORED = frozenset({"disable_fallback"})
_UNSUPPORTED = frozenset(
    {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "structural_tag"}
)


class JSONSchemaFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``response_format.json_schema``; the output always keeps to the schema, whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``response_format``: of type text, json_object or json_schema."""

    type: str
    json_schema: JSONSchemaFormat | None = None


class SGLangFields(Struct, frozen=True, kw_only=True):
    """SGLang's fields, in its ``sampling_params``."""

    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None


class GuidedFields(TokenFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields on OpenAI's routes; at most one may ask for something."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: TextChoices | None = None
    guided_grammar: str | None = None
    choice: TextChoices | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | None = None


# The names of all these fields, whose values may be large.
FIELD_NAMES = frozenset(GuidedFields.__struct_fields__) - frozenset(TokenFields.__struct_fields__)


def guided_options(body: SGLangFields | GuidedFields, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the sampling options of a body's fields, and how they are named in errors.

    ``names`` are the names of the other options.

    Raises:
        InvalidRequestError: a field is wrong, or two fields ask for something.
        UnsupportedFieldError: a field asks for what is not supported.
    """
    return _options(list(_found(body)), names)


def structured_options(value: dict[str, Any] | None, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the sampling options of ``structured_outputs`` alone, as :func:`guided_options` does."""
    return _options(list(_structured(value or {})), names)


def as_structured(spec: GrammarSpec) -> dict[str, Any]:
    """Return a ``structured_outputs`` that asks for a grammar."""
    if spec.kind == "choice":
        return {"choice": json.loads(spec.text)}
    return {"json" if spec.kind == "json_schema" else spec.kind: spec.text}


def _options(found: list[Found], names: Mapping[str, str]) -> dict[str, Any]:
    if len(found) > 1:
        both = f"{found[0][0]} and {found[1][0]}"
        raise InvalidRequestError(f"{both} both guide the output; give one of them", param=found[1][0])
    if not found:
        return {"names": names}
    ((name, spec),) = found
    return {"names": {**names, "grammar": name}, "grammar": spec}


def _found(body: SGLangFields | GuidedFields) -> Iterator[Found]:
    """Yield what the fields ask for, one after the other."""
    if isinstance(body, GuidedFields):
        if body.response_format is not None:
            yield from _response_format(body.response_format)
        yield from _structured(body.structured_outputs or {})
        yield from _schema("guided_json", body.guided_json)
        yield from _text("guided_regex", "regex", body.guided_regex)
        yield from _text("guided_grammar", "grammar", body.guided_grammar)
        yield from _choice("guided_choice", body.guided_choice)
        yield from _choice("choice", body.choice)
    yield from _schema("json_schema", body.json_schema)
    yield from _text("regex", "regex", body.regex)
    yield from _text("ebnf", "grammar", body.ebnf)


def _response_format(wanted: ResponseFormat) -> Iterator[Found]:
    """Yield what OpenAI's field asks for."""
    if (
        wanted.type in ("text", "json_object")
        and wanted.json_schema
        and wanted.json_schema.schema is not None
    ):
        name = "response_format.json_schema.schema"
        text = f"{name}: a schema guides the output with the type json_schema, and the type is {wanted.type}"
        raise InvalidRequestError(f"{text}; give that type, or leave the schema out", param=name)
    match wanted.type:
        case "text":
            return
        case "json_object":
            yield "response_format", GrammarSpec("json_schema", ANY_JSON_OBJECT)
        case "json_schema":
            name = "response_format.json_schema"
            if wanted.json_schema is None or wanted.json_schema.schema is None:
                name = name if wanted.json_schema is None else f"{name}.schema"
                raise InvalidRequestError(f"{name}: this field is required with type json_schema", param=name)
            yield from _schema(f"{name}.schema", wanted.json_schema.schema)
        case other:
            rule = "must be text, json_object or json_schema"
            raise invalid_value("response_format.type", other, rule)


def _structured(wanted: dict[str, Any]) -> Iterator[Found]:
    """Yield what vLLM's ``structured_outputs`` asks for."""
    for key, value in wanted.items():
        name = f"structured_outputs.{key}"
        if value is None or value is False or key in _IGNORED:
            if key == "json" and value is False:
                yield from _schema(name, value)
            continue
        match key:
            case "json":
                if not isinstance(value, (dict, bool, str)):
                    raise invalid_value(name, value, f"must be {RULES[name]}")
                yield from _schema(name, value)
            case "json_object":
                if value is not True:
                    raise invalid_value(name, value, "must be true or false")
                yield name, GrammarSpec("json_schema", ANY_JSON_OBJECT)
            case "regex" | "grammar":
                if not isinstance(value, str):
                    raise invalid_value(name, value, "must be a string")
                yield from _text(name, key, value)
            case "choice":
                if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
                    raise invalid_value(name, value, "must be a list of strings")
                if not 1 <= len(value) <= MAX_CHOICES:
                    raise invalid_value(name, f"{len(value)} strings", f"must have 1 to {MAX_CHOICES}")
                yield from _choice(name, value)
            case _ if key in _UNSUPPORTED:
                text = f"{name} is not supported, and {short_repr(value)} asks for it; leave it out"
                raise UnsupportedFieldError(text, param=name)
            case _:
                rule = "the fields are json, regex, choice, grammar and json_object"
                raise UnsupportedFieldError(f"{name} is not known: {rule}", param=name)


def _schema(name: str, schema: Schema | None) -> Iterator[Found]:
    """Yield a JSON schema; a string is its JSON, and an empty one asks for nothing."""
    if schema is None or schema == "":
        return
    text = schema if isinstance(schema, str) else _encoded(name, schema)
    yield name, GrammarSpec("json_schema", text)


def _encoded(name: str, schema: dict[str, Any] | bool) -> str:
    try:
        return msgspec_json.encode(schema).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"{name}: the schema is no JSON: {error}", param=name) from None


def _text(name: str, kind: Any, text: str | None) -> Iterator[Found]:
    """Yield a regular expression or a grammar; an empty one asks for nothing."""
    if text:
        yield name, GrammarSpec(kind, text)


def _choice(name: str, choices: list[str] | None) -> Iterator[Found]:
    """Yield a choice of texts, each once."""
    if choices is not None:
        yield name, GrammarSpec("choice", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))
