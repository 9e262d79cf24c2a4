"""Turns another project's CustomResourceDefinition into a JSON schema that manifests are checked against.

    python scripts/crd_schema.py SOURCE FILE [COPYRIGHT]

FILE is a copy of the definition, and SOURCE says where it is from: a URL with the release in it. The schema
goes into deploy/schemas/, with SOURCE, the licence and COPYRIGHT in front. It has the version that clusters
store, and of that what a manifest consists of: no descriptions and no status. Objects are closed, as the API
server closes them for a strict client, and parts that occur several times are there once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "schemas"
LICENCE = "Apache License 2.0"
WORTH = 120  # characters of a part that is written once, and named where it occurs
KEPT = {
    *("type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems"),
    *("maxItems", "minProperties", "maxProperties", "required", "uniqueItems", "multipleOf"),
}
SEVERAL = ("allOf", "anyOf", "oneOf")


def convert(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a part of an OpenAPI schema as a JSON schema."""
    found = {name: value for name, value in schema.items() if name in KEPT}
    if "properties" in schema:
        found["properties"] = {name: convert(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = convert(schema["additionalProperties"])
    if "items" in schema:
        found["items"] = convert(schema["items"])
    for name in SEVERAL:
        if name in schema:
            found[name] = [convert(each) for each in schema[name]]
    if schema.get("x-kubernetes-int-or-string") and "anyOf" not in found:
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable"):
        return {"anyOf": [found, {"type": "null"}]}
    return found


def share(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the parts that occur several times under ``$defs``."""
    counts: Counter[str] = Counter()

    def count(part: Any) -> None:
        if isinstance(part, dict):
            text = json.dumps(part, sort_keys=True)
            counts[text] += 1
            if counts[text] > 1 and len(text) >= WORTH:
                return  # what it consists of is written once too
        for each in _parts(part):
            count(each)

    count(schema)
    shared = [text for text, number in counts.items() if number > 1 and len(text) >= WORTH]
    names = {text: f"part-{index}" for index, text in enumerate(shared)}

    def replaced(part: Any, *, is_definition: bool = False) -> Any:
        if isinstance(part, list):
            return [replaced(each) for each in part]
        if not isinstance(part, dict):
            return part
        name = names.get(json.dumps(part, sort_keys=True))
        if name is not None and not is_definition and _is_schema(part):
            return {"$ref": f"#/$defs/{name}"}
        return {key: replaced(each) for key, each in part.items()}

    definitions = {
        name: replaced(json.loads(text), is_definition=True)
        for text, name in names.items()
        if _is_schema(json.loads(text))
    }
    whole: dict[str, Any] = replaced(schema)
    return whole | {"$defs": definitions}


def _parts(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part.values())
    return list(part) if isinstance(part, list) else []


def _is_schema(part: dict[str, Any]) -> bool:
    """Whether an object is a schema, and not the table of an object's fields."""
    return isinstance(part.get("type"), str) or any(isinstance(part.get(name), list) for name in SEVERAL)


def json_schema(definition: dict[str, Any], source: str, notice: str = "") -> tuple[str, dict[str, Any]]:
    """Return the name of a schema's file, and the schema."""
    spec = definition["spec"]
    (version,) = [each for each in spec["versions"] if each["storage"]]
    whole = convert(version["schema"]["openAPIV3Schema"])
    whole["properties"].pop("status", None)
    whole["properties"]["apiVersion"] = {"const": f"{spec['group']}/{version['name']}"}
    whole["properties"]["kind"] = {"const": spec["names"]["kind"]}
    whole["required"] = sorted({*whole.get("required", ()), "apiVersion", "kind", "metadata"})
    comment = f"Made by scripts/crd_schema.py from {source}. {LICENCE}."
    head = {
        "$comment": f"{comment} {notice}".strip(),
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }
    return f"{spec['names']['kind'].lower()}-{version['name']}.json", head | share(whole)


def main() -> None:
    """Write one schema."""
    source, file, *notice = sys.argv[1:]
    name, schema = json_schema(yaml.safe_load(Path(file).read_text()), source, " ".join(notice))
    (FOLDER / name).write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main()
