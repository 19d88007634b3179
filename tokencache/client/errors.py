"""The exceptions of the client.

    ClientError
    ├── UnreachableError      the proxy did not answer, although the request was repeated
    ├── WaitTimeoutError      a condition did not hold in time (also a `TimeoutError`)
    └── AnswerError           the proxy answered with an error
        ├── RefusedError      400: the request is invalid
        ├── UnauthorizedError 401: the admin key is missing or wrong
        ├── NotFoundError     404: there is no such session, engine or key
        ├── SealedError       409: the session is sealed
        └── EngineInUseError  409: the engine is not drained, or `--upstream` names it

Any other `AnswerError` is a failure of the proxy (5xx), or the response of another program at this address.
"""

from http import HTTPStatus

import msgspec


class ClientError(Exception):
    """The base of all exceptions of the client."""


class UnreachableError(ClientError):
    """The proxy could not be reached, or closed the connection."""


class WaitTimeoutError(ClientError, TimeoutError):
    """A condition did not hold in time. The message names it and describes the state of the session."""


class AnswerError(ClientError):
    """The proxy answered with an error.

    Attributes:
        status: the HTTP status.
    """

    status = 0

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status


class RefusedError(AnswerError):
    """The request is invalid: the name of a session, the format, or a setting."""

    status = 400


class UnauthorizedError(AnswerError):
    """The admin key is missing or wrong."""

    status = 401


class NotFoundError(AnswerError):
    """There is no such session (it has no call yet, was deleted, or has expired), or no such engine or key."""

    status = 404


class SealedError(AnswerError):
    """The session is sealed, so no further turns can be recorded."""

    status = 409


class EngineInUseError(AnswerError):
    """The engine was not removed: it is not drained, or `--upstream` names it."""

    status = 409


_ENGINE_ERRORS = frozenset({"engine_in_use", "engine_configured"})
_BY_STATUS = {kind.status: kind for kind in (RefusedError, UnauthorizedError, NotFoundError, SealedError)}


class _Error(msgspec.Struct):
    message: str
    type: str = ""


class _Body(msgspec.Struct):
    error: _Error


def error_of(status: int, body: bytes, request: str) -> AnswerError:
    """Return the exception for a response that is not 2xx. `request` is its method and path."""
    try:
        found = msgspec.json.decode(body, type=_Body).error
    except msgspec.MsgspecError:
        found = _Error(body[:300].decode(errors="replace") or HTTPStatus(status).phrase)
    kind = EngineInUseError if found.type in _ENGINE_ERRORS else _BY_STATUS.get(status, AnswerError)
    return kind(f"{request}: {status}: {found.message}", status=status)
