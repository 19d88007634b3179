"""Reads the JSON that clients send, and writes JSON for them.

A strict reader (msgspec) is tried first. Clients and models also write JSON that it refuses (`core.strict_json` reads it):

    lone surrogates     `read` and `write` replace them with U+FFFD, because UTF-8 cannot encode them and no tokenizer accepts them.
                        Claude Code itself sends U+FFFD for them. Both have the same digest (`core.messages`)
    very long integers  read; written with all their digits
    NaN, Infinity       refused, as is a number outside the range of a double
    nested too deeply   refused: no member of an API is nested so deeply

    a member twice      refused where a body is read (`fields_of`, `refuse_repeated_members`): the engine might use the other one

Chat requests are not decoded as a whole. `fields_of` and `entries_of` return their members and list items as raw JSON, which the engine
gets as the client wrote it. If only Python's own JSON reader accepts a body, they return its members re-encoded.

A `Position` names a member in an error message. It is a chain of pairs. Its text is made only for an error, because a long history has
thousands of positions.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.core.strict_json import read, replace_surrogates
from tokencache.errors import HarnessError

Raw = msgspec.Raw
Position = str | tuple["Position", str | int]
"""A name (`""` for the whole request), or a member name or list index within another position."""

FIELDS = msgspec.json.Decoder(dict[str, Raw])
"""Reads an object that is known to be JSON: name → raw value. `fields_of` reads what clients wrote."""
VALUES, OBJECTS = msgspec.json.Decoder(list[Raw]), msgspec.json.Decoder(list[dict[str, Raw]])
"""Read a list: of raw values, or of objects."""
IDS = msgspec.json.Decoder(list[int])
"""Reads a list of token ids."""
NULL, TRUE = Raw(b"null"), Raw(b"true")
_KEY = re.compile(rb'[\s,{]*+("(?:[^"\\]|\\.)*+")\s*+:\s*+', re.DOTALL)
_END = re.compile(rb"\s*+\}\s*+")
_TOO_DEEP, _NO_OBJECT = "the request is nested too deeply", "the request body must be a JSON object"
_SHOWN = 80


def read_body(body: bytes) -> dict[str, Any]:
    """Read the body of a request that is translated.

    Raises:
        HarnessError: the body is not a JSON object, is nested too deeply, or has a member twice (`refuse_repeated_members`).
    """
    try:
        found = read(body)
    except ValueError as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    except RecursionError:
        raise HarnessError(_TOO_DEEP) from None
    if not isinstance(found, dict):
        raise HarnessError(_NO_OBJECT)
    refuse_repeated_members(body)
    return found


def write(value: Any) -> bytes:
    """Write compact JSON.

    Raises:
        HarnessError: the value is nested too deeply.
    """
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        raise HarnessError(_TOO_DEEP) from None
    except (ValueError, OverflowError):
        return replace_surrogates(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).encode()


def fields_of(body: bytes) -> dict[str, Raw]:
    """Return the members of a JSON object, raw. Accepts what Python's JSON reader accepts, including NaN and lone surrogates.

    Raises:
        HarnessError: the body is not a JSON object, or it has a member twice.
    """
    try:
        fields = FIELDS.decode(body)
    except (ValueError, RecursionError):
        pass
    else:
        if not _are_all(fields, body):
            refuse_repeated(body)
        return fields
    try:
        decoded = json.loads(body, object_pairs_hook=_unrepeated)
        if isinstance(decoded, dict):
            return {key.encode().decode(): Raw(json.dumps(value).encode()) for key, value in decoded.items()}
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    raise HarnessError(_NO_OBJECT)


def strict_fields(body: bytes) -> dict[str, Raw]:
    """Return the members of a JSON object, each exactly as it is written in the body.

    Raises:
        ValueError: it is not an object in strict JSON, or it has a member twice.
        RecursionError: it is nested too deeply.
    """
    fields = FIELDS.decode(body)
    if not _are_all(fields, body):
        raise ValueError("a member is given twice")
    return fields


def _are_all(fields: dict[str, Raw], body: bytes) -> bool:
    """Whether an object has these members and no others, each of them once. `fields` are in the order of their first appearance."""
    at = 0
    for name, raw in fields.items():
        key, value = _KEY.match(body, at), bytes(raw)
        if key is None or not body.startswith(value, key.end()) or msgspec.json.decode(key[1]) != name:
            return False
        at = key.end() + len(value)
    return _END.fullmatch(body, at) is not None or not fields


def refuse_repeated(body: bytes) -> None:
    """Check that no object in some JSON, at any depth, has a member twice: two readers might use different ones.

    Raises:
        HarnessError: a member is given twice.
    """
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body, object_pairs_hook=_unrepeated)


def refuse_repeated_members(body: bytes) -> None:
    """Check that a JSON object has no member twice, and neither have the objects that are its members.

    The lists in it are not searched, because a history is long: of what stands twice there, the engine gets only what was read here.

    Raises:
        HarnessError: a member is given twice.
    """
    try:
        objects = [bytes(raw) for raw in strict_fields(body).values() if bytes(raw).startswith(b"{")]
    except (ValueError, RecursionError):
        objects = [body]
    for one in objects:
        refuse_repeated(one)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0][:_SHOWN]
        raise HarnessError(f"{name!r} is given twice", param=name)
    return found


def entries_of(raw: Raw) -> list[bytes]:
    """Return the items of a JSON list, raw.

    Raises:
        ValueError: it is not a list.
    """
    return [bytes(item) for item in items_of(raw)]


def items_of(raw: Raw) -> Sequence[Raw | bytes]:
    """Return the items of a JSON list as `entries_of`, before they are copied."""
    try:
        return VALUES.decode(raw)
    except msgspec.DecodeError:
        decoded = json.loads(bytes(raw))
        if not isinstance(decoded, list):
            raise
        return [json.dumps(item).encode() for item in decoded]


def value_of(raw: Raw) -> Any:
    """Decode a member for the record; text that strict JSON cannot hold (NaN, a lone surrogate) is returned as written."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return bytes(raw).decode(errors="replace")


def member(fields: dict[str, Raw], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    """Decode a member; `default` if it is missing or null.

    Raises:
        HarnessError: the value has none of the types `kinds`.
    """
    raw = fields.get(name)
    if raw is None:
        return default
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"{name!r} cannot be read: {why}", param=name) from None
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise HarnessError(f"{name!r} must be of type {wanted}, not {type(value).__name__}", param=name)
    return value


def read_members(fields: dict[str, Raw], wanted: Mapping[str, tuple[tuple[type, ...], Any]]) -> dict[str, Any]:
    """Decode several members; `wanted` maps each name to its types and default. Raises the errors of `member`."""
    return {name: member(fields, name, *wanted[name]) if name in fields else wanted[name][1] for name in wanted}


def dotted(position: Position) -> str:
    """Name a position as Anthropic's API does: `messages.3.content`."""
    return ".".join([str(name) for name in _names(position)])


def bracketed(position: Position) -> str:
    """Name a position as OpenAI's and Google's APIs do: `input[3].content`."""
    text = ""
    for name in _names(position):
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text


def _names(position: Position) -> list[str | int]:
    names: list[str | int] = []
    while isinstance(position, tuple):
        position, name = position
        names.append(name)
    return [*([position] if position else []), *reversed(names)]
