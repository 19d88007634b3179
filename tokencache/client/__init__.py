"""The trainer's client: open sessions, give them to harnesses, take trajectories home. `docs/client.md` is its manual.

    with Client("http://127.0.0.1:8100") as client:
        session = client.create()
        run_my_agent(base_url=session.base_url, api_key=session.key)
        for trajectory in client.iterate([session.id]):
            train_on(trajectory)

`AsyncClient` is the same with `await`.

============  ========================================================================================================
`blocking`    `Client` and `Session`
`awaited`     `AsyncClient` and `AsyncSession`
`exchanges`   what both say to the server and make of its answers, waiting included; opens no socket
`asking`      one request and its answer, and trying again
`access`      how a harness gets into a session
`values`      trajectories, sequences, turns, as typed values
`errors`      what can go wrong
============  ========================================================================================================
"""

from tokencache.client.awaited import AsyncClient, AsyncSession
from tokencache.client.blocking import Client, Session
from tokencache.client.errors import (
    AnswerError,
    ClientError,
    EngineInUseError,
    NotFoundError,
    RefusedError,
    SealedError,
    UnauthorizedError,
    UnreachableError,
    WaitTimeoutError,
)
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
]
