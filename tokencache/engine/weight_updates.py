"""Replaces the weights of the engines as one procedure: hold new calls, pause, let the trainer send the weights, set the version, resume.

The trainer sends the weights itself, by whatever it uses (NCCL, files, adapters); the proxy does the rest over vLLM's routes `/pause`,
`/update_weight_version` and `/resume`, which need `VLLM_SERVER_DEV_MODE=1` (vLLM 0.32, `entrypoints/serve/`). What was announced says which
step was reached, so each step may be repeated, also by another replica.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Literal

from tokencache.core.weights import Update, WeightsState
from tokencache.engine.announced_weights import AnnouncedWeights
from tokencache.errors import EngineError, HarnessError

log = logging.getLogger(__name__)

PauseMode = Literal["abort", "keep", "wait", "none"]
"""How engines are paused: vLLM's modes, or not at all."""
_CONFLICT, _BAD_GATEWAY = 409, 502
_NO_ROUTE = " answered 404"


class WeightUpdates:
    """Begins and ends updates of the weights."""

    def __init__(self, announced: AnnouncedWeights) -> None:
        self._announced = announced

    async def begin(
        self, *, owner: str, engines: Sequence[str], seconds: float, mode: PauseMode = "none", clear_cache: bool = True
    ) -> tuple[str, WeightsState]:
        """Hold new calls, and pause the engines. Returns the id of the update, and what is announced now.

        Args:
            owner: the trainer.
            engines: base URLs; empty for all.
            seconds: after these the update ends by itself.
            mode: how the engines are paused.
            clear_cache: whether a pause empties the prefix cache, and computes frozen requests again.

        Raises:
            UpdateConflictError: another owner's update is under way.
            HarnessError: an engine cannot be paused. Those that were are resumed, and what was announced before holds.
            StoreError: the store does not answer.
        """
        name, now = secrets.token_hex(8), time.time()
        paused = mode != "none"
        update = Update(name, owner, now, now + seconds, tuple(engines), paused, mode if paused else "", paused and clear_cache)
        state = await self._announced.change(lambda latest: latest.begin_update(update))
        if not paused:
            return name, state
        problems = await self._announced.tell(engines, f"/pause?mode={mode}&clear_cache={'true' if clear_cache else 'false'}")
        if problems:
            await self._announced.resume([url for url in self._urls(engines) if url not in problems])
            await self._announced.change(lambda latest: latest.cancel_update(name))
            raise HarnessError(_cannot_pause(problems), status=_CONFLICT, kind="engine_not_paused")
        return name, state

    async def end(self, name: str, version: str) -> WeightsState:
        """Set the version of the new weights (`""`: unknown), and resume the engines. Repeating it resumes them again.

        Raises:
            UpdateConflictError: the update is not under way: it was cancelled, or its timeout has passed.
            ValueError: the version cannot be used.
            EngineError: an engine could not be resumed. The version holds.
            StoreError: the store does not answer.
        """
        state = await self._announced.read()
        update = state.update
        if version and state.ended_with(name) == version:  # the answer to an earlier request was lost
            await self._resume(())
            return state
        state.end_update(name, version, time.time())  # raises before any engine is told
        if update is not None and update.paused and version:
            # Before the engines go on, so that vLLM's own spans begin with the right token. vLLM before 0.27 has neither.
            problems = await self._announced.tell(update.engines, "/update_weight_version", {"new_version": version})
            for url, problem in problems.items():
                log.info("engine %s: it does not know the version of its weights: %s", url, problem)
        state = await self._announced.change(lambda latest: latest.end_update(name, version, time.time()))
        if update is not None and update.paused:
            await self._resume(update.engines)
        return state

    async def _resume(self, engines: Sequence[str]) -> None:
        problems = await self._announced.resume(engines)
        if problems:
            told = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
            raise EngineError(f"the version is set, but an engine could not be resumed; repeat this request: {told}", status=_BAD_GATEWAY)

    def _urls(self, engines: Sequence[str]) -> list[str]:
        return [upstream.url for upstream in self._announced.upstreams(engines)]


def _cannot_pause(problems: dict[str, str]) -> str:
    told = "; ".join(f"{url}: {problem}" for url, problem in problems.items())
    if any(_NO_ROUTE in problem for problem in problems.values()):
        told += ". Start vLLM with VLLM_SERVER_DEV_MODE=1, which enables /pause; or send the mode none, and pause the engines yourself"
    return f"not all engines could be paused, and the others were resumed: {told}"
