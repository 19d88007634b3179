r"""Computes the digest of an export: one hash over everything in it, which finds any change of the file.

The digest is the SHA-256, in hexadecimal digits, of the canonical JSON of the object without the digest itself. The canonical form depends
on the values only, so other tools may read and write the file: the order of members, white space, escapes and the notation of numbers do
not count.

Canonical JSON (UTF-8): members sorted by name, no white space, only `"`, `\\` and control characters escaped, numbers as msgspec writes
them (floats in the shortest notation that reads back as the same double), and floats that are whole numbers of at most 2**53 without
a fraction (`0.0` and `-0.0` are `0`, as JavaScript writes them). `canonical` returns these bytes.

A native rollout has its digest in the member `digest`. A row of another format has it in our labels (`tokencache`), because a trainer may
refuse members in its own object. The digest finds accidents: damaged, merged or edited files. It is no signature, because whoever changes
a file can compute it again.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_LABELS: tuple[tuple[str, ...], ...] = (
    (),
    ("tokencache",),
    ("extra_fields", "tokencache"),
    ("metadata", "tokencache"),
    ("info", "tokencache"),
    ("extra",),
)
"""Where the formats have what is ours: the object with the name of the session."""

_NEWER = ("state", "session_reward")
"""Members that only versions write that write a digest, too."""

_EXACT = 2.0**53
"""The largest float up to which every whole number is a float."""

_SORTED = msgspec.json.Encoder(order="sorted")
_WITHOUT_FLOATS = frozenset({int, str, bool, type(None)})


def canonical(value: Any) -> bytes:
    """Return the canonical JSON of a JSON value."""
    return _SORTED.encode(_whole_numbers(value))


def digest_of(value: Mapping[str, Any]) -> str:
    """Compute the digest of a rollout or row, given as decoded JSON. A digest that it holds already is left out."""
    return hashlib.sha256(canonical(_without(value, _path(value) or ()))).hexdigest()


def recorded_digest(value: Mapping[str, Any]) -> str | None:
    """Return the digest that a rollout or row holds; `None` if it has none: an older version wrote it, or it has no place for it."""
    path = _path(value)
    return None if path is None else _at(value, path).get("digest")


def has_lost_digest(value: Mapping[str, Any]) -> bool:
    """Whether a rollout or row has no digest although the version that wrote it wrote one."""
    path = _path(value)
    found = _at(value, path) if path is not None else {}
    return "digest" not in found and any(name in found for name in _NEWER)


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


def _whole_numbers(value: Any) -> Any:
    """Return a copy in which floats that are whole numbers are integers. It keeps its own stack, so no nesting is too deep for it."""
    root = [value]
    todo: list[dict[str, Any] | list[Any]] = [root]
    while todo:
        holder = todo.pop()
        places: Iterable[tuple[Any, Any]] = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for place, own in places:
            if isinstance(own, float):
                holder[place] = _whole(own)
            elif isinstance(own, dict):
                holder[place] = own.copy()
                todo.append(holder[place])
            elif isinstance(own, list | tuple):
                types = set(map(type, own))
                if types == {float}:  # log probabilities and, below, ids and masks are the bulk of an export
                    holder[place] = [_whole(one) if one.is_integer() else one for one in own]
                elif not types <= _WITHOUT_FLOATS:
                    holder[place] = [*own]
                    todo.append(holder[place])
    return root[0]


def _whole(value: float) -> float:
    return int(value) if value.is_integer() and -_EXACT <= value <= _EXACT else value
