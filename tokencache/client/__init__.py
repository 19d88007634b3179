"""The trainer's Python client: opens sessions, gives harnesses access to them, and fetches trajectories (`docs/client.md`).

    with Client("http://127.0.0.1:8100") as client:
        session = client.create()
        reward = run_my_agent(base_url=session.base_url, api_key=session.key)
        session.finish(reward)
        for trajectory in client.iterate([session.id], seal=True, delete=True):
            train_on(trajectory)

`AsyncClient` has the same methods as coroutines.

====================  ==================================================================================================
`sync_client`         `Client`, `Session` and `Delivery`
`async_client`        `AsyncClient`, `AsyncSession` and `AsyncDelivery`
`operations`          what both send to the proxy and how they read its responses; opens no socket
`session_operations`  the same for one session
`weight_operations`   the same for the versions of the engines' weights
`collecting`          the same for several sessions: in order, as they finish, from the queue
`protocol`            how operations yield their requests
`transport`           runs operations over HTTP, and makes methods of them
`access`              what a harness needs to use a session
`errors`              the exceptions
====================  ==================================================================================================

`tokencache.trajectories.values` defines the values that the methods return.
"""

from tokencache.client.async_client import AsyncClient, AsyncDelivery, AsyncSession
from tokencache.client.errors import (
    AnswerError,
    ClientError,
    DeliveryExpiredError,
    EngineInUseError,
    EnginePauseError,
    ExistsError,
    InvalidUrlError,
    NoRoomError,
    NotFoundError,
    OtherSettingsError,
    OutcomeError,
    RefusedError,
    SealedError,
    TooManyReadyError,
    UnauthorizedError,
    UnfinishedError,
    UnreachableError,
    WaitTimeoutError,
    WeightsConflictError,
    WrongServerError,
)
from tokencache.client.sync_client import Client, Delivery, Session
from tokencache.core.incidents import Incident
from tokencache.core.messages import ToolCall
from tokencache.core.session import Budget
from tokencache.store.base import OpenCall
from tokencache.trajectories.reports import RunLine, RunReport
from tokencache.trajectories.values import (
    Capacity,
    Conditions,
    DeliveryState,
    EditedScores,
    EngineCapacity,
    EngineState,
    EngineWeightsInfo,
    Figures,
    GroupState,
    PastReward,
    QueueState,
    RewardState,
    ScoredTurn,
    Sequence,
    Served,
    SessionState,
    Trajectory,
    TurnChange,
    TurnSpan,
    WaitingSession,
    WeightsInfo,
)

__all__ = [
    "AnswerError",
    "AsyncClient",
    "AsyncDelivery",
    "AsyncSession",
    "Budget",
    "Capacity",
    "Client",
    "ClientError",
    "Conditions",
    "Delivery",
    "DeliveryExpiredError",
    "DeliveryState",
    "EditedScores",
    "EngineCapacity",
    "EngineInUseError",
    "EnginePauseError",
    "EngineState",
    "EngineWeightsInfo",
    "ExistsError",
    "Figures",
    "GroupState",
    "Incident",
    "InvalidUrlError",
    "NoRoomError",
    "NotFoundError",
    "OpenCall",
    "OtherSettingsError",
    "OutcomeError",
    "PastReward",
    "QueueState",
    "RefusedError",
    "RewardState",
    "RunLine",
    "RunReport",
    "ScoredTurn",
    "SealedError",
    "Sequence",
    "Served",
    "Session",
    "SessionState",
    "TooManyReadyError",
    "ToolCall",
    "Trajectory",
    "TurnChange",
    "TurnSpan",
    "UnauthorizedError",
    "UnfinishedError",
    "UnreachableError",
    "WaitTimeoutError",
    "WaitingSession",
    "WeightsConflictError",
    "WeightsInfo",
    "WrongServerError",
]
