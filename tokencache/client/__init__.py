"""The trainer's Python client: opens sessions, gives harnesses access to them, and fetches trajectories (`docs/client.md`).

    with Client("http://127.0.0.1:8100") as client:
        session = client.create()
        run_my_agent(base_url=session.base_url, api_key=session.key)
        for trajectory in client.iterate([session.id]):
            train_on(trajectory)

`AsyncClient` has the same methods as coroutines.

==============  ========================================================================================================
`sync_client`   `Client` and `Session`
`async_client`  `AsyncClient` and `AsyncSession`
`operations`    what both send to the proxy and how they read its responses; opens no socket
`access`        what a harness needs to use a session
`errors`        the exceptions
==============  ========================================================================================================

`tokencache.trajectories.values` defines the values that the methods return.
"""

from tokencache.client.async_client import AsyncClient, AsyncSession
from tokencache.client.errors import (
    AnswerError,
    ClientError,
    EngineInUseError,
    InvalidUrlError,
    NotFoundError,
    RefusedError,
    SealedError,
    UnauthorizedError,
    UnreachableError,
    WaitTimeoutError,
    WrongServerError,
)
from tokencache.client.sync_client import Client, Session
from tokencache.core.budget import Budget
from tokencache.trajectories.values import (
    EngineState,
    Figures,
    Incident,
    OpenCall,
    Sequence,
    Served,
    SessionState,
    ToolCall,
    Trajectory,
    TurnSpan,
)

__all__ = [
    "AnswerError",
    "AsyncClient",
    "AsyncSession",
    "Budget",
    "Client",
    "ClientError",
    "EngineInUseError",
    "EngineState",
    "Figures",
    "Incident",
    "InvalidUrlError",
    "NotFoundError",
    "OpenCall",
    "RefusedError",
    "SealedError",
    "Sequence",
    "Served",
    "Session",
    "SessionState",
    "ToolCall",
    "Trajectory",
    "TurnSpan",
    "UnauthorizedError",
    "UnreachableError",
    "WaitTimeoutError",
    "WrongServerError",
]
