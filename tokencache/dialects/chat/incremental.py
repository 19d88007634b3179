"""MessageSpans: the messages of a body, where they stand in it.

A history is long and nobody looks at most of it: who knows where each message begins and ends need not keep a copy of
each, nor of the body. A message is cut out when it is asked for.


Growth: a body that begins like the session's last one is read from where that one ended.

An agent sends its whole history with every call, so nearly all of a body is the body before. Its bytes up to the last
known message are hashed; if they are the same, only the rest is parsed: new messages and whatever members stand behind
them. What comes out is what a whole reading would give, or the whole body is read.

    {"model":"m","messages":[{…},{…}          ,{…},{…}],"tools":[…]}
    └──────────── head, as before ──┘          └─────── parsed ────┘

Of a body nothing is kept but that hash, where its messages stand, and what was read of them: thousands of rollouts send long histories.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import overload

import msgspec
import xxhash

from tokencache.core.chain import Conversation
from tokencache.core.messages import Message
from tokencache.dialects.chat.vocabulary import MessageReader
from tokencache.dialects.json_io import entries_of, fields_of
from tokencache.errors import HarnessError


class MessageSpans(Sequence[bytes]):
    """The raw messages of `body`; `spans` says of each where it begins and where it ends, in bytes."""

    __slots__ = ("_body", "_spans")

    def __init__(self, body: bytes, spans: "array[int]") -> None:
        self._body, self._spans = body, spans

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        i = range(len(self))[place]
        return self._body[self._spans[2 * i] : self._spans[2 * i + 1]]


def spans_of(body: bytes, entries: Iterable[bytes], at: int) -> "array[int] | None":
    """Find objects that stand one behind the other in a body from `at` on; `None` if they do not stand there like this.

    Between two messages stand blanks and a comma, nothing that an object begins with.
    """
    spans = array("Q")
    for entry in entries:
        start = body.find(b"{", at)
        if start < 0 or not body.startswith(entry, start):
            return None
        at = start + len(entry)
        spans.extend((start, at))
    return spans


Raw = msgspec.Raw
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_NAME = b'"messages"'
_TRIES = 4
MEMORY = 256 * 2**20
PER_MESSAGE = 600
"""Bytes: two digests, links of two chains, place in the body, the objects that hold them. The words of the model's messages come on top."""


class ParsedHistory(msgspec.Struct, frozen=True):
    """What was read of a body: the conversation that its messages make under `scope`, and what is said of them all.

    `malformed` are the places of messages with arguments that an engine may refuse; `rewritten` is whether one of the messages differs
    from the body's: token ids were taken out (`gym`), or it was written as Gym sends it (`gym_request`).
    """

    scope: bytes
    conversation: Conversation
    media: bool
    malformed: tuple[int, ...]
    rewritten: bool = False


class SplitBody(msgspec.Struct, frozen=True):
    """A body taken apart: its members, its raw messages, and what is `known` of the first `old` of them.

    `spans` is where the messages stand in the body, empty where that cannot be told; `head` has hashed as much of the body as was known
    before.
    `rewritten` is whether `entries` differ from those in the body (`Known`).
    """

    fields: dict[str, Raw]
    entries: Sequence[bytes]
    spans: "array[int]"
    old: int = 0
    known: ParsedHistory | None = None
    head: xxhash.xxh3_128 | None = None
    rewritten: bool = False


def split_whole(body: bytes) -> SplitBody:
    """Take a body apart of which nothing is known.

    Raises:
        HarnessError: it is no JSON object, or has no list of objects for messages.
    """
    fields = fields_of(body)
    entries = _messages(fields)
    start = _place(body, bytes(fields["messages"]))
    spans = spans_of(body, entries, start) if start >= 0 else None
    return SplitBody(fields, entries, spans if spans is not None else array("Q"))


def _messages(fields: dict[str, Raw]) -> list[bytes]:
    raw = fields.get("messages")
    if raw is None:
        raise HarnessError("'messages' is missing", param="messages")
    try:
        messages = entries_of(raw)
    except (ValueError, RecursionError):
        raise HarnessError("'messages' must be a list of objects", param="messages") from None
    for i, item in enumerate(messages):
        if item[:1] != b"{":
            raise HarnessError(f"'messages[{i}]' must be an object", param=f"messages[{i}]")
    return messages


