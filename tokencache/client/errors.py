"""What can go wrong for a trainer, each under a name of its own, with the server's words.

    ClientError
    ├── UnreachableError      nobody answered, however often it was tried
    ├── WaitTimeoutError      what was waited for did not come in time (a `TimeoutError`, too)
    └── AnswerError           the server answered that it cannot or will not
        ├── RefusedError      400: what was asked makes no sense to it
        ├── UnauthorizedError 401: the admin key is missing or wrong
        ├── NotFoundError     404: there is no such session, or engine
        ├── SealedError       409: the session takes no more calls
        └── EngineInUseError  409: the engine is not drained, or is named by `--upstream`

An `AnswerError` that is none of these is the server's own trouble (5xx), or the answer of something else that listens there.
"""

from http import HTTPStatus

import msgspec


class ClientError(Exception):
    """Anything that can go wrong here."""


class UnreachableError(ClientError):
    """The proxy could not be reached, or broke off."""


class WaitTimeoutError(ClientError, TimeoutError):
    """What was waited for did not come in time; the message says what it was, and what there is."""


class AnswerError(ClientError):
    """The server said no.

    Attributes:
        status: HTTP status of the answer.
    """

    status = 0

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status


class RefusedError(AnswerError):
    """The request makes no sense to the server: no session's name, an unknown format, a setting that is none."""

    status = 400


class UnauthorizedError(AnswerError):
    """The admin key is missing or wrong."""

    status = 401


class NotFoundError(AnswerError):
    """There is no such session: no call was made in it yet, or it was deleted, or the store has forgotten it. Or no such engine."""

    status = 404


class SealedError(AnswerError):
    """The session is sealed: what was waited for cannot come any more."""

    status = 409


class EngineInUseError(AnswerError):
    """The engine was not removed: it is not drained, or it is named by `--upstream`."""

    status = 409


_OF_ENGINES = frozenset({"engine_in_use", "engine_configured"})
_BY_STATUS = {kind.status: kind for kind in (RefusedError, UnauthorizedError, NotFoundError, SealedError)}


class _Words(msgspec.Struct):
    message: str
    type: str = ""


class _Body(msgspec.Struct):
    error: _Words


def error_of(status: int, body: bytes, asked: str) -> AnswerError:
    """Make the exception for an answer that is not 2xx; `asked` says what had been asked (method and path)."""
    try:
        said = msgspec.json.decode(body, type=_Body).error
    except msgspec.MsgspecError:
        said = _Words(body[:300].decode(errors="replace") or HTTPStatus(status).phrase)
    kind = EngineInUseError if said.type in _OF_ENGINES else _BY_STATUS.get(status, AnswerError)
    return kind(f"{asked}: {status}: {said.message}", status=status)
