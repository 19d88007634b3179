"""What all handlers of the API share: JSON responses, query parameters and the error for an unknown name."""

from collections.abc import Collection
from typing import Any

import msgspec
from aiohttp import web

from tokencache.errors import HarnessError

_ENCODER = msgspec.json.Encoder()


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return JSON."""
    return web.Response(body=_ENCODER.encode(body), status=status, content_type="application/json")


def flag(request: web.Request, name: str) -> bool:
    """Read a boolean query parameter; false if it is absent.

    Raises:
        HarnessError: the value is neither `true` nor `false`.
    """
    given = request.query.get(name, "false").lower()
    if given not in {"true", "false"}:
        raise HarnessError(f"{name} is true or false, not {given!r}", param=name)
    return given == "true"


def number(request: web.Request, name: str, default: int, *, most: int = 2**31) -> int:
    """Read a numeric query parameter.

    Raises:
        HarnessError: the value is not a number from 0 to `most`.
    """
    given = request.query.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdigit() or not int(given[:12]) <= most:
        raise HarnessError(f"{name} must be a number from 0 to {most}", param=name)
    return int(given)


def choice(request: web.Request, name: str, allowed: Collection[str], default: str) -> str:
    """Read a query parameter that has fixed values.

    Raises:
        HarnessError: the value is none of them.
    """
    given = request.query.get(name, default)
    if given not in allowed:
        raise HarnessError(f"{name} {given[:80]!r} is not one of: {', '.join(allowed)}", param=name)
    return given


def not_found(message: str) -> HarnessError:
    """Return the error (404) for a name that does not exist."""
    return HarnessError(message, status=404, kind="not_found_error")
