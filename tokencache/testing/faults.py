"""Defines the faults that a test can request from a simulated engine, one request at a time.

    engine.faults.append(Fault.cut(after=3))       # the stream of the next chat completion ends after three chunks

Each fault is taken from the front of the queue by one request. `None` in the queue lets one request pass.

An engine in a separate process receives faults over HTTP (`FaultOrders`):

    POST   /control/faults   [{"kind": "cut", "after": 3}, {"kind": "status", "status": 429, "body": "{}", "words": "session 7"}]
    DELETE /control/faults   remove the faults that have not happened

Each fault happens to the next request for its route whose body contains its `words`. So requests that a proxy makes on its own can be
left out.
"""

import enum
import json
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

ROUTE = "/control/faults"
_CHAT = "/v1/chat/completions"


class FaultKind(enum.Enum):
    """What goes wrong."""

    STATUS = "status"
    """Another status code and body, before anything is generated."""
    HANG = "hang"
    """No response until the client disconnects or the engine stops."""
    TRUNCATED = "truncated"
    """Status 200 and the first half of a JSON body, as if it were complete."""
    STALL = "stall"
    """A stream that sends everything but its end, then nothing until the client disconnects or the engine stops."""
    CUT = "cut"
    """A stream that ends properly by HTTP's rules, but without finish reason and `[DONE]`."""
    ERROR_EVENT = "error_event"
    """An error object within a stream, then `[DONE]`: how vLLM reports a failure after status 200 was sent."""
    CLOSE = "close"
    """The connection is closed."""
    ABORT = "abort"
    """The engine ends the reply on its own (`finish_reason: "abort"`), as when its weights are replaced."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault for one request. Use the class methods to make one.

    Attributes:
        after: number of chunks of the stream that are still sent; the role chunk is the first. For an abort: number of sampled tokens.
        path: route that fails. The fault stays in the queue until a request for that route.
    """

    kind: FaultKind
    status: int = 500
    body: bytes = b""
    content_type: str = "application/json"
    after: int = 0
    path: str = _CHAT

    @classmethod
    def answer(cls, status: int, body: bytes | str = b"", *, content_type: str = "application/json", path: str = _CHAT) -> Self:
        """Respond with `status` and `body` instead of generating."""
        raw = body.encode() if isinstance(body, str) else body
        return cls(FaultKind.STATUS, status=status, body=raw, content_type=content_type, path=path)

    @classmethod
    def hang(cls, *, path: str = _CHAT) -> Self:
        """Never respond."""
        return cls(FaultKind.HANG, path=path)

    @classmethod
    def truncated_json(cls, *, path: str = _CHAT) -> Self:
        """Respond 200 with half of the JSON. For requests that do not stream."""
        return cls(FaultKind.TRUNCATED, path=path)

    @classmethod
    def stall(cls) -> Self:
        """Send everything except the end of the stream."""
        return cls(FaultKind.STALL)

    @classmethod
    def cut(cls, after: int) -> Self:
        """End the stream after this many chunks."""
        return cls(FaultKind.CUT, after=after)

    @classmethod
    def error_event(cls, after: int, message: str = "Internal server error", *, status: int = 500) -> Self:
        """Send an error event with this status after this many chunks of the stream."""
        return cls(FaultKind.ERROR_EVENT, status=status, after=after, body=message.encode())

    @classmethod
    def close(cls, after: int = 0, *, path: str = _CHAT) -> Self:
        """Close the connection: before any response, or after this many chunks of a stream."""
        return cls(FaultKind.CLOSE, after=after, path=path)

    @classmethod
    def abort(cls, after: int) -> Self:
        """Abort the reply after this many tokens."""
        return cls(FaultKind.ABORT, after=after)


def read_order(order: dict[str, Any]) -> Fault:
    """Read a fault from JSON: the fields of `Fault`, with its kind by name and its body as text.

    Raises:
        ValueError: there is no such kind.
        TypeError: there is no such field.
    """
    fields = {name: value for name, value in order.items() if name != "words"}
    return Fault(**fields | {"kind": FaultKind(order["kind"]), "body": order.get("body", "").encode()})


class FaultOrders:
    """Faults that were ordered over HTTP and have not happened yet. Serves as `SimulatedEngine.choose_fault`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Fault]] = []

    def __call__(self, route: str, body: dict[str, Any]) -> Fault | None:
        """Take the fault that happens to a request, if there is one."""
        text = json.dumps(body, ensure_ascii=False) if self._waiting else ""
        for at, (words, fault) in enumerate(self._waiting):
            if fault.path == route and words in text:
                del self._waiting[at]
                return fault
        return None

    def routes(self) -> list[web.RouteDef]:
        """Make the routes that receive orders."""

        async def add(http: web.Request) -> web.Response:
            self._waiting += [(order.get("words", ""), read_order(order)) for order in await http.json()]
            return web.json_response({"waiting": len(self._waiting)})

        async def clear(_: web.Request) -> web.Response:
            self._waiting.clear()
            return web.json_response({"waiting": 0})

        return [web.post(ROUTE, add), web.delete(ROUTE, clear)]
