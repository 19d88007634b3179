"""Defines how operations talk to the proxy without I/O (the sans-I/O pattern: https://sans-io.readthedocs.io).

An operation is a generator. It yields a `Request` to send or a `Pause` to wait, receives the response to each request, and returns its
result. An operation that produces several results yields each as an `Item`. `transport` runs operations, blocking or awaited.

A request is sent up to four times if the proxy does not respond or its store fails (503), unless a repetition would do something twice.
Operations that run as long as a training, such as `collecting.follow`, repeat it for minutes (`through_outages`).
"""

import itertools
import math
import time
from collections.abc import Generator, Iterable
from http import HTTPStatus
from typing import Generic, TypeAlias, TypeVar

import msgspec

from tokencache.backoff import delays
from tokencache.client.errors import AnswerError, NotFoundError, UnreachableError, WrongServerError, error_of, is_foreign
from tokencache.session_url import BASE_URL_ADVICE

BASE = "/tokencache/v1"
_RETRIES = 3
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.5

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """A request to send.

    Attributes:
        path: relative to the URL of the proxy.
        key: replaces the admin key in `Authorization`.
        repeatable: whether it may be sent again if its response is lost.
        wait: for how many seconds the proxy may wait before it responds. They are added to the timeout.
    """

    method: str
    path: str
    params: dict[str, str] = {}
    body: bytes = b""
    key: str | None = None
    repeatable: bool = True
    wait: float = 0.0

    def __str__(self) -> str:
        """Method and path, for messages."""
        return f"{self.method} {self.path}"

    def headers(self, admin_key: str | None) -> dict[bytes, bytes]:
        """Return the headers to send."""
        key = self.key or admin_key
        return {b"Authorization": f"Bearer {key.strip()}".encode()} if key is not None else {}


class Pause(msgspec.Struct, frozen=True):
    """Time to wait, in seconds."""

    seconds: float


class ServerResponse(msgspec.Struct, frozen=True):
    """A response.

    Attributes:
        status: the HTTP status; 0 if there was no response.
        body: its body, or the reason why there was none.
        url: where the request was sent.
        location: where a redirection leads.
    """

    status: int
    body: bytes
    url: str = ""
    location: str = ""


class Item(msgspec.Struct, Generic[T], frozen=True):
    """One of several results of an operation."""

    value: T


Steps: TypeAlias = Generator[Request | Pause, ServerResponse, T]
"""The steps of an operation with a result of type `T`."""

ItemSteps: TypeAlias = Generator[Request | Pause | Item[T], ServerResponse, None]
"""The steps of an operation with several results of type `T`."""


def check_options(operation: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of an operation's options, as Python does where they are written out.

    Raises:
        TypeError: one is not known. It would have no effect.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{operation}() got an unexpected keyword argument {name!r}")


def call(request: Request, kind: type[T]) -> Steps[T]:
    """Send a request, repeatedly if necessary, and read the response."""
    return _read((yield from _send(request))[0], request, kind)


def call_for_bytes(request: Request) -> Steps[bytes]:
    """Send a request, repeatedly if necessary, and return the body of the response."""
    response = (yield from _send(request))[0]
    _check(response, request)
    return response.body


def send_delete(path: str, params: dict[str, str] | None = None) -> Steps[None]:
    """Send a DELETE. A 404 at a later attempt counts as success: an earlier attempt succeeded and its response was lost."""
    request = Request("DELETE", path, params or {})
    response, attempts = yield from _send(request)
    try:
        _read(response, request, dict)
    except NotFoundError:
        if attempts == 1:
            raise


def _send(request: Request) -> Steps[tuple[ServerResponse, int]]:
    """Send a request until there is a response. Returns the response and the number of attempts."""
    response, attempts = (yield request), 1
    for pause in itertools.islice(delays(_FIRST_PAUSE, _LONGEST_PAUSE, factor=4.0), _RETRIES if request.repeatable else 0):
        if not _is_outage(response):
            break
        yield Pause(pause)
        response, attempts = (yield request), attempts + 1
    if not response.status:
        cause = response.body.decode(errors="replace")
        tried = f", tried {attempts} times" if attempts > 1 else ""
        reason = f"no answer{tried}: {cause}. Does `tokencache serve` run at {response.url}?"
        raise UnreachableError(f"{request}: {reason}", reason=reason)
    return response, attempts


def through_outages(steps: ItemSteps[T], seconds: float) -> ItemSteps[T]:
    """Run an operation, and repeat a request for up to `seconds` while the proxy does not respond or its store fails.

    Until the first success it fails as soon as other operations: the URL may be wrong.
    """
    reached, since = False, math.inf
    try:
        step = next(steps)
        while True:
            response = yield step
            if isinstance(step, Request):
                for pause in delays(_FIRST_PAUSE, _LONGEST_PAUSE, factor=4.0):
                    if not _is_outage(response):
                        reached, since = True, math.inf
                        break
                    now = time.monotonic()
                    since = min(since, now)
                    if not reached or not step.repeatable or now >= since + seconds:
                        break
                    yield Pause(pause)
                    response = yield step
            step = steps.send(response)
    except StopIteration:
        return


def _is_outage(response: ServerResponse) -> bool:
    """Whether another attempt may succeed: there is no response, or the store failed."""
    return response.status in {0, HTTPStatus.SERVICE_UNAVAILABLE}


def _read(response: ServerResponse, request: Request, kind: type[T]) -> T:
    """Decode the body of a response.

    Raises:
        AnswerError: the proxy refused, or the body is not what tokencache returns.
        WrongServerError: the server is not tokencache.
    """
    own = _check(response, request)
    try:
        return msgspec.json.decode(response.body, type=kind)
    except msgspec.MsgspecError as error:
        reason = f"status {response.status}, but the body is not a response of tokencache: {error}"
        if not own:
            raise AnswerError(f"{request}: {reason}", status=response.status, reason=reason) from None
        reason += f". It came from {response.url}. {BASE_URL_ADVICE}"
        raise WrongServerError(f"{request}: {reason}", status=response.status, reason=reason) from None


def _check(response: ServerResponse, request: Request) -> bool:
    """Check that a response reports success. Returns whether the API of tokencache has the path: others are relayed to the engine.

    Raises:
        AnswerError: the proxy refused.
        WrongServerError: the server is not tokencache.
    """
    own = request.path.startswith(BASE)
    if own and is_foreign(response.status, response.body):
        excerpt = " ".join(response.body[:200].decode(errors="replace").split()) or "no body"
        words = f"redirects to {response.location}" if response.location else excerpt
        reason = f"{response.url} is not a tokencache proxy: it answered {response.status}: {words}. {BASE_URL_ADVICE}"
        raise WrongServerError(f"{request}: {reason}", status=response.status, reason=reason)
    if response.status >= HTTPStatus.MULTIPLE_CHOICES:
        raise error_of(response.status, response.body, str(request))
    return own
