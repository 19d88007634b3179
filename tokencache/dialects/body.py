"""Bodies: a request's members, raw, and their values where somebody must know them.

For what is passed on as the harness wrote it. Strict reading first; where only Python's own JSON takes a body (lone surrogates, NaN),
its members are what that reads, written again: what the engine makes of them is the engine's to say.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from tokencache.errors import HarnessError

Raw = msgspec.Raw

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])


def fields_of(body: bytes) -> dict[str, Raw]:
    """The members of a body, raw.

    Raises:
        HarnessError: it is no JSON object.
    """
    try:
        return _FIELDS.decode(body)
    except (ValueError, RecursionError):
        return _lenient_fields(body)


def _lenient_fields(body: bytes) -> dict[str, Raw]:
    """Read what Python's own JSON accepts and strict readers refuse: lone surrogates, NaN."""
    try:
        decoded = json.loads(body)
        if isinstance(decoded, dict):
            return {key.encode().decode(): Raw(json.dumps(value).encode()) for key, value in decoded.items()}
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    raise HarnessError("the request body must be a JSON object")


def value_of(raw: Raw) -> Any:
    """Decode a member for the record; what no JSON can hold (NaN, a lone surrogate) is kept as it was written."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return bytes(raw).decode(errors="replace")


def _decode(raw: Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"{name!r} cannot be read: {why}", param=name) from None


def member(fields: dict[str, Raw], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    """The value of a member; `default` if it is missing or null.

    Raises:
        HarnessError: it is of none of these kinds.
    """
    raw = fields.get(name)
    if raw is None:
        return default
    value = _decode(raw, name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise HarnessError(f"{name!r} must be of type {wanted}, not {type(value).__name__}", param=name)
    return value


def model_of(fields: dict[str, Raw], served: Callable[[str], str]) -> str:
    """The model that is meant by the name in a body, by `served`; it is written into the body in that name's place.

    Raises:
        HarnessError: the name is no text.
    """
    named: str = member(fields, "model", (str,), "")
    model = served(named)
    if model != named:
        fields["model"] = Raw(msgspec.json.encode(model))
    return model


def entries_of(raw: Raw) -> list[bytes]:
    """The entries of a list, raw.

    Raises:
        ValueError: it is no list.
    """
    try:
        return [bytes(item) for item in _LIST.decode(raw)]
    except msgspec.DecodeError:
        decoded = json.loads(bytes(raw))
        if not isinstance(decoded, list):
            raise
        return [json.dumps(item).encode() for item in decoded]
