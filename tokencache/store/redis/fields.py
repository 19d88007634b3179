"""Maps sessions and records to Redis keys and fields, and back.

`tokencache.store.redis` lists the fields; `tokencache.store.encoding` defines the bytes of records.
"""

import re
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Any
from urllib.parse import unquote

import msgspec

from tokencache.core.incidents import Incident
from tokencache.core.match import Hit
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.turn import Turn
from tokencache.store.base import BeginResult, DamagedError, Entry, OpenCall, QueueEntry, SessionInfo
from tokencache.store.encoding import pack, pack_tokens, text, unpack, untext

_GLOB = re.compile(rb"[*?\[\]\\]")
_CALL_HEAD = 33
_ORPHANED, WANTED, GIVEN_UP = 1, 2, 4
_ID = attrgetter("turn.id")
_REFERRED = attrgetter("turn.base", "turn.parent", "turn.context_base")


class Keys:
    """Names of Redis keys. All start with the prefix of the deployment."""

    def __init__(self, prefix: str) -> None:
        self._prefix = text(prefix)
        self._start = self._prefix + b":{"
        self.pattern = _GLOB.sub(rb"\\\g<0>", self._start) + b"*}"
        self.schema = self._prefix + b":schema"
        self.secret = self._prefix + b":secret"
        self.engines = self._prefix + b":engines"
        self.weights = self._prefix + b":weights"
        self.forks = self._prefix + b":forks"
        self.watched = self._prefix + b":watched"
        queue = self._prefix + b":queue:{queue}"
        self.demands = self._prefix + b":demands"
        self.queue = [queue, queue + b":deliveries", queue + b":removed"]

    def session(self, session: str) -> bytes:
        """Key of a session's hash. The session's name is the hash tag, which selects the slot in a cluster."""
        return self._start + text(session).replace(b"%", b"%25").replace(b"}", b"%7D") + b"}"

    def name(self, key: bytes) -> str:
        """Name of the session that a key belongs to."""
        return unquote(key[len(self._start) : -1], errors="surrogatepass")

    def holders(self, reference: bytes) -> tuple[bytes, bytes]:
        """Keys under which the turns of a reference may be: that of their session, and the one it has once it was deleted."""
        epoch, session = unpack_reference(reference)
        return (key := self.session(session)), key + b":" + epoch

    def binding(self, key: str) -> bytes:
        """Key of the binding of an API key."""
        return b"%s:key:%s" % (self._prefix, text(key))

    def replica(self, replica: str) -> bytes:
        """Key of a replica's heartbeat. All are in one slot, because they are read together."""
        return b"%s:alive:{replicas}:%s" % (self._prefix, text(replica))


def turn_field(turn: str) -> bytes:
    """Field that holds a turn's number."""
    return b"#" + text(turn)


REFERENCE = b"\xff\xff"
"""How a reference begins. It takes the place of ids and of a context; both begin otherwise."""
_EPOCH = 16


def pack_reference(session: str, epoch: bytes) -> bytes:
    """Refer to the turns of another session."""
    return REFERENCE + epoch + text(session)


def unpack_reference(reference: bytes) -> tuple[bytes, str]:
    """Return the epoch and the name of the session that a reference names."""
    start = len(REFERENCE) + _EPOCH
    return reference[len(REFERENCE) : start], untext(reference[start:])


def document_field(name: str) -> bytes:
    """Field of a document."""
    return b"D" + text(name)


def media_field(sha256: str) -> bytes:
    """Field of the bytes of a medium."""
    return b"P" + text(sha256)


def pack_medium(medium: StoredMedium) -> bytes:
    """Encode an entry of the list of media: a line of JSON."""
    return msgspec.json.encode(medium) + b"\n"


def unpack_media(packed: bytes) -> list[StoredMedium]:
    """Decode the list of media."""
    return [msgspec.json.decode(line, type=StoredMedium) for line in packed.splitlines()]


def engine_field(url: str, replica: str) -> bytes:
    """Field of an engine's entry. No URL contains a space."""
    return text(f"{url} {replica}" if replica else url)


def turns_referred_to(entries: Sequence[Entry]) -> list[bytes]:
    """Fields of the other turns without which these entries cannot be read."""
    named = {*chain.from_iterable(map(_REFERRED, entries))} - {None, *map(_ID, entries)}
    return [*map(turn_field, named)]


def pack_entry(entry: Entry) -> list[bytes | int]:
    """Encode an entry as arguments of the script COMMIT."""
    turn = entry.turn
    parent = b"" if turn.parent is None else turn_field(turn.parent)
    keys = [*map(b"=".__add__, entry.keys)]
    packed = pack_tokens(turn, entry.tokens)
    return [
        turn_field(turn.id),
        parent,
        pack(turn),
        repr(turn.created).encode(),
        packed,
        entry.tokens.logprobs,
        entry.context,
        len(keys),
        *keys,
    ]


