"""Defines the operations on the weights of a proxy's engines (`protocol`): the methods of `Client` and `AsyncClient` about versions.

`planned`, `begin`, `finish` and `cancel` are the steps of `update_weights`, a context manager of which each client has its own.
"""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Literal, TypedDict

import msgspec

from tokencache.backoff import delays
from tokencache.client.errors import AnswerError, ClientError, UnreachableError, WeightsConflictError
from tokencache.client.operations import ProxyAddress
from tokencache.client.protocol import BASE, Pause, Request, Steps, call
from tokencache.client.session_operations import written
from tokencache.core.weights import PauseMode, check_version
from tokencache.trajectories.values import WeightsInfo

_PATH = f"{BASE}/weights"
_ENGINE_SECONDS = 60.0
"""Seconds for which the proxy may wait for its engines before it responds."""
_FIRST_RETRY, _LONGEST_RETRY = 0.5, 5.0
DEFAULT_TIMEOUT = 600.0


class UpdateOptions(TypedDict, total=False):
    """The options of `Client.update_weights` and `AsyncClient.update_weights`."""

    mode: PauseMode
    clear_cache: bool
    engines: Sequence[str]
    owner: str
    timeout: float


class OwnUpdate(msgspec.Struct, frozen=True):
    """An update that this client carries out.

    Attributes:
        id: its id, which the client chooses, so that it can cancel an update whose beginning was not answered.
        version: the version with which it ends.
        deadline: when the proxy ends it by itself, on the clock of `time.monotonic`.
        options: what to ask the proxy for.
    """

    id: str
    version: str
    deadline: float
    options: UpdateOptions


def weights(_proxy: ProxyAddress) -> Steps[WeightsInfo]:
    """Return what is announced about the weights: the version, the version of each engine, and the update under way."""
    return (yield from call(Request("GET", _PATH), WeightsInfo))


def set_weights(
    _proxy: ProxyAddress,
    version: int | str | None = None,
    *,
    engines: Sequence[str] = (),
    phase: Literal["ready", "updating"] = "ready",
    mode: PauseMode = "none",
    clear_cache: bool = False,
    owner: str = "",
    timeout: float = DEFAULT_TIMEOUT,
) -> Steps[WeightsInfo]:
    """Announce the version of the weights, or that they are being replaced. All replicas of the proxy use it at once.

    A trainer that pauses its engines itself calls this with `phase="updating"` before, and with the version before it resumes them.
    `update_weights` does both, and pauses and resumes the engines.

    Args:
        proxy: the proxy.
        version: the version that the engines have now, a number or a name. Required with `ready`.
        engines: the base URLs of those engines; empty for all.
        phase: `ready`: they have the version now. `updating`: their weights are being replaced, so new calls wait until `ready`.
        mode: with `updating`: how you pause the engines yourself, before any weight changes: `abort`, `keep` or `wait`. Replies that end
            before `ready` then have the version before; otherwise they are `mixed`.
        clear_cache: with `mode`: whether that pause empties the prefix cache (`/pause` of vLLM does, unless it is told not to).
        owner: who announces it. While an owner is updating, others are refused.
        timeout: with `updating`: seconds after which new calls stop waiting. The version is then unknown.

    Raises:
        WeightsConflictError: another owner is updating the weights.
        NotFoundError: there is no such engine.
        RefusedError: the version cannot be used.
    """
    members: dict[str, Any] = {"phase": phase, "engines": list(engines), "owner": owner}
    members |= {"timeout": timeout, "mode": mode, "clear_cache": clear_cache} if phase == "updating" else {}
    members |= {} if version is None else {"version": version}
    return (yield from call(Request("PUT", _PATH, body=written(members)), WeightsInfo))


def planned(version: int | str, options: UpdateOptions) -> OwnUpdate:
    """Plan an update. `Client.update_weights` documents the arguments. Raises `ValueError` if the version cannot be used."""
    check_version(str(version))
    return OwnUpdate(secrets.token_hex(8), str(version), time.monotonic() + options.get("timeout", DEFAULT_TIMEOUT), options)


def begin(_proxy: ProxyAddress, update: OwnUpdate) -> Steps[WeightsInfo]:
    """Hold new calls, and pause the engines. With `wait`, the pause lasts until the longest reply has ended."""
    options = update.options
    owner = options.get("owner") or f"{socket.gethostname()}-{os.getpid()}-{update.id}"
    body = written({**options, "id": update.id, "owner": owner, "engines": list(options.get("engines", ()))})
    return (yield from call(Request("POST", f"{_PATH}/update", body=body, wait=options.get("timeout", DEFAULT_TIMEOUT)), WeightsInfo))


def finish(_proxy: ProxyAddress, update: OwnUpdate) -> Steps[WeightsInfo]:
    """Set the version of the new weights, and resume the engines. Repeated until it succeeds or the update's timeout has passed."""
    request = Request("POST", f"{_PATH}/update/{update.id}/finish", body=written({"version": update.version}), wait=_ENGINE_SECONDS)
    for pause in delays(_FIRST_RETRY, _LONGEST_RETRY):
        try:
            return (yield from call(request, WeightsInfo))
        except (AnswerError, UnreachableError) as error:
            left = update.deadline - time.monotonic()
            if left <= 0 or (isinstance(error, AnswerError) and error.status < HTTPStatus.INTERNAL_SERVER_ERROR):
                raise
            yield Pause(min(pause, left))
    raise AssertionError("delays never end")


def cancel(_proxy: ProxyAddress, update: OwnUpdate, error: BaseException) -> Steps[None]:
    """End an update after an error: the version becomes unknown, and the engines are resumed. If that fails, `error` gets a note."""
    try:
        yield from call(Request("DELETE", f"{_PATH}/update/{update.id}", wait=_ENGINE_SECONDS), WeightsInfo)
    except WeightsConflictError:
        return  # it has ended by itself
    except ClientError as why:
        left = max(0.0, update.deadline - time.monotonic())
        error.add_note(f"The update of the weights could not be cancelled; the proxy ends it by itself in {left:.0f} s: {why}")
