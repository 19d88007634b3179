"""Defines the errors that a client receives, each with its HTTP status and error type.

`TokencacheError` is their base. `server.routing` turns them into responses in the client's dialect. By cause:

`HarnessError`  the request cannot be served: 4xx, never sent to the engine
`EngineError`   the engine failed: the client receives the engine's own response if there is one, else 502 or 504
`StoreError`    the store failed, or refuses the call (further classes in `store.base`): 409 or 503
`MemoryFullError`  requests hold as much memory as they may: 503

Any other exception is a bug: 500, with a traceback in the log.
"""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

OK = 200
"""Status code of a reply. A number: to look up a member of an enum enters a function (Python 3.11), and calls compare it often."""

NOT_NOW = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Status codes of an engine that has sampled nothing and may accept the call later. vLLM 0.33 returns 503 while it is paused."""

NO_ROUTE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})
"""Status codes of an engine that does not have a route."""

_SUCCESSES, _REFUSALS, _ERRORS = range(200, 300), range(400, 500), range(400, 600)
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def is_success(status: int) -> bool:
    """Whether a status code is that of a success (2xx, RFC 9110). Only 200 is that of a reply: vLLM sends no other one."""
    return status in _SUCCESSES


def is_refusal(status: int) -> bool:
    """Whether a status code says that the request is refused (4xx, RFC 9110): nothing was sampled."""
    return status in _REFUSALS


def is_error(status: int) -> bool:
    """Whether a status code is that of an error: of the request (4xx) or of the server (5xx)."""
    return status in _ERRORS


def extra_missing(what: str, extra: str, module: str | None) -> str:
    """Return the message that something needs an extra of this package. It names the source folder, because the package is not on PyPI."""
    return f"{what} needs the extra '{extra}' ({module} is missing). In the source folder of tokencache: pip install '.[{extra}]'"


class TokencacheError(Exception):
    """A failure that the client receives as an error response.

    Attributes:
        status: the HTTP status of the response.
        kind: the error type in the response's body.
        param: the member of the request's body that caused the error, if any.
        headers: further headers of the response.
        reported: whether it ended a call, which has its line in the log.
        words: the message that the client receives, as a format string; `{0}` stands for the error.
    """

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    kind: str = "internal_error"
    param: str | None = None
    headers: Mapping[str, str] = _NO_HEADERS
    reported: bool = False
    words: str = "{0}"

    @property
    def client_message(self) -> str:
        """The message that the client receives."""
        return self.words.format(self)


class HarnessError(TokencacheError):
    """The request cannot be served; `status` is 4xx."""

    def __init__(
        self,
        message: str,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind
        self.headers = headers


class MemoryFullError(TokencacheError):
    """The request would hold more memory than requests may (`request_memory`). It may succeed later."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "overloaded_error"
    headers = MappingProxyType({"Retry-After": "5"})


class SlowBodyError(HarnessError):
    """The body of the request arrives too slowly; `began` is when the proxy began to read it, as Unix time in seconds."""

    def __init__(self, message: str, *, began: float) -> None:
        super().__init__(message, status=HTTPStatus.REQUEST_TIMEOUT)
        self.began = began


class BodyTooLargeError(HarnessError):
    """The body of the request, or what it decompresses to, has more than `most` bytes (`--max-body`)."""

    def __init__(self, most: int) -> None:
        message = f"the request body is too large: at most {most:,} bytes are accepted (--max-body)"
        super().__init__(message, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class EngineError(TokencacheError):
    """The engine could not be reached, or closed the connection.

    Attributes:
        status: the HTTP status of the response, if nothing of the reply was sent yet; 502 if the engine's own is not an error.
        reached: the request was sent, so the engine may have sampled.
        private: what logs and incidents say besides the message, such as the engine's address. A client never receives it.
    """

    kind = "upstream_error"

    def __init__(self, message: str, *, private: str = "", status: int = HTTPStatus.BAD_GATEWAY, reached: bool = True) -> None:
        super().__init__(f"{message} ({private})" if private else message)
        self._message = message
        self.private = private
        self.status = status if is_error(status) else HTTPStatus.BAD_GATEWAY
        self.reached = reached

    @property
    def client_message(self) -> str:
        """The message that the client receives, without the engine's address."""
        return self._message

    @property
    def down(self) -> bool:
        """Whether the engine counts as down: it accepts no connection."""
        return not self.reached

    @property
    def passing(self) -> bool:
        """Whether nothing was sampled and the engine may accept the same request later: no connection, or a status in `NOT_NOW`."""
        return not self.reached or self.status in NOT_NOW


class OutOfFilesError(EngineError):
    """This process has no file left for a connection to an engine. That says nothing about the engine."""

    down = False


class WeightsUpdatingError(EngineError):
    """A trainer replaces the weights of an engine, so that no call is sent to it now."""

    def __init__(self, url: str, owner: str) -> None:
        by = f" by {owner!r}" if owner else ""
        super().__init__(
            f"the weights of the engine are being updated{by}: calls wait until the new version is announced",
            private=url,
            status=HTTPStatus.SERVICE_UNAVAILABLE,
        )


class UnexpectedAnswerError(EngineError):
    """An engine, or a gateway before it, gave an answer that is no reply and no error, such as a redirect or a 201.

    It is not passed on: a client that follows a redirect samples past the proxy.
    """

    def __init__(self, answered: int) -> None:
        what = "a success, but not that of a reply (200)" if is_success(answered) else "neither success nor error"
        super().__init__(
            f"the engine answered {answered}, which is {what}: check the engine's URL (--upstream), and what stands before the engine"
        )

    @staticmethod
    def is_one(status: int) -> bool:
        """Whether a status code is that of such an answer to a request that is relayed: there any success is passed on."""
        return not is_success(status) and not is_error(status)


def passing_cause(error: BaseException) -> EngineError | None:
    """Return the engine's error that caused this one (`raise … from`), if the engine may accept the request later."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, EngineError):
        cause = cause.__cause__
    return cause if isinstance(cause, EngineError) and cause.passing else None
