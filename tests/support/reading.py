"""Reads requests without an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

from tokencache import pauses
from tokencache.dialects.chat import request

P = ParamSpec("P")
R = TypeVar("R")


def at_once(reading: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that only pauses, to its end."""
    with patch.object(pauses, "_end_of_pause", lambda: asyncio.sleep(0)):
        try:
            while True:
                reading.send(None)
        except StopIteration as ended:
            result: R = ended.value
            return result


def _all_at_once(read: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    @wraps(read)
    def reads(*args: P.args, **kwargs: P.kwargs) -> R:
        return at_once(read(*args, **kwargs))

    return reads


read_chat = _all_at_once(request.read_chat)
read_tokenize = _all_at_once(request.read_tokenize)
