"""Lets code deep in vLLM add headers to the response of the request that is being served.

A request's prompt is made where vLLM has no access to the response. So a middleware puts an empty `ServedRequest` into a context variable,
other modules fill it, and the middleware adds the headers when the response begins. That works also if vLLM makes the prompt in a task of
its own: the task's context has the same object.

    x-tokencache-media: {"image":[[146,4],[210,30]]}       modality → offset and length of each placeholder in the prompt, in tokens
    x-tokencache-plugin: images                            the plugin is there; also where the other header would be too long

These two are on each response to a request with media, whoever made the prompt, and also on that of `/tokenize`: vLLM 0.32 returns the
ids of a prompt, and not where its media are. `prefixes` has more headers.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

MEDIA_HEADER, PLUGIN_HEADER = "x-tokencache-media", "x-tokencache-plugin"
_MOST = 8000
"""Longest value in bytes: clients refuse longer headers (aiohttp: 8,190)."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ServedRequest:
    """The request that is being served.

    Attributes:
        headers: headers that its response gets.
        prefixed: what `prefixes` knows about it.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.prefixed: Any = None


_SERVED: ContextVar[ServedRequest | None] = ContextVar("tokencache_served", default=None)
served = _SERVED.get
"""Returns the request that is being served; `None` if it did not come over HTTP."""


def report_media(placeholders: Mapping[str, Sequence[Any]]) -> None:
    """Report the placeholders of the request that is being served: modality → objects with `offset` and `length`."""
    found = {name: [(one.offset, one.length) for one in items] for name, items in placeholders.items() if items}
    request = served()
    if request is None or not found:
        return
    request.headers[PLUGIN_HEADER] = "images"
    value = json.dumps(found, separators=(",", ":"))
    if len(value) <= _MOST:
        request.headers[MEDIA_HEADER] = value


class ResponseHeaders:
    """An ASGI middleware that adds the headers."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = ServedRequest()
        _SERVED.set(request)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and request.headers:
                added = [(name.encode(), value.encode()) for name, value in request.headers.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
