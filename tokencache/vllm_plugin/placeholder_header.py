"""Tells clients where the placeholders of images and other media are in the prompt that vLLM uses, as headers of the response.

vLLM 0.32 returns the ids of a prompt, and not where its media are. These are on each response to a request with media, whoever made the
prompt, and also on that of `/tokenize`:

    x-tokencache-media: {"image":[[146,4],[210,30]]}       modality → offset and length of each placeholder, in tokens
    x-tokencache-plugin: images                            the plugin is there; also where the other header would be too long

The request's prompt is made deep in vLLM's code, which has no access to the response. So a middleware leaves an empty report in a context
variable, `report` fills it, and the middleware adds the headers when the response begins. That works also if vLLM makes the prompt in a
task of its own: the task's context has the same report.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

HEADER, PLUGIN_HEADER = "x-tokencache-media", "x-tokencache-plugin"
_MOST = 8000
"""Longest value in bytes: clients refuse longer headers (aiohttp: 8,190)."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REPORT: ContextVar[dict[str, list[tuple[int, int]]] | None] = ContextVar("tokencache_placeholders", default=None)


def report(placeholders: Mapping[str, Sequence[Any]]) -> None:
    """Report the placeholders of the request that is being served: modality → objects with `offset` and `length`."""
    found = _REPORT.get()
    if found is not None:
        found.update({name: [(one.offset, one.length) for one in items] for name, items in placeholders.items() if items})


class PlaceholderHeader:
    """An ASGI middleware that adds the headers."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found: dict[str, list[tuple[int, int]]] = {}
        _REPORT.set(found)

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and found:
                value = json.dumps(found, separators=(",", ":")).encode()
                added = [(PLUGIN_HEADER.encode(), b"images"), (HEADER.encode(), value)]
                message = {**message, "headers": [*message.get("headers", ()), *added[: 1 + (len(value) <= _MOST)]]}
            await send(message)

        await self._app(scope, receive, send_with_header)
