"""Runs operations (`protocol`) over HTTP, blocking or awaited, and makes methods of them.

An operation is a function with the object that it works on as its first argument. `blocking` and `awaited` turn it into a method of a
class with a transport, so `Client` and `AsyncClient` share every operation, its signature and its docstring.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import httpx2

from tokencache.client.errors import ClientError
from tokencache.client.protocol import Item, ItemSteps, Pause, Request, ServerResponse, Steps
from tokencache.session_url import is_local, printable_url

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

_CONNECTIONS = httpx2.Limits(max_connections=500, max_keepalive_connections=20)
"""Of one client. A trainer has as many requests in progress as rollouts, and many of them wait at the proxy. httpx allows 100."""


def _connected(kind: Callable[..., T], url: str) -> T:
    """Make a client of httpx. Raises `ClientError` if it cannot use the web proxy that the environment names."""
    try:
        return kind(base_url=url, limits=_CONNECTIONS, trust_env=not is_local(url))
    except (ImportError, ValueError) as why:
        raise ClientError(f"the web proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used: {why}") from None


class _Transport:
    """What both transports send and read. `timeout` is in seconds."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        self._url, self._admin_key, self._timeout = printable_url(url), admin_key, timeout

    def _arguments(self, request: Request) -> dict[str, Any]:
        return {
            "method": request.method,
            "url": request.path,
            "params": request.params,
            "content": request.body,
            "headers": request.headers(self._admin_key),
            "timeout": httpx2.Timeout(self._timeout + request.wait, pool=None),  # waiting for a connection is not an outage
        }

    def _read(self, response: httpx2.Response) -> ServerResponse:
        return ServerResponse(response.status_code, response.content, self._url, response.headers.get("location", ""))

    def _failed(self, error: httpx2.TransportError) -> ServerResponse:
        return ServerResponse(0, f"{type(error).__name__}: {error}".encode(), self._url)


class BlockingTransport(_Transport):
    """Runs operations with blocking calls."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        super().__init__(url, admin_key, timeout)
        self.http = _connected(httpx2.Client, url)

    def run(self, steps: Steps[T]) -> T:
        """Run an operation and return its result."""
        try:
            step = next(steps)
            while True:
                step = steps.send(self._answer(step))
        except StopIteration as done:
            return cast("T", done.value)

    def iterate(self, steps: ItemSteps[T]) -> Iterator[T]:
        """Run an operation and yield its results."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Item):
                    yield step.value
                    step = next(steps)
                else:
                    step = steps.send(self._answer(step))
        except StopIteration:
            return

    def _answer(self, step: Request | Pause) -> ServerResponse:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return NO_RESPONSE
        try:
            return self._read(self.http.request(**self._arguments(step)))
        except httpx2.TransportError as error:
            return self._failed(error)


class AwaitedTransport(_Transport):
    """Runs operations on the event loop."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        super().__init__(url, admin_key, timeout)
        self.http = _connected(httpx2.AsyncClient, url)

    async def run(self, steps: Steps[T]) -> T:
        """Run an operation and return its result."""
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._answer(step))
        except StopIteration as done:
            return cast("T", done.value)

    async def iterate(self, steps: ItemSteps[T]) -> AsyncIterator[T]:
        """Run an operation and yield its results."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Item):
                    yield step.value
                    step = next(steps)
                else:
                    step = steps.send(await self._answer(step))
        except StopIteration:
            return

    async def _answer(self, step: Request | Pause) -> ServerResponse:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return NO_RESPONSE
        try:
            return self._read(await self.http.request(**self._arguments(step)))
        except httpx2.TransportError as error:
            return self._failed(error)


NO_RESPONSE = ServerResponse(0, b"")
"""What an operation receives after a pause."""


def blocking(operation: Callable[Concatenate[S, P], Steps[T]]) -> Callable[Concatenate[S, P], T]:
    """Make a blocking method of an operation."""

    @functools.wraps(operation)
    def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        transport: BlockingTransport = cast("Any", self)._transport  # noqa: SLF001 - the classes of these methods have one
        return transport.run(operation(self, *args, **named))

    return method


def awaited(operation: Callable[Concatenate[S, P], Steps[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a coroutine method of an operation."""

    @functools.wraps(operation)
    async def method(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        transport: AwaitedTransport = cast("Any", self)._transport  # noqa: SLF001 - the classes of these methods have one
        return await transport.run(operation(self, *args, **named))

    return method


def blocking_iterator(operation: Callable[Concatenate[S, P], ItemSteps[T]]) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Make a method that returns an iterator of an operation with several results."""

    @functools.wraps(operation)
    def method(self: S, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        transport: BlockingTransport = cast("Any", self)._transport  # noqa: SLF001 - the classes of these methods have one
        return transport.iterate(operation(self, *args, **named))

    return method


def awaited_iterator(operation: Callable[Concatenate[S, P], ItemSteps[T]]) -> Callable[Concatenate[S, P], AsyncIterator[T]]:
    """Make a method that returns an asynchronous iterator of an operation with several results."""

    @functools.wraps(operation)
    def method(self: S, /, *args: P.args, **named: P.kwargs) -> AsyncIterator[T]:
        transport: AwaitedTransport = cast("Any", self)._transport  # noqa: SLF001 - the classes of these methods have one
        return transport.iterate(operation(self, *args, **named))

    return method
