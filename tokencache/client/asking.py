"""Asking without a socket: requests, answers, and trying again.

An *exchange* is a generator. It yields what is to be done next, a `Request` to send or a `Pause` to make, is sent the answer
to a request, and returns the result. `Client` drives it with blocking calls, `AsyncClient` with awaited ones; nothing else
differs between them. (The idea: https://sans-io.readthedocs.io.)

What may be asked twice is asked again where nobody answers, or where the server's store fails (503): all but the registering
of a key, which would make a second one.
"""

from collections.abc import Generator
from itertools import islice
from typing import TypeAlias, TypeVar

import msgspec

from tokencache.backoff import delays
from tokencache.client.errors import AnswerError, UnreachableError, error_of

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.5
"""Seconds before a request is sent again."""
_RETRIES = 3

_UNAVAILABLE, _REDIRECTION = 503, 300

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """A request to send: `path` is below the server's URL, `key` goes into `Authorization` in place of the admin key."""

    method: str
    path: str
    params: dict[str, str] = {}
    body: bytes = b""
    key: str | None = None
    repeatable: bool = True

    @property
    def words(self) -> str:
        """What is asked, for messages."""
        return f"{self.method} {self.path}"

    def headers(self, admin_key: str | None) -> dict[str, str]:
        """The headers to send it with."""
        key = self.key or admin_key
        return {"Authorization": f"Bearer {key}"} if key is not None else {}


class Pause(msgspec.Struct, frozen=True):
    """Time to let pass, in seconds."""

    seconds: float


class ServerResponse(msgspec.Struct, frozen=True):
    """What came back; status 0 says that nothing did, and `body` why."""

    status: int
    body: bytes


Exchange: TypeAlias = Generator[Request | Pause, ServerResponse, T]


def ask(request: Request, kind: type[T]) -> Exchange[T]:
    """Send a request, again if need be, and read the answer."""
    return read((yield from send(request))[0], request, kind)


def send(request: Request) -> Exchange[tuple[ServerResponse, int]]:
    """Send a request until it is answered; returns the answer and how often it was sent."""
    answer, tries = (yield request), 1
    for pause in islice(delays(_FIRST_PAUSE, _LONGEST_PAUSE, factor=4.0), _RETRIES if request.repeatable else 0):
        if answer.status not in {0, _UNAVAILABLE}:
            break
        yield Pause(pause)
        answer, tries = (yield request), tries + 1
    if not answer.status:
        raise UnreachableError(f"{request.words}: no answer, tried {tries} times: {answer.body.decode(errors='replace')}")
    return answer, tries


def read(answer: ServerResponse, request: Request, kind: type[T]) -> T:
    """Read an answer's body.

    Raises:
        AnswerError: it is a refusal, or nothing that tokencache would say.
    """
    if answer.status >= _REDIRECTION:
        raise error_of(answer.status, answer.body, request.words)
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError as why:
        raise AnswerError(f"{request.words}: {answer.status}, but not as tokencache answers: {why}", status=answer.status) from None
