"""The guard: what is the trainer's is shown to who has the trainer's key, and to nobody else.

The key comes as `Authorization: Bearer <key>`. For looking, it may also come as the password of HTTP Basic, whatever the user's name:
browsers ask for it by themselves, `curl -u :KEY` and Prometheus send it so. A browser adds what it was once told to every later request,
even to one that a stranger's page makes it send; so nothing is changed for a key that comes that way.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web

from tokencache.errors import HarnessError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LOOKING = frozenset({"GET", "HEAD"})
BEARER, BASIC = 'Bearer realm="tokencache"', 'Basic realm="tokencache: the admin key is the password", charset="UTF-8"'


class Guard:
    """Lets requests through to a handler; without an admin key, all of them."""

    def __init__(self, admin_key: str | None) -> None:
        self._key = admin_key.encode() if admin_key else None

    def admits(self, request: web.Request) -> bool:
        """Whether a request brings the key, or none is needed. The time it takes does not tell how much of a key is right."""
        return self._key is None or hmac.compare_digest(_given(request), self._key)

    def __call__(self, handler: Handler) -> Handler:
        """Guard a handler.

        The guarded one raises `HarnessError` (401) for who has not the key; its headers say how to bring it (RFC 9110 §11.6.1).
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            if self.admits(request):
                return await handler(request)
            # A page that fetches asks for the key in its own form: no window of the browser's is to stand before it.
            opened = request.method in _LOOKING and "text/html" in request.headers.get("Accept", "")
            headers = {"WWW-Authenticate": f"{BASIC}, {BEARER}" if opened else BEARER}
            said = "this needs the admin key: Authorization: Bearer …"
            raise HarnessError(said, status=401, kind="authentication_error", headers=headers)

        return guarded


def _given(request: web.Request) -> bytes:
    """The key that a request brings; `b""` if it brings none that counts."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic" and request.method in _LOOKING:
        try:
            return base64.b64decode(token.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
