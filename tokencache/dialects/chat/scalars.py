"""Writes the numbers and truth values of a request as the engine will read them, so that both sides read the same.

vLLM's models convert values of other JSON types (pydantic in lax mode,
https://docs.pydantic.dev/latest/concepts/conversion_table/, tried on vLLM 0.32): `"0.5"` is a number, `"2"`, `2.0` and `true` are whole
numbers, `0` and `"off"` are false. The proxy decides on these values, counts with them and records them. So it replaces a value that both
sides clearly read alike by what it means, and refuses every other one:

    whole numbers   `2.0`, and `"2"` where vLLM accepts them; not `true`, `" 2"`, `"1_0"`
    numbers         `"0.5"`; not `true`, NaN or infinities
    true, false     1 and 0, `1.0` and `0.0`; no text, which some of vLLM's checks take for true whatever it says
    lists of ids    no other values than whole numbers
    `null`          is left to the engine: it accepts it for some members
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from tokencache.dialects.members import KINDS, Kind
from tokencache.errors import HarnessError

Raw = msgspec.Raw

_DIGITS = re.compile(r"-?\d{1,18}", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,18}(\.\d{1,18})?", re.ASCII)
_USAGE, _CONTINUOUS = "include_usage", "continuous_usage_stats"
_EXACT = 2**53
"""Below it, every whole number is a double of its own."""


def read_whole(value: Any) -> int | None:
    """Return the whole number that a decoded value means; `None` if it is not clear."""
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else _count(value)


def _count(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value if type(value) is int else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def read_number(value: Any) -> float | None:
    """Return the number that a decoded value means; `None` if it is not clear."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        return float(value)
    return value if type(value) in {int, float} else None


def _truth(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | int | float) and value in {0, 1} else None


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(item) is int for item in value) else None


def _biases(value: Any) -> dict[str, float] | None:
    return value if isinstance(value, dict) and all(type(item) in {int, float} for item in value.values()) else None


def _options(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    given = {name: value[name] for name in (_USAGE, _CONTINUOUS) if value.get(name) is not None}
    meant = {name: _truth(option) for name, option in given.items()}
    if None in meant.values():
        return None
    return value if all(meant[name] is given[name] for name in given) else value | meant


class _Reader(NamedTuple):
    """How the values of a kind are read.

    Attributes:
        words: what its values are, for an error message.
        plain: the JSON that stays as it is.
        read: returns what a decoded value means; the value itself if it stays, `None` if it is not clear.
    """

    words: str
    plain: re.Pattern[bytes]
    read: Callable[[Any], Any]


_INTEGERS = re.compile(rb"null|0|-?[1-9]\d{0,17}")
_READERS = {
    Kind.WHOLE: _Reader("a whole number", _INTEGERS, read_whole),
    Kind.COUNT: _Reader("a whole number", _INTEGERS, _count),
    Kind.INTEGER: _Reader("a whole number", _INTEGERS, _integer),
    Kind.NUMBER: _Reader("a number", re.compile(rb"null|-?(0|[1-9]\d{0,17})(\.\d{1,18})?"), read_number),
    Kind.TRUTH: _Reader("true or false", re.compile(rb"null|true|false"), _truth),
    Kind.IDS: _Reader("a list of token ids", re.compile(rb"null|\[\]"), _ids),
    Kind.BIASES: _Reader("an object of numbers", re.compile(rb"null|\{\}"), _biases),
    Kind.OPTIONS: _Reader(
        f"an object, and its {_USAGE!r} and {_CONTINUOUS!r} true or false",
        re.compile(rb'null|\{"include_usage": ?(true|false)\}'),
        _options,
    ),
}
_MEMBERS = {name: _READERS[kind] for name, kind in KINDS.items()}
_TEXT_MEMBERS = {**_MEMBERS, "logprobs": _READERS[Kind.COUNT]}


def normalize(fields: dict[str, Raw], *, chat: bool = True) -> None:
    """Rewrite the numbers and truth values among a request's members, in place. In text completions (not `chat`), `logprobs` is a number.

    Raises:
        HarnessError: a value is not clear.
    """
    readers = _MEMBERS if chat else _TEXT_MEMBERS
    for name, raw in list(fields.items()):
        reader = readers.get(name)
        if reader is None or reader.plain.fullmatch(raw) is not None:
            continue
        try:
            value = msgspec.json.decode(raw)
            meant = reader.read(value)
        except (ValueError, RecursionError):  # NaN, a lone surrogate, or a number out of range
            meant = None
        if meant is None:
            shown = bytes(raw)[:80].decode(errors="replace")
            raise HarnessError(f"{name!r} must be {reader.words}, not {shown}", param=name)
        if meant is not value:
            fields[name] = Raw(msgspec.json.encode(meant))
