"""Errors, named by whose fault they are.

`HarnessError`  the harness's: answered 4xx in its dialect, never sent to the engine
`EngineError`   the engine's: relayed where there is something to relay, else 502 / 504
`StoreError`    the store's (in `store.base`): the call goes on without its session's past, the session is marked

What remains is ours: 500 in the dialect, with a log line that names session and call.
"""

from collections.abc import Mapping
from types import MappingProxyType

NOT_NOW = frozenset({429, 503})
"""Status codes of an engine that has sampled nothing and may take the call later: vLLM 0.33 answers 503 while it is paused."""


def extra_missing(what: str, extra: str, module: str | None) -> str:
    """Say that something needs an extra of this package, and how to install it. The package is on no index."""
    return f"{what} needs the extra '{extra}' ({module} is missing). In the source folder of tokencache: pip install '.[{extra}]'"


class HarnessError(Exception):
    """What the harness sent cannot be served.

    Attributes:
        status: HTTP status, 4xx.
        param: the member of the body that is at fault, if one is.
        headers: what the answer's head says beside that.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind
        self.headers = headers


class EngineError(Exception):
    """The engine could not be reached or broke off.

    Attributes:
        status: what to answer with if nothing was relayed yet.
        reached: the request was sent, so the engine may have sampled.
    """

    def __init__(self, message: str, *, status: int = 502, reached: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.reached = reached

    @property
    def passing(self) -> bool:
        """Whether nothing was sampled, and the engine may take the same request later: no connection, or it said so."""
        return not self.reached or self.status in NOT_NOW


def passing_cause(why: BaseException) -> EngineError | None:
    """The engine's error from which another one came (`raise … from`), if it is one that may pass."""
    cause: BaseException | None = why
    while cause is not None and not isinstance(cause, EngineError):
        cause = cause.__cause__
    return cause if isinstance(cause, EngineError) and cause.passing else None
