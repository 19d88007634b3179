"""The guard: what is the trainer's is shown to who has the trainer's key, and to nobody else."""

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web

from tokencache.errors import HarnessError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Guard:
    """Lets requests through to a handler; without an admin key, all of them."""

    def __init__(self, admin_key: str | None) -> None:
        self._key = admin_key.encode() if admin_key is not None else None

    def __call__(self, handler: Handler) -> Handler:
        """Guard a handler.

        The guarded one raises `HarnessError` (401) for who has not the key.
        """

        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if self._key is not None and not hmac.compare_digest(given.encode(), self._key):
                raise HarnessError("this needs the admin key: Authorization: Bearer …", status=401, kind="authentication_error")
            return await handler(request)

        return guarded