class _Held(msgspec.Struct, frozen=True):
    """What is kept of a session's last body.

    `head` is the hash of its bytes up to the end of the last message, `leading` are the members in front of the list, `start` is where that
    begins. `spans` is where each message stands; `bare` are the messages themselves where they differ from the body's. `weight` is
    about how many bytes all this takes.
    """

    head: bytes
    start: int
    leading: dict[str, Raw]
    spans: "array[int]"
    bare: Sequence[bytes] | None
    known: ParsedHistory
    weight: int


class IncrementalParser:
    """What was read of the last body of every session that was seen here lately; up to `memory` bytes.

    `secret` is the deployment's, under which all conversations are chained (`Store.secret`): to be set before the first body is read. If
    it changes, what was read is forgotten.
    """

    def __init__(self, messages: MessageReader | None = None, *, memory: int = MEMORY) -> None:
        self.messages = messages or MessageReader()
        self._secret = b""
        self._seed = secrets.randbits(64)  # as for messages: nobody can choose two heads with one hash
        self._memory = memory
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._bytes = 0

    @property
    def secret(self) -> bytes:
        """The deployment's secret."""
        return self._secret

    @secret.setter
    def secret(self, secret: bytes) -> None:
        if secret != self._secret:
            self._secret = secret
            self._held.clear()
            self._bytes = 0

    def split(self, session: str, body: bytes) -> SplitBody | None:
        """Take a body apart with what is known of the session; `None` if it has to be read whole."""
        held = self._held.get(session)
        if held is None or len(body) < held.spans[-1]:
            return None
        at, all_of = held.spans[-1], memoryview(body)
        head = xxhash.xxh3_128(all_of[:at], self._seed)
        if head.digest() != held.head:
            return None
        comma = body[at : at + 1] == b","
        rest = body[at + comma :]
        if _NAME in rest:  # as a member once more, or in some text: not worth telling apart
            return None
        try:
            behind = _FIELDS.decode(b'{"messages":[' + rest)
            listed = behind["messages"]
            new = [bytes(entry) for entry in _LIST.decode(listed)]
        except (ValueError, RecursionError):
            return None
        added = spans_of(body, new, at + comma)
        if comma != bool(new) or added is None:
            return None
        end = at + comma + len(listed) - 1
        fields = {**held.leading, **behind, "messages": Raw(all_of[held.start : end])}
        spans = held.spans + added
        entries = MessageSpans(body, spans) if held.bare is None else [*held.bare, *new]
        return SplitBody(fields, entries, spans, len(held.spans) // 2, held.known, head, held.known.rewritten)

    def remember(self, session: str, body: bytes, split: SplitBody, known: ParsedHistory) -> None:
        """Keep what was read of a body for the session's next one; a body without a session is not kept."""
        before = self._forget(session)
        if not session or not split.spans:
            return
        if before is not None and split.known is not None:  # it has grown
            start, leading, hashed, weight = before.start, before.leading, before.spans[-1], before.weight
        else:
            start = weight = body.rindex(b"[", 0, split.spans[0])
            hashed = 0
            try:
                leading = _FIELDS.decode(body[:start] + b"[]}")
            except ValueError:  # what only a lenient reader takes (`chat`) is read whole each time
                return
        head = split.head or xxhash.xxh3_128(b"", self._seed)
        head.update(memoryview(body)[hashed : split.spans[-1]])
        bare = split.entries if split.rewritten else None
        weight += _weight(known.conversation.messages[split.old :]) + sum(map(len, bare[split.old :] if bare is not None else ()))
        self._held[session] = _Held(head.digest(), start, leading, split.spans, bare, known, weight)
        self._bytes += weight
        while self._bytes > self._memory:
            self._forget(next(iter(self._held)))

    def _forget(self, session: str) -> _Held | None:
        held = self._held.pop(session, None)
        if held is not None:
            self._bytes -= held.weight
        return held


def _weight(messages: Iterable[Message]) -> int:
    """About how many bytes of memory messages take that were read."""
    return sum(
        PER_MESSAGE + len(m.content or "") + len(m.reasoning or "") + sum(len(call.arguments) + PER_MESSAGE for call in m.calls)
        for m in messages
    )


def _place(body: bytes, listed: bytes) -> int:
    """Find where the list of messages stands in a body; -1 if that cannot be told cheaply."""
    at = -1
    for _ in range(_TRIES):
        at = body.find(_NAME, at + 1)
        start = body.find(b"[", at, at + 32)
        if at < 0:
            return -1
        if start >= 0 and body[at + len(_NAME) : start].strip() == b":" and body.startswith(listed, start):
            return start
    return -1