def unpack_begun(reply: Sequence[Any], count: int) -> BeginResult:
    """Decode the reply of the script BEGIN to `count` keys."""
    epoch, calls, tokens, age, joined, engine = reply[:6]
    found = unpack_calls(joined)
    return BeginResult(
        epoch.decode(), unpack_hits(reply[6:], count), found[0] if found else None, calls, tokens, float(age), engine.decode()
    )


def unpack_hits(flat: Sequence[Any], count: int) -> list[list[Hit]]:
    """Decode pairs of position and head into one list of hits for each of `count` keys."""
    found: list[list[Hit]] = [[] for _ in range(count)]
    for position, head in zip(flat[::2], flat[1::2], strict=True):
        found[position].append(Hit(unpack(head[1:], Turn), head[:1] == b"+"))
    return found


def unpack_calls(packed: bytes) -> tuple[OpenCall, ...]:
    """Decode open calls (`scripts.OPEN_CALLS` describes their bytes)."""
    calls = []
    while packed:
        flags, fingerprint, replica, named = (int(packed[start:stop]) for start, stop in ((17, 18), (18, 23), (23, 28), (28, _CALL_HEAD)))
        if min(fingerprint, replica, named) < 0:
            raise ValueError("an open call has a negative length")
        ends = _CALL_HEAD + fingerprint, _CALL_HEAD + fingerprint + replica, _CALL_HEAD + fingerprint + replica + named
        calls.append(
            OpenCall(
                call=untext(packed[ends[1] : ends[2]]),
                since=float(packed[:17]),
                fingerprint=packed[_CALL_HEAD : ends[0]],
                replica=untext(packed[ends[0] : ends[1]]),
                orphaned=bool(flags & _ORPHANED),
                wanted=bool(flags & WANTED),
                given_up=bool(flags & GIVEN_UP),
            )
        )
        packed = packed[ends[2] :]
    return tuple(calls)


def pack_labels(changes: LabelChanges) -> list[bytes | str]:
    """Encode labels as pairs of field and value. Each value contains one member."""
    return [part for name, value in changes.given.items() for part in (name, pack(LabelChanges(**{name: value})))]


def unpack_settings(packed: bytes | None) -> SessionSettings:
    """Decode the field `settings`."""
    return unpack(packed, SessionSettings) if packed else SessionSettings()


def unpack_session(session: str, reply: Sequence[Any]) -> SessionInfo | None:
    """Decode the reply of the script SESSION; `None` if there is no session."""
    if not reply:
        return None
    epoch, created, used, sealed, finished, turns, calls, packed, *labels, rewards, sampled, _ = reply[:14]
    reward, last, outcome, call_ms, engine, newest = reply[14:20]
    settings, noted = unpack_settings(packed), Labels()
    for member in filter(None, labels):
        noted = noted.changed(unpack(member, LabelChanges))
    latest = max([unpack(turn[1:], LatestTurn) for turn in (last, newest) if turn], key=attrgetter("created"), default=None)
    return SessionInfo(
        id=session,
        created=float(created),
        used=float(used),
        sealed=sealed is not None,
        turns=int(turns or 0),
        open_calls=unpack_calls(calls or b""),
        incidents=tuple(unpack(incident, Incident) for incident in reply[20:]),
        epoch=epoch.decode(),
        finished=None if finished is None else float(finished),
        settings=settings,
        labels=noted,
        reward=unpack(reward, Reward) if reward else None,
        rewards=int(rewards or 0),
        sampled=int(sampled or 0),
        call_ms=int(call_ms or 0),
        harness=settings.harness or (latest.harness if latest else ""),
        model=latest.model if latest else "",
        latest=latest,
        outcome=unpack(outcome, Outcome) if outcome else None,
        engine=(engine or b"").decode(),
    )


def unpack_entry(session: bytes, packed: bytes, now: float) -> QueueEntry:
    """Decode an entry of the queue (`queue_scripts` describes its bytes)."""
    delivery, consumer, epoch = (int(packed[start : start + 5]) for start in (23, 28, 33))
    ends = 38 + delivery, 38 + delivery + consumer, 38 + delivery + consumer + epoch
    until = float(packed[:17])
    return QueueEntry(
        session=untext(session),
        epoch=untext(packed[ends[1] : ends[2]]),
        at=float(packed[ends[2] :]),
        delivery=untext(packed[38 : ends[0]]),
        consumer=untext(packed[ends[0] : ends[1]]),
        until=until,
        attempt=int(packed[17:23]),
        leased=until > now,
    )


class Decoding(msgspec.Struct, frozen=True):
    """Reports values that cannot be decoded, while the context is open, as damage of the session."""

    session: str

    def __enter__(self) -> None:
        """Begin to decode."""

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None) -> None:
        """Raise a `DamagedError` in place of what a decoder raises."""
        if isinstance(why, (ValueError, IndexError, TypeError, AttributeError)):
            raise DamagedError(f"redis: the data of session {self.session} is damaged: {why}") from None
