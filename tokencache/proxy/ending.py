"""Ending: what a call came to is written to the store, once, and to the end even if its harness leaves meanwhile."""

import logging
import time
from collections.abc import Awaitable, Sequence

from tokencache import metrics
from tokencache.core.match import DISAGREED
from tokencache.dialects.dialect import Speaker
from tokencache.engine.model import Engine
from tokencache.proxy.dedup.fingerprint import claim
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.recorder import NO_IDS, Outcome, Recorded
from tokencache.proxy.undisturbed import Undisturbed
from tokencache.store.base import BeginResult, Incident

log = logging.getLogger(__name__)


class Ending:
    """The end of one call; `begun` is what its beginning found, `None` where the store could not be asked.

    `under_way` says that it is being written: nothing else is to end the call then. `left_behind` are documents that are kept if the call
    comes to nothing.
    """

    def __init__(self, session: str, call_id: str, ledger: Ledger, speaker: Speaker, hold: Hold, *, undisturbed: Undisturbed) -> None:
        self._session, self._id, self._ledger, self._speaker, self._hold = session, call_id, ledger, speaker, hold
        self._undisturbed = undisturbed
        self.begun: BeginResult | None = None
        self.under_way = False
        self.left_behind: dict[str, bytes] = {}

    async def write(self, work: Awaitable[None]) -> None:
        """Let some work end the call."""
        self.under_way = True
        try:
            await self._undisturbed.work(work)
        finally:
            self._ledger.twins.closed(self._id)

    async def close(self, incidents: Sequence[Incident] = ()) -> None:
        """End a call of which there is no turn.

        Raises:
            StoreError: the store failed and the policy is strict.
        """
        await self.write(self._ledger.settle(self.begun, self._session, self._id, incidents, documents=self.left_behind))

    async def settle(self, outcome: Outcome, kind: str, detail: str, *, hole: bool = False) -> None:
        """End a call that brought no turn, and say why; raises as `close` does."""
        metrics.CALLS.labels(outcome.call.dialect, kind).inc()
        incident = outcome.incident(kind, detail, hole=hole)
        self._log(incident)
        await self.close([incident])

    async def record(self, outcome: Outcome) -> None:
        """End a call with the turns that its reply makes; raises as `close` does."""
        await self.write(self.recorded(outcome))

    async def recorded(self, outcome: Outcome) -> None:
        """Record the turns that a reply makes, and what its dialect must find again."""
        ended = time.time()
        await self._ledger.keep_experts(outcome)
        try:
            recorded = outcome.record(self._ledger.prefixes)
        except Exception as why:  # ours: the harness gets its reply, and the trainer is told
            log.exception("session %s call %s: not recorded", self._session, self._id)
            recorded = Recorded([], [], [outcome.incident("internal-error", f"{type(why).__name__}: {why}", hole=True)])
        _doubt(self._hold.engine, outcome, {incident.kind for incident in recorded.incidents})
        documents = self._speaker.documents() if outcome.whole else {}
        if outcome.whole and outcome.unanswered:
            documents |= {claim(self._id): b"1"}
        await self._ledger.end(self.begun, outcome, recorded, documents)
        metrics.AFTER.observe(time.time() - ended)
        how = outcome.broke or ("error" if outcome.reply.error else "answered")
        metrics.counter(metrics.CALLS, outcome.call.dialect, how).inc()
        for entry in recorded.entries:
            turn = entry.turn
            log.debug(
                "session %s turn %s: %s%s, %d + %d tokens, %s",
                self._session,
                turn.id,
                turn.match,
                f" ({turn.reason})" if turn.reason else "",
                turn.prompt_tokens,
                turn.completion_tokens,
                turn.finish_reason,
            )
        for incident in recorded.incidents:
            self._log(incident)

    def _log(self, incident: Incident) -> None:
        """Say what happened; what an engine said of it may quote the harness, and stands in the session's incidents."""
        log.warning("session %s call %s: %s", self._session, self._id, incident.kind)
        log.debug("session %s call %s: %s: %s", self._session, self._id, incident.kind, incident.detail)


def _doubt(engine: Engine, outcome: Outcome, kinds: set[str]) -> None:
    """Probe the engine anew where it does other than was found: another one, or a router, may stand there now."""
    if DISAGREED in kinds:
        engine.doubt("it used other ids than were sent")
    elif NO_IDS in kinds and outcome.model is not None and outcome.model.capability.level != "relay":
        engine.doubt("it no longer says which ids it used")
