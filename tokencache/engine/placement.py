"""Decides which engine a session uses, by the tokens that sessions hold on each engine.

This module only computes. Its state is what this process knows of the sessions, and the caller passes the time, so that
`bench/placement.py` replays rollouts with this very code in virtual time. An *endpoint* is an opaque key of a place that serves calls; the
pool uses the engine's base URL.

The *load* of an endpoint is the number of tokens of its calls in flight, and of its sessions that paused less than `IDLE_SECONDS` ago: what
its KV cache holds for sessions that go on soon. A session stays on the endpoint that its record names, since its prefix is in the cache
there. A new session uses the endpoint with the least load. A session that calls several models has a *place* in the group of each
(`place_of`), and is there like a session of its own. The figures below were found by replays of rollouts on vLLM's scheduler (0.32).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tokencache.recent import Recent

IDLE_SECONDS = 3.0
"""A session that paused for longer has no load. After a longer pause, computing its prefix again costs less than the room that it takes: a
cache of 160,000 tokens, at 20 µs of prefill for a token, is filled in 3.2 s. From 0.5 to 5 s the makespan is the same."""
MARGIN = 2.0
"""A session moves if its endpoint has more than this many times the load that the best one would have with it. From 1.1 to 3 the makespan
is the same; without any margin an early mistake stays, and a move costs a prefill."""
LEAST_DIFFERENCE = 4096
"""Tokens. A smaller difference between two loads moves no session: it is less than one session."""
TIE = 512
"""Tokens. Endpoints whose loads differ by no more are equal, and are used in turn. Otherwise all replicas, which see the same loads, would
send all sessions that begin together to one endpoint."""
RESERVE = 512
"""Tokens that a call is expected to add to its session, until its prompt is known."""
MOST_GUESSED = 32_768
"""Largest load of a first call until its prompt is known, in tokens: a body with images is long and has few."""
BYTES_A_TOKEN = 4
"""Of the messages of a first call. Loads that are known to ±50 % place as well as exact ones."""
_MEAN_OF = 64
"""Sessions of which the mean footprint follows: the policy changes, and with it how long rollouts are."""
_MOST_SESSIONS = 65_536
"""Sessions that are remembered. One that is forgotten is still bound by its record, and has no load until its next call."""


def place_of(session: str, group: str) -> str:
    """Return the name of a session in the group of one of several models."""
    return f"{session}\0{group}"


class Footprint(NamedTuple):
    """The mean number of tokens with which sessions ended, and how many ended; older ones count less (`_MEAN_OF`)."""

    sessions: int = 0
    tokens: int = 0


class _Session:
    """A session: its endpoint, the tokens of its last call, and its number of calls in flight."""

    __slots__ = ("calls", "endpoint", "tokens")

    def __init__(self) -> None:
        self.endpoint, self.tokens, self.calls = "", 0, 0


class Placement:
    """The loads of endpoints, and the endpoints of sessions.

    Attributes:
        others: the load of each endpoint by the sessions of other replicas, in tokens, as they reported it last.
        other_footprints: the footprints of sessions that ended at other replicas.
        own_footprint: the footprint of those that ended here.
        groups: the names of the groups of engines; empty if there is one.
    """

    def __init__(self) -> None:
        self.groups: Sequence[str] = ()
        self.others: Mapping[str, int] = {}
        self.other_footprints: Sequence[Footprint] = ()
        self.own_footprint = Footprint()
        self._sessions: Recent[str, _Session] = Recent(_MOST_SESSIONS)
        # Plain tuples: to make a named one enters a function.
        self._calls: dict[str, tuple[str, int, str]] = {}  # call → endpoint, tokens, session
        self._created: dict[str, float] = {}  # sessions that were admitted and have not called yet
        self._paused: dict[str, tuple[str, int, float]] = {}  # session → endpoint, tokens, since when; the longest pause is the first
        self._own: defaultdict[str, int] = defaultdict(int)
        self._choices = 0

    def endpoint_of(self, session: str) -> str:
        """Return the endpoint that a session used here last; `""` if that is not known."""
        known = self._sessions.get(session)
        return known.endpoint if known is not None else ""

    def choose(self, session: str, bound: str, endpoints: Collection[str], now: float) -> str:
        """Return the endpoint for the next call of a session.

        Args:
            session: name of the session.
            bound: the endpoint that it uses now; `""` if none.
            endpoints: those that can be used; at least one.
            now: the time in seconds.
        """
        self._expire(now)
        own, others, known = self._own, self.others, self._sessions.get(session)
        stays = bound in endpoints
        if stays and known is not None and known.calls:
            return bound  # the other calls of the session are there
        least, loads = None, dict[str, int]()
        for endpoint in endpoints:
            load = loads[endpoint] = own[endpoint] + others.get(endpoint, 0)
            if least is None or load < least:
                least = load
        least = least or 0
        if stays:
            rest, tokens = self._paused.get(session), known.tokens if known is not None else 0
            load = loads[bound] - (rest[1] if rest is not None and rest[0] == bound else 0)
            if load <= MARGIN * (least + tokens + RESERVE) or load - least <= LEAST_DIFFERENCE:
                return bound
        tied = [endpoint for endpoint, load in loads.items() if load <= least + TIE]
        self._choices += 1
        return tied[self._choices % len(tied)]

    def begin(self, call: str, session: str, endpoint: str, tokens: int = 0, messages: Collection[bytes] = ()) -> None:
        """Count a call as in flight. Repeat it if the call goes to another endpoint, and when its length is known.

        Args:
            call: id of the call.
            session: its session. A call that is in flight stays at the place where it began.
            endpoint: where it goes.
            tokens: the length of its prompt, or of prompt and reply; 0 if it is not known. Then it is that of the session's last call and
                `RESERVE`, or follows from the size of its messages.
            messages: its messages, raw.
        """
        begun = self._calls.get(call)
        if begun is not None:
            session = begun[2]
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = _Session()
            self._created.pop(session.partition("\0")[0], None)
        before = begun or self._paused.pop(session, None)
        if before is not None:
            self._own[before[0]] -= before[1]
        if begun is None:
            known.calls += 1
            self._sessions.move_to_end(session)
        if not tokens:
            tokens = (known.tokens or min(sum(map(len, messages)) // BYTES_A_TOKEN, MOST_GUESSED)) + RESERVE
        known.endpoint = endpoint
        self._calls[call] = endpoint, tokens, session
        self._own[endpoint] += tokens

    def end(self, call: str, now: float) -> None:
        """Count a call as ended: its session pauses, unless it was released or has another call in flight.

        A call that is not in flight changes nothing.
        """
        load = self._calls.pop(call, None)
        if load is None:
            return
        endpoint, tokens, session = load
        self._own[endpoint] -= tokens
        known = self._sessions.get(session)
        if known is None:
            return
        known.calls, known.tokens = known.calls - 1, tokens
        if known.calls <= 0:
            self._paused[session] = endpoint, tokens, now
            self._own[endpoint] += tokens

    @property
    def footprint(self) -> Footprint:
        """The footprint of sessions that ended at any replica."""
        known = [one for one in (self.own_footprint, *self.other_footprints) if one.sessions]
        ended = sum(one.sessions for one in known)
        return Footprint(ended, sum(one.sessions * one.tokens for one in known) // ended) if ended else Footprint()

    def release(self, session: str, tokens: int = 0) -> None:
        """Forget a session that has ended. Calls that it has in flight count until they end.

        `tokens` is the length of its last prompt and reply; 0 if it had none, or was released before.
        """
        if tokens:
            ended, mean = min(self.own_footprint.sessions + 1, _MEAN_OF), self.own_footprint.tokens
            self.own_footprint = Footprint(ended, mean + round((tokens - mean) / ended))
        self._created.pop(session, None)
        for place in (session, *[place_of(session, group) for group in self.groups]):
            self._sessions.pop(place, None)
            if (rest := self._paused.pop(place, None)) is not None:
                self._own[rest[0]] -= rest[1]

    def create(self, session: str, now: float) -> None:
        """Note a session that was admitted, until its first call."""
        self._created[session] = now

    def created(self, since: float) -> list[str]:
        """Return the sessions that were admitted after a time and have not called yet; forget the older ones."""
        self._created = {session: at for session, at in self._created.items() if at >= since}
        return list(self._created)

    def holdings(self, now: float) -> dict[str, int]:
        """Return the load of each session of this replica, in tokens; without those that have none."""
        self._expire(now)
        found: dict[str, int] = {}
        held = [(place, tokens) for place, (_, tokens, _) in self._paused.items()]
        for place, tokens in (*held, *[(place, tokens) for _, tokens, place in self._calls.values()]):
            session = place.partition("\0")[0]
            found[session] = found.get(session, 0) + tokens
        return found

    def own_loads(self, now: float) -> dict[str, int]:
        """Return the load of each endpoint by the sessions of this replica, in tokens; without those that have none."""
        self._expire(now)
        return {endpoint: tokens for endpoint, tokens in self._own.items() if tokens > 0}

    def load(self, endpoint: str, now: float) -> int:
        """Return the load of an endpoint by the sessions of all replicas, in tokens."""
        return self.own_loads(now).get(endpoint, 0) + self.others.get(endpoint, 0)

    def _expire(self, now: float) -> None:
        """Remove the load of sessions that paused for too long."""
        paused = self._paused
        while paused:
            session, (endpoint, tokens, since) = next(iter(paused.items()))
            if now - since < IDLE_SECONDS:
                break
            del paused[session]
            self._own[endpoint] -= tokens
