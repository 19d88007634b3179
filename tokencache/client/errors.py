"""The exceptions of the client. Their base is `ClientError`; an `AnswerError` is an error that the proxy answered.

An `AnswerError` of no narrower class is a failure of the proxy (5xx), or of a gateway before it.
"""

from http import HTTPStatus

import msgspec


class ClientError(Exception):
    """The base of all exceptions of the client.

    Attributes:
        reason: what went wrong, without the route that was asked: the message of a command, whose user asked for none.
    """

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class InvalidUrlError(ClientError, ValueError):
    """The URL cannot be the base URL of a proxy. The message says why, and what to use instead. No request was sent."""


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

    def __init__(self, message: str, *, status: int | None = None, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.status = self.status if status is None else status


class WrongServerError(AnswerError):
    """A server that is not tokencache answered, for example the engine. The message names the URL that was asked."""


class RefusedError(AnswerError):
    """The request is invalid: the name of a session, the format, or a setting. 422: the proxy does not know a setting's name."""

    status = HTTPStatus.BAD_REQUEST


class UnauthorizedError(AnswerError):
    """The admin key is missing or wrong."""

    status = HTTPStatus.UNAUTHORIZED


class NotFoundError(AnswerError):
    """There is no such session (it has no call yet, was deleted, or has expired), or no such engine or key."""

    status = HTTPStatus.NOT_FOUND


class SealedError(AnswerError):
    """The session is finished or sealed, so no further turns can be recorded."""

    status = HTTPStatus.CONFLICT


class UnfinishedError(AnswerError):
    """The session was not sealed: it is not finished, or has calls in flight."""

    status = HTTPStatus.CONFLICT


class ExistsError(AnswerError):
    """There is a session of this name already, so it was not created."""

    status = HTTPStatus.CONFLICT


class OtherSettingsError(ExistsError):
    """There is a session of this name already, and it has other settings. The message names them."""


class OutcomeError(AnswerError):
    """The outcome was not stored: the session has another one, or is sealed without one."""

    status = HTTPStatus.CONFLICT


class DeliveryExpiredError(AnswerError):
    """The lease of the delivery ended, and another consumer took its sessions."""

    status = HTTPStatus.CONFLICT


class TooManyReadyError(AnswerError):
    """The session was not created: too many finished sessions are not consumed. `create(wait=…)` waits."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class NoRoomError(AnswerError):
    """The session was not created: the KV caches of the engines have no room for it. `create(wait=…)` waits."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class EngineInUseError(AnswerError):
    """The engine was not removed: it is not drained, or `--upstream` names it."""

    status = HTTPStatus.CONFLICT


class WeightsConflictError(AnswerError):
    """Another owner is updating the weights, or the update has ended: by its timeout, or because it was cancelled."""

    status = HTTPStatus.CONFLICT


class EnginePauseError(AnswerError):
    """An engine cannot be paused, so no weights were to be replaced. The message names it. All engines run."""

    status = HTTPStatus.CONFLICT


_BY_TYPE: dict[str, type[AnswerError]] = {
    "engine_in_use": EngineInUseError,
    "engine_configured": EngineInUseError,
    "session_open": UnfinishedError,
    "calls_in_flight": UnfinishedError,
    "session_exists": ExistsError,
    "settings_conflict": OtherSettingsError,
    "outcome_conflict": OutcomeError,
    "delivery_expired": DeliveryExpiredError,
    "no_room": NoRoomError,
    "too_many_ready": TooManyReadyError,
    "weights_conflict": WeightsConflictError,
    "engine_not_paused": EnginePauseError,
}
_BY_STATUS: dict[int, type[AnswerError]] = {
    HTTPStatus.BAD_REQUEST: RefusedError,
    HTTPStatus.UNAUTHORIZED: UnauthorizedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: SealedError,
    HTTPStatus.UNPROCESSABLE_ENTITY: RefusedError,
}

_ABSENT = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})
"""The statuses with which a server refuses a path or method that it does not have."""
_NOT_FOUND, _REDIRECTIONS = HTTPStatus.NOT_FOUND, range(HTTPStatus.MULTIPLE_CHOICES, HTTPStatus.BAD_REQUEST)


class _Error(msgspec.Struct):
    message: str
    type: str = ""


class _OwnError(msgspec.Struct):
    """An error as tokencache's API returns it: all four members are there."""

    message: str
    type: str
    param: str | None
    code: int


class _OwnBody(msgspec.Struct):
    error: _OwnError


class _Body(msgspec.Struct):
    error: _Error


def error_of(status: int, body: bytes, request: str) -> AnswerError:
    """Return the exception for a response that is not 2xx. `request` is its method and path."""
    try:
        found = msgspec.json.decode(body, type=_Body).error
    except msgspec.MsgspecError:
        found = _Error(body[:300].decode(errors="replace") or HTTPStatus(status).phrase)
    kind = _BY_TYPE.get(found.type) or _BY_STATUS.get(status, AnswerError)
    reason = found.message if status < HTTPStatus.INTERNAL_SERVER_ERROR else f"the proxy answered {status}: {found.message}"
    return kind(f"{request}: {status}: {found.message}", status=status, reason=reason)


def is_foreign(status: int, body: bytes) -> bool:
    """Whether a response that is not 2xx cannot be from tokencache's API: a redirection, or another server's "there is no such path".

    vLLM's errors have the same members, but its 404 has the type `NotFoundError`. Other statuses may be from a gateway before the proxy.
    """
    if status in _REDIRECTIONS:
        return True
    if status not in _ABSENT:
        return False
    try:
        found = msgspec.json.decode(body, type=_OwnBody).error
    except msgspec.MsgspecError:
        return True
    return status == _NOT_FOUND and found.type != "not_found_error"
