"""Orders for an engine that is a process of its own: faults that a test asks for over HTTP.

    POST   /control/faults   [{"kind": "cut", "after": 3}, {"kind": "status", "status": 429, "body": "{}", "words": "session 7"}]
    DELETE /control/faults   forget those that have not come true

Each comes true once, for the next request to its route whose body holds its `words`: a proxy has questions of its own for an
engine, and those are not what a test wants to see fail.
"""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from tokencache.testing.delivery import json_answer
from tokencache.testing.faults import Fault, FaultKind

ROUTE = "/control/faults"


def fault_of(order: dict[str, Any]) -> Fault:
    """Read one fault as it is ordered: the fields of `Fault`, its kind by name and its body as text.

    Raises:
        ValueError: there is no such kind.
        TypeError: there is no such field.
    """
    fields = {name: value for name, value in order.items() if name != "words"}
    return Fault(**fields | {"kind": FaultKind(order["kind"]), "body": order.get("body", "").encode()})


class Orders:
    """The faults that were ordered and have not come true; asked for each request (`SimulatedEngine.choose_fault`)."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Fault]] = []

    def __call__(self, route: str, body: dict[str, Any]) -> Fault | None:
        """Take the fault that is to come true for a request, if there is one."""
        said = json.dumps(body, ensure_ascii=False) if self._waiting else ""
        for place, (words, fault) in enumerate(self._waiting):
            if fault.path == route and words in said:
                del self._waiting[place]
                return fault
        return None

    def routes(self) -> list[web.RouteDef]:
        """Make the routes by which orders come in."""

        async def order(http: web.Request) -> web.Response:
            self._waiting += [(one.get("words", ""), fault_of(one)) for one in await http.json()]
            return json_answer({"waiting": len(self._waiting)})

        async def forget(_: web.Request) -> web.Response:
            self._waiting.clear()
            return json_answer({"waiting": 0})

        return [web.post(ROUTE, order), web.delete(ROUTE, forget)]
