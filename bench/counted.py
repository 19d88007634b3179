"""Counts the bytes that the memory store holds per token: everything reachable from it, measured object by object."""

import asyncio
import contextlib
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from urllib.parse import urlsplit

from bench.client import Client, take_turn
from bench.talk import NEW
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def weigh(root: object) -> int:
    """Bytes of an object and of everything reachable only from it."""
    seen: set[int] = set()
    total, todo = 0, [root]
    while todo:
        one: Any = todo.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            todo += one
        else:
            todo += [getattr(one, name) for name in getattr(one, "__struct_fields__", ())]
            if hasattr(one, "__dict__"):
                todo.append(vars(one))
    return total


async def stored(upstream: str, turns: int) -> dict[str, float]:
    """What a session of so many turns holds."""

    def grow(port: int) -> None:
        talk = NEW.talk("counted")
        with contextlib.closing(Client(port)) as client:
            for _ in range(turns):
                take_turn(client, talk, "counted", NEW.tail)

    store = MemoryStore()
    async with serving(Settings(upstream=upstream, port=0), store) as (url, _):
        before = weigh(store)
        await asyncio.to_thread(grow, urlsplit(url).port or 0)
        last = (await store.turns("counted"))[-1]
        tokens, size = last.prompt_tokens + last.completion_tokens, weigh(store) - before
        return {"turns": turns, "tokens": tokens, "stored_bytes": size, "bytes_per_token": round(size / tokens, 2)}
