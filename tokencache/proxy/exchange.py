"""An exchange: how one call is sent, and how its reply is said."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from multidict import CIMultiDict

from tokencache.dialects.dialect import EVENTS, Speaker

REQUEST_ID = "X-Request-Id"


class Exchange(NamedTuple):
    """How a call is sent, and how its reply is said.

    `body` is the engine's request where no driver writes it. `refuse` says an engine's refusal
    (status, body) in a dialect; `None` where the harness sees the engine's own bytes. `keep_alive`: seconds that a
    stream may be silent. `token_ids` is whether the reply's ids are said on its messages (`dialects.gym`). `speaks_as` makes the speaker
    that gives out another handle, where the dialect has any.
    """

    path: str
    headers: CIMultiDict[str]
    speaker: Speaker
    keep_alive: float
    refuse: Callable[[int, bytes], bytes] | None = None
    media_type: str = EVENTS
    token_ids: bool = False
    speaks_as: Callable[[str], Awaitable[Speaker]] | None = None
    body: bytes | None = None


def request_id(headers: CIMultiDict[str], call: str, post: int) -> CIMultiDict[str]:
    """Give a request an id of its own: vLLM makes its request's id of it, and two that have the same get in each other's way.

    It ends with the call's id, which the turn has, too; a harness's own id stands before that, to be found in the engine's log.
    """
    own = headers.get(REQUEST_ID)
    unique = f"{call}-{post}" if post > 1 else call
    headers = headers.copy()
    headers[REQUEST_ID] = f"{own}-{unique}" if own else unique
    return headers
