"""Makes methods of functions on a database: they run in a worker's thread."""

import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tokencache.store.file.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class Workers(Protocol):
    """What has such methods: a worker that reads and one that writes."""

    reader: Worker
    writer: Worker


S = TypeVar("S", bound=Workers)


def writes(function: Callable[Concatenate[S, sqlite3.Connection, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Run a function in a transaction that may write. If it raises an error, nothing of it is written."""

    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.writer.run(function.__name__, lambda database: function(self, database, *args, **kwargs))

    return method


def ends(function: Callable[Concatenate[S, sqlite3.Connection, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Run a function in a transaction that ends or removes something. It is possible on a full disk, too (`Disk`)."""

    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.writer.run(function.__name__, lambda database: function(self, database, *args, **kwargs), ends=True)

    return method


def reads(function: Callable[Concatenate[S, sqlite3.Connection, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Run a function in a transaction that only reads. It sees everything that was written before it started."""

    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.reader.run(function.__name__, lambda database: function(self, database, *args, **kwargs))

    return method
