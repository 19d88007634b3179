"""What all handlers of the API share: JSON bodies, query parameters, and the errors for names that the API does not know.

A member of a request's body that the route does not have is refused (422), because it would have no effect. Other tools may add query
parameters of their own, such as `?_=1`, so only those that look like misspelled ones, or that another route has, are refused.
"""

import math
import re
from collections.abc import Collection, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import inspect
from rapidfuzz import fuzz, process

from tokencache.errors import HarnessError
from tokencache.proxy.request_body import whole_body_of

_SIMILAR, _MISSPELLED = 60, 80
"""Least similarity, in percent, of a name that is suggested, and of a query parameter that is taken for a misspelled one."""
_AT = re.compile(r"(.*) - at `\$\.((\w++)[^`]*)`", re.DOTALL)
"""msgspec's message about an invalid member: what is wrong, its path, and the member of the body that it is in."""
_FORMLESS = ("Expected `object`", "Object missing")
"""How msgspec's messages begin about a body that is no object or lacks a member."""
_SHOWN = 80
_MOST_NAMED = 8

T = TypeVar("T", bound=msgspec.Struct)


def json_response(body: Any, status: int = HTTPStatus.OK) -> web.Response:
    """Return JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def read_body(request: web.Request, kind: type[T], *, invalid: int = HTTPStatus.BAD_REQUEST) -> T:
    """Decode the JSON body of a request. `invalid` is the status if it is not JSON, or a member is missing or invalid.

    Raises:
        HarnessError: `invalid`, or 422 if it has members that `kind` does not have.
        BodyTooLargeError, MemoryFullError: see `whole_body_of`.
    """
    body = await whole_body_of(request)
    try:
        _refuse_unknown(_unknown_members(msgspec.json.decode(body), inspect.type_info(kind)))
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise _invalid(error, inspect.type_info(kind), invalid) from None


def _invalid(error: Exception, kind: inspect.Type, status: int) -> HarnessError:
    """Return the error for a body that is not of a type: it names the invalid member, or shows how the whole body is written."""
    words, fields = str(error), kind.fields if isinstance(kind, inspect.StructType) else ()
    if found := _AT.fullmatch(words):
        what, path, name = found.groups()
        form = next(_form(field.type) for field in fields if field.encode_name == name)
        return HarnessError(f"`{name}` must be {form}: {what}{'' if path == name else f' (`{path}`)'}", status=status, param=name)
    if isinstance(error, msgspec.ValidationError) and not words.startswith(_FORMLESS):
        return HarnessError(words, status=status)
    return HarnessError(f"the body must be {_form(kind)}: {words}", status=status)


_SCALARS: dict[type[inspect.Type], str] = {
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.BoolType: "bool",
    inspect.NoneType: "null",
    inspect.DictType: "{…}",
    inspect.ListType: "[…]",
    inspect.VarTupleType: "[…]",
}
"""How values are written in JSON; all others are text."""


def _form(kind: inspect.Type) -> str:
    """Show how a value of a type is written in JSON; a member with a question mark may be left out."""
    match kind:
        case inspect.StructType():
            members = (f'"{field.encode_name}"{"" if field.required else "?"}: {_form(field.type)}' for field in kind.fields)
            return f"{{{', '.join(members)}}}"
        case inspect.Metadata():
            return _form(kind.type)
        case inspect.UnionType():
            return "|".join(dict.fromkeys(_form(one) for one in kind.types))
        case inspect.LiteralType():
            return "|".join(f'"{value}"' for value in kind.values)
        case _:
            return _SCALARS.get(type(kind), '"…"')


def refuse_parameters(request: web.Request, known: Collection[str], others: Collection[str]) -> None:
    """Check that no query parameter looks like a misspelled one of `known`, or is one of `others`, which other routes have.

    Raises:
        HarnessError: 422: one is.
    """
    for name in request.query:
        if name in known:
            continue
        nearest = _nearest(name, known, _MISSPELLED)
        if nearest is not None or name in others:
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = f"did you mean {nearest!r}?" if nearest is not None else f"this route does not have it; {has}"
            message = f"unknown query parameter {_quoted(name)}: {hint}"
            raise HarnessError(message, status=HTTPStatus.UNPROCESSABLE_ENTITY, param=name[:_SHOWN])


class _Unknown(NamedTuple):
    """An unknown member: the path of its object (`""` or ending with a dot), its name, and the members that the object may have."""

    path: str
    name: str
    known: Collection[str]

    def __str__(self) -> str:
        nearest = _nearest(self.name, self.known, _SIMILAR)
        if nearest is not None:
            hint = f"did you mean {self.path + nearest!r}?"
        else:
            hint = f"the members are: {', '.join(self.known)}" if self.known else "this route has none"
        return f"{_quoted(self.path + self.name)} ({hint})"


def _refuse_unknown(found: Iterator[_Unknown]) -> None:
    unknown = list(found)
    if unknown:
        named = ", ".join(map(str, unknown[:_MOST_NAMED]))
        more = f", and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        param = (unknown[0].path + unknown[0].name)[:_SHOWN]
        raise HarnessError(f"unknown members in the request body: {named}{more}", status=HTTPStatus.UNPROCESSABLE_ENTITY, param=param)


def _unknown_members(given: Any, kind: inspect.Type, path: str = "") -> Iterator[_Unknown]:
    """Find the members of a JSON value that its type does not have."""
    match kind, given:
        case inspect.StructType(), dict():
            known = {field.encode_name: field.type for field in kind.fields}
            for name, value in given.items():
                if name in known:
                    yield from _unknown_members(value, known[name], f"{path}{name}.")
                else:
                    yield _Unknown(path, name, known)
        case inspect.Metadata(), _:
            yield from _unknown_members(given, kind.type, path)
        case inspect.UnionType(), _:
            for one in kind.types:
                yield from _unknown_members(given, one, path)
        case (inspect.DictType(value_type=inner), dict()) | (inspect.ListType(item_type=inner), list()):
            for name, value in given.items() if isinstance(given, dict) else enumerate(given):
                yield from _unknown_members(value, inner, f"{path}{name}.")


def _nearest(name: str, known: Collection[str], similarity: int) -> str | None:
    found = process.extractOne(name, list(known), scorer=fuzz.ratio, processor=str.lower, score_cutoff=similarity)
    return found and found[0]


def _quoted(name: str) -> str:
    return repr(name[:_SHOWN])


def flag(request: web.Request, name: str) -> bool:
    """Read a boolean query parameter; false if it is absent. Raises `HarnessError` if the value is neither `true` nor `false`."""
    given = request.query.get(name, "false").lower()
    if given not in {"true", "false"}:
        raise HarnessError(f"{name} is true or false, not {given!r}", param=name)
    return given == "true"


def number(request: web.Request, name: str, default: int, *, most: int = 2**31) -> int:
    """Read a numeric query parameter. Raises `HarnessError` if the value is not a number from 0 to `most`."""
    given = request.query.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or not int(given[:12]) <= most:
        raise HarnessError(f"{name} must be a number from 0 to {most}", param=name)
    return int(given)


def seconds(request: web.Request, name: str) -> float | None:
    """Read a query parameter that is a time in seconds; `None` if it is absent.

    Raises:
        HarnessError: the value is not a finite number.
    """
    return finite(request, name, 0.0) if request.query.get(name) else None


def finite(request: web.Request, name: str, default: float) -> float:
    """Read a query parameter that is a finite number. Raises `HarnessError` if the value is not."""
    given = request.query.get(name, "")
    try:
        value = float(given) if given else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HarnessError(f"{name} must be a finite number, not {given[:_SHOWN]!r}", param=name)
    return value


def choice(request: web.Request, name: str, allowed: Collection[str], default: str) -> str:
    """Read a query parameter that has fixed values. Raises `HarnessError` if the value is none of them."""
    given = request.query.get(name, default)
    if given not in allowed:
        raise HarnessError(f"{name} {given[:80]!r} is not one of: {', '.join(allowed)}", param=name)
    return given


def not_found(message: str) -> HarnessError:
    """Return the error (404) for a name that does not exist."""
    return HarnessError(message, status=HTTPStatus.NOT_FOUND, kind="not_found_error")
