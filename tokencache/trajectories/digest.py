"""Computes the digest of an export: one hash over everything in it, which finds any change of the file.

The digest is the SHA-256, in hexadecimal digits, of the canonical JSON of the object without the digest itself:

    json.dumps(value, sort_keys=True, separators=(",", ":"))      # Python; a number without a fraction is written as an integer

So the order of members, white space and the spelling of numbers (`1.0` and `1`) may change, and nothing else. A native rollout has its
digest in the member `digest`. A row of another format has it in our labels (`tokencache`): a trainer may refuse members in its own object.

The digest finds accidents: damaged, merged or edited files. It is no signature, because whoever changes a file can compute it again.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_LABELS: tuple[tuple[str, ...], ...] = (
    (),
    ("tokencache",),
    ("extra_fields", "tokencache"),
    ("metadata", "tokencache"),
    ("info", "tokencache"),
    ("extra",),
)
"""Where the formats have what is ours: the object with the name of the session."""

_WHOLE = 2**53
"""Above this, not every integer is a float, so that a float and an integer that look alike may differ."""


def digest_of(value: Mapping[str, Any]) -> str:
    """Compute the digest of a rollout or row, given as decoded JSON. A digest that it holds already is left out."""
    canonical = json.dumps(_canonical(_without(value, _path(value) or ())), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def recorded_digest(value: Mapping[str, Any]) -> str | None:
    """Return the digest that a rollout or row holds; `None` if it has none: an older version wrote it, or it has no place for it."""
    path = _path(value)
    return None if path is None else _at(value, path).get("digest")


def add_digest(value: dict[str, Any]) -> None:
    """Add the digest to a rollout or row, given as decoded JSON. A row without our labels has no place for it and stays as it is."""
    path = _path(value)
    if path is not None:
        _at(value, path)["digest"] = digest_of(value)


def _path(value: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the path of the object that holds the digest: our labels, or the whole object if all of it is ours."""
    return next((path for path in _LABELS if isinstance(found := _at(value, path), Mapping) and "session" in found), None)


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without(value: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Copy a value without its digest."""
    if not path:
        return {name: member for name, member in value.items() if name != "digest"}
    return {**value, path[0]: _without(value[path[0]], path[1:])}


def _canonical(value: Any) -> Any:
    """Write numbers without a fraction as integers, wherever they are."""
    if isinstance(value, dict):
        return {name: _canonical(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_canonical(member) for member in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    return value
