"""Finishes sessions: at the request of their owner."""

import time

from tokencache import metrics
from tokencache.core.outcome import Outcome, OutcomeKind, outcome_of
from tokencache.core.session import SessionStage
from tokencache.proxy.ledger import Ledger
from tokencache.store.base import SessionInfo, Store
from tokencache.trajectories.rollout import incidents_of

_OTHER = "other"
"""The label of metrics for all words of callers: a label must have few values."""


async def offer(store: Store, info: SessionInfo) -> None:
    """Put an open session into the queue. This is done before it is finished, so that a crash in between cannot lose it."""
    if info.state is SessionStage.OPEN:
        await store.offer(info.id, info.epoch, time.time())


async def finish(ledger: Ledger, info: SessionInfo, outcome: Outcome | None = None) -> bool:
    """Finish a session, and count it by its outcome. Returns false if it was deleted meanwhile.

    Raises:
        OutcomeConflictError: it has another outcome.
        StoreError: the store failed.
    """
    await offer(ledger.store, info)
    found = await ledger.store.finish(info.id, outcome)
    if found and info.state is SessionStage.OPEN:
        kind = outcome_of(outcome, incidents_of(info, ledger.unsaved(info.id)), info.latest, over=True).kind
        metrics.FINISHED.labels(kind if kind in set(OutcomeKind) else _OTHER).inc()
    ledger.changed.notify()
    return found
