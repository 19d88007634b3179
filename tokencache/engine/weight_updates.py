"""Replaces the weights of the engines as one procedure: hold new calls, pause, let the trainer send the weights, set the version, resume.

The trainer sends the weights itself, by whatever it uses (NCCL, files, adapters); the proxy does the rest over vLLM's routes `/pause`,
`/update_weight_version` and `/resume`, which need `VLLM_SERVER_DEV_MODE=1` (vLLM 0.32, `entrypoints/serve/`). What was announced says which
step was reached, so each step may be repeated, also by another replica.
"""

import logging
from http import HTTPStatus

from tokencache.core.weights import Update, UpdateConflictError, WeightsState
from tokencache.engine.announced_weights import AnnouncedWeights, Failure
from tokencache.errors import EngineError, HarnessError
from tokencache.store.clock import RECORD_CLOCK

log = logging.getLogger(__name__)

_NOT_FOUND = " answered 404"


class WeightUpdates:
    """Begins and ends updates of the weights."""

    def __init__(self, announced: AnnouncedWeights) -> None:
        self._announced = announced

    async def begin(self, update: Update) -> WeightsState:
        """Hold new calls, and pause the engines (`Update.mode`). Returns what is announced now.

        A repeated request with the same id pauses the engines again, which changes nothing.

        Raises:
            UpdateConflictError: another owner's update is under way, or this one ended while its engines were being paused.
            HarnessError: an engine cannot be paused. All go on, and what was announced before holds.
            StoreError: the store does not answer.
        """
        state = await self._announced.read()
        if state.under_way is not None and state.under_way.owner == update.owner and state.under_way.id != update.id:
            await self.end(state.under_way.id, "")  # it may have replaced some weights, and paused other engines
        state = await self._announced.change(lambda latest: latest.begin_update(update))
        if not update.paused:
            return state
        path = f"/pause?mode={update.mode}&clear_cache={'true' if update.clears_cache else 'false'}"
        problems = await self._announced.tell(update.engines, path, seconds=update.until - update.since)
        if problems:
            await self._announced.resume(update.engines)
            await self._announced.change(lambda latest: latest.cancel_update(update.id))
            raise HarnessError(_cannot_pause(problems), status=HTTPStatus.CONFLICT, kind="engine_not_paused")
        state = await self._announced.read()
        if state.under_way is None or state.under_way.id != update.id:
            await self._announced.resume(update.engines)
            raise UpdateConflictError
        return state

    async def end(self, name: str, version: str) -> WeightsState:
        """Set the version of the new weights (`""`: unknown), and resume the engines. It may be repeated with the same version.

        Raises:
            UpdateConflictError: the update is not under way: it was cancelled, or its timeout has passed.
            ValueError: the version cannot be used.
            EngineError: an engine could not be resumed. The version holds.
            StoreError: the store does not answer.
        """
        state = await self._announced.read()
        if version and state.ended_with(name) == version:  # the answer to an earlier request was lost
            return state
        state.end_update(name, version, RECORD_CLOCK.now())  # raises before any engine is told
        update = state.under_way
        if update is not None and update.paused and version:
            # Before the engines go on, so that vLLM's own spans begin with the right token. vLLM before 0.27 has neither.
            problems = await self._announced.tell(update.engines, "/update_weight_version", {"new_version": version})
            for url, failure in problems.items():
                log.info("engine %s: it does not know the version of its weights: %s", url, failure.reason)
        lost = await self._announced.silent(update.engines if update is not None else ())
        state = await self._announced.change(lambda latest: latest.end_update(name, version, RECORD_CLOCK.now(), lost=lost))
        if state.update is not None and state.update.id == name:
            message = "the version is set, but an engine could not be resumed; the proxy tries it again (its log names the engine)"
            raise EngineError(message, status=HTTPStatus.BAD_GATEWAY)
        return state


def _cannot_pause(problems: dict[str, Failure]) -> str:
    told = "; ".join(f"{url}: {failure.reason}" for url, failure in problems.items())
    if any(_NOT_FOUND in failure.reason for failure in problems.values()):
        told += ". Start vLLM with VLLM_SERVER_DEV_MODE=1, which enables /pause; or send the mode none, and pause the engines yourself"
    return f"not all engines could be paused, and the others were resumed: {told}"
