"""An exchange: how one call is sent, and how its reply is said."""

from collections.abc import Callable
from typing import NamedTuple

from multidict import CIMultiDict

from tokencache.dialects.dialect import EVENTS, Speaker


class Exchange(NamedTuple):
    """How a call is sent, and how its reply is said.

    `write` makes the engine's body, around an exact prompt (a JSON fragment) or none. `refuse` says an engine's refusal
    (status, body) in a dialect; `None` where the harness sees the engine's own bytes. `keep_alive`: seconds that a
    stream may be silent.
    """

    path: str
    headers: CIMultiDict[str]
    write: Callable[[bytes | None], bytes]
    speaker: Speaker
    keep_alive: float
    refuse: Callable[[int, bytes], bytes] | None = None
    media_type: str = EVENTS
