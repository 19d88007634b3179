"""Decides when a new session may begin, so that the KV caches of the engines hold the sessions that run.

Like `placement`, this module only computes, and `bench/placement.py` replays rollouts with it. Only the creation of a session waits, never
a harness's call: a session that is known always goes on.

* A session is admitted while the claims of all sessions leave room for it in `capacity.SHARE` of the caches. A claim is the session's load,
  but no less than the length with which sessions are expected to end. A session that paused for longer than `placement.IDLE_SECONDS` claims
  nothing: holding its prefix would cost more than computing it again. One that is created claims its expected length until its first call.
* Sessions are admitted strictly in the order in which they came, on all replicas: the smallest first would starve long ones, and with them
  their groups.
* While an engine is empty, there is no limit: something must run, however large it is.
"""

from tokencache.engine.capacity import SHARE
from tokencache.engine.placement import Placement

CREATED_SECONDS = 600.0
"""A session that was created claims room for so long before its first call: a harness may have to start a container first."""
KEPT_SECONDS = 30.0
"""A session that was refused keeps its place for so long, if its creation is not repeated."""
MOST_WAIT_SECONDS = 60
"""Longest time for which one request waits; a request that repeats it keeps the place of its session."""
RETRY_SECONDS = 5
"""When to repeat a creation that was refused."""


class Admission:
    """The sessions that wait to be created at this replica.

    Attributes:
        others: since when sessions wait at other replicas, Unix time in seconds.
        other_claims: the tokens that the sessions of other replicas claim.
    """

    def __init__(self, placement: Placement, expected: int) -> None:
        """Begin without sessions; `expected` is the length of a session in tokens until some have ended."""
        self.others: list[float] = []
        self.other_claims = 0
        self._placement, self._expected = placement, expected
        self._waiting: dict[str, tuple[float, float]] = {}  # session → since when (Unix time), when it was last asked for

    def claims(self, now: float) -> int:
        """Return the tokens that the sessions of this replica claim."""
        expected, placement = self._expected_tokens, self._placement
        held = sum(max(tokens, expected) for tokens in placement.holdings(now).values())
        return held + expected * len(placement.created(now - CREATED_SECONDS))

    def waiting(self, now: float) -> dict[str, float]:
        """Return the sessions that wait here, in order, and since when, as Unix time in seconds."""
        for session, (_, seen) in list(self._waiting.items()):
            if now - seen > KEPT_SECONDS:
                del self._waiting[session]
        return {session: since for session, (since, _) in self._waiting.items()}

    def place(self, session: str) -> int:
        """Return the place of a waiting session, from 1, among those of all replicas."""
        since, _ = self._waiting[session]
        return 1 + list(self._waiting).index(session) + sum(other < since for other in self.others)

    def admits(self, session: str, at: float, now: float, *, capacity: int, empty: int) -> bool:
        """Admit a session, or let it wait.

        Args:
            session: name of the session.
            at: the Unix time in seconds.
            now: the time in seconds, of the clock of `Placement`.
            capacity: the tokens of all KV caches.
            empty: the number of engines without load.
        """
        since = self._waiting.get(session, (at, now))[0]
        self._waiting[session] = since, now
        if next(iter(self.waiting(now))) != session or any(other < since for other in self.others):
            return False
        room = SHARE * capacity - self.claims(now) - self.other_claims
        if room < self._expected_tokens and empty <= len(self._placement.created(now - CREATED_SECONDS)):
            return False
        self.leave(session)
        self._placement.create(session, now)
        return True

    def leave(self, session: str) -> None:
        """Let a session wait no longer."""
        self._waiting.pop(session, None)

    @property
    def _expected_tokens(self) -> int:
        return self._placement.footprint.tokens or self._expected
