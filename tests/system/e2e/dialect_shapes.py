"""Compares two answers, or two streams, of one dialect: everything but ids, times and how the text was split."""

import json
import re

from dialect_table import OTHER_MEMBERS, OTHER_WORDS

_SAME = {"type", "role", "model", "object", "status", "stop_reason", "stop_sequence", "reason", "name", "namespace"}
_SAME |= {"text", "thinking", "input", "arguments", "input_tokens", "code", "instructions", "effort", "partial_json", "delta"}


def outline(value, at="", key=""):
    """An answer as a flat table: the path of each member → its value, or its type where values must differ.

    An item of Responses is named with its type.
    """
    if key in {"item", "output"} and isinstance(value, dict):
        at = f"{at}({value['type']})"
    if isinstance(value, dict) and value and key not in {"input", "tools", "metadata"}:
        return {place: what for name, inner in value.items() for place, what in outline(inner, f"{at}.{name}", name).items()}
    if isinstance(value, list) and value and key != "tools":
        return {place: what for n, inner in enumerate(value) for place, what in outline(inner, f"{at}[{n}]", key).items()}
    if value is None or isinstance(value, (bool, dict, list)) or key in _SAME:
        return {at: value}
    return {at: type(value).__name__}


def differences(dialect, ours, theirs):
    """Where two answers or events differ without permission: path, value here, value there."""
    ours, theirs, missing = outline(ours), outline(theirs), "absent"
    found = [(at, ours.get(at, missing), theirs.get(at, missing)) for at in sorted({*ours, *theirs})]
    return [entry for entry in found if entry[1] != entry[2] and not _listed(dialect, *entry)]


def _listed(dialect, at, *both):
    """Whether the table permits this difference: one side lacks the member, or each writes it in its own way."""
    place = at.removeprefix(".")
    return place in OTHER_WORDS or (
        not {None, "absent"}.isdisjoint(what for what in both if not isinstance(what, (dict, list)))
        and any(re.fullmatch(pattern, place) for pattern in OTHER_MEMBERS[dialect])
    )


def course(raw):
    """A stream as its events, `(name, data)`: adjacent deltas of one block are joined, because tokens determine their number."""
    steps = []
    for block in raw.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" not in lines or lines["data"] == "[DONE]" or lines.get("event") == "ping":
            continue
        data = json.loads(lines["data"])
        data.pop("sequence_number", None)
        name = lines.get("event")
        if steps and steps[-1][0] == name and name.endswith("delta") and name != "message_delta":
            into = steps[-1][1]
            inner, more = (into["delta"], data["delta"]) if isinstance(data["delta"], dict) else (into, {"delta": data["delta"]})
            if inner.get("type") == more.get("type", inner.get("type")) and place_of(into) == place_of(data):
                for member, words in more.items():
                    inner[member] = words if member == "type" else inner[member] + words
                continue
        steps.append((name, data))
    return steps


def gemini_course(responses):
    """Gemini's responses as one: adjacent parts of a kind are joined."""
    parts, last = [], {}
    for response in responses:
        candidate = response["candidates"][0]
        for part in candidate.pop("content")["parts"]:
            kind = set(part) - {"text", "thoughtSignature"}
            if parts and "text" in part and kind == set(parts[-1]) - {"text", "thoughtSignature"}:
                parts[-1]["text"] += part["text"]
            else:
                parts.append(part)
        last |= response
    return {"parts": parts, **last}


def place_of(data):
    """The block or item that an event is about."""
    return data.get("index", data.get("output_index"))
