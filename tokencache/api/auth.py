"""Checks the admin key: passes a request to its handler, or returns 401.

The key is sent as `Authorization: Bearer <key>`. GET and HEAD requests may also send it as the password of HTTP Basic, with any user name:
browsers ask for it themselves, and `curl -u :KEY` and Prometheus send it that way. Requests that change something must use Bearer: a
browser repeats a Basic password in every later request, even in one that a foreign page makes it send.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from tokencache.errors import HarnessError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BEARER, BASIC = 'Bearer realm="tokencache"', 'Basic realm="tokencache: the admin key is the password", charset="UTF-8"'
_READING = frozenset({"GET", "HEAD"})


class AdminAuth:
    """Admits requests that have the admin key. Without an admin key it admits all requests."""

    def __init__(self, admin_key: str | None) -> None:
        self._key = admin_key.encode() if admin_key else None

    def admits(self, request: web.Request) -> bool:
        """Whether a request has the key, or none is set. The time of the comparison does not depend on the content of a wrong key."""
        return self._key is None or hmac.compare_digest(_key_of(request), self._key)

    def __call__(self, handler: Handler) -> Handler:
        """Wrap a handler so that it is called only with the key.

        Otherwise the wrapper raises `HarnessError` (401). Its headers name the ways to send the key (RFC 9110 §11.6.1).
        """

        async def checked(request: web.Request) -> web.StreamResponse:
            if self.admits(request):
                return await handler(request)
            # Offer Basic only if the browser itself opens a page. The viewer's page asks for the key in its own form.
            opened = request.method in _READING and "text/html" in request.headers.get("Accept", "")
            headers = {"WWW-Authenticate": f"{BASIC}, {BEARER}" if opened else BEARER}
            words = "this needs the admin key (Authorization: Bearer …; a command takes --admin-key)"
            raise HarnessError(words, status=HTTPStatus.UNAUTHORIZED, kind="authentication_error", headers=headers)

        return checked


def _key_of(request: web.Request) -> bytes:
    """Return the key of a request; `b""` if it sends none in an accepted way."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic" and request.method in _READING:
        try:
            return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
