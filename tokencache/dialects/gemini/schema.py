"""Gemini's schemas → JSON Schema.

`parameters` and `responseSchema` are written in a dialect of OpenAPI 3.0: types in upper case, `nullable` beside the type,
whole numbers as text, members in either spelling. What both know under one name stays; what only Gemini knows is said
in JSON Schema's words or, where it constrains nothing, left out. (`parametersJsonSchema` and `responseJsonSchema` need
none of this.)

https://ai.google.dev/api/caching#Schema
"""

from typing import Any

from tokencache.dialects.gemini.entry import RequestObject, entry
from tokencache.errors import HarnessError

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_AS_IS = ("title", "description", "default", "pattern", "minimum", "maximum", "required", "$ref")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(schema: RequestObject) -> dict[str, Any]:
    """Say one schema in JSON Schema.

    Raises:
        HarnessError: it has a type that there is not, or members of a wrong type.
    """
    said: dict[str, Any] = _type(schema) | {name: value for name in _AS_IS if (value := schema.get(name)) is not None}
    if (ref := schema.text("ref")) is not None:
        said["$ref"] = ref
    said |= {name: count for name in _COUNTS if (count := schema.integer(name)) is not None}
    if (form := schema.text("format")) not in {None, "enum"}:  # "enum" repeats that there is one
        said["format"] = form
    if values := schema.values("enum"):
        said["enum"] = values
    if (example := schema.get("example")) is not None:
        said["examples"] = [example]
    said |= _inner(schema)
    return _nullable(said) if schema.flag("nullable") else said


def _type(schema: RequestObject) -> dict[str, Any]:
    kind = (schema.text("type") or "").lower()
    if kind in {"", "type_unspecified"}:
        return {}
    if kind not in _TYPES:
        raise HarnessError(f"{schema.at('type')}: there is no type {kind.upper()!r}", param=schema.at("type"))
    return {"type": kind}


def _inner(schema: RequestObject) -> dict[str, Any]:
    """The schemas within a schema."""
    said: dict[str, Any] = {}
    properties = schema.inner("properties")
    if properties is not None:
        order = schema.texts("propertyOrdering")
        names = [*(name for name in order if name in properties.members), *(name for name in properties.members if name not in order)]
        said["properties"] = {name: json_schema(entry(properties.members[name], properties.at(name))) for name in names}
    if (items := schema.inner("items")) is not None:
        said["items"] = json_schema(items)
    if choices := schema.objects("anyOf"):
        said["anyOf"] = [json_schema(choice) for choice in choices]
    rest = schema.get("additionalProperties")
    if rest is not None:
        said["additionalProperties"] = rest if isinstance(rest, bool) else json_schema(entry(rest, schema.at("additionalProperties")))
    defs = schema.inner("$defs") or schema.inner("defs")
    if defs is not None:
        said["$defs"] = {name: json_schema(entry(inner, defs.at(name))) for name, inner in defs.members.items()}
    return said


def _nullable(said: dict[str, Any]) -> dict[str, Any]:
    if "type" in said:
        said["type"] = [said["type"], "null"]
    if "enum" in said and None not in said["enum"]:
        said["enum"] = [*said["enum"], None]
    if "anyOf" in said:
        said["anyOf"] = [*said["anyOf"], {"type": "null"}]
    return said
