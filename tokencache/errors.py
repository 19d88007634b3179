"""Errors, named by whose fault they are.

`HarnessError`  the harness's: answered 4xx in its dialect, never sent to the engine
`EngineError`   the engine's: relayed where there is something to relay, else 502 / 504
`StoreError`    the store's (in `store.contract`): the call goes on without its session's past, the session is marked

What remains is ours: 500 in the dialect, with a log line that names session and call.
"""


class HarnessError(Exception):
    """What the harness sent cannot be served.

    Attributes:
        status: HTTP status, 4xx.
        param: the member of the body that is at fault, if one is.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind


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
