"""Parses only the new part of a request body that begins like the session's previous one.

An agent sends its whole history with every call, so most of a body repeats the body before. This module hashes the bytes up to the last
known message. If the hash is the same, it parses only the rest: the new messages, and the members after them. The result is the same
as if the whole body had been parsed. In every doubtful case the whole body is parsed.

    {"model":"m","messages":[{…},{…}          ,{…},{…}],"tools":[…]}
    └──────────── known head ─────┘          └─────── parsed ────┘

Only the hash of a body, the positions of its messages and the parsed messages are kept, because thousands of rollouts send long histories.
"""

import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Self, overload

import msgspec
import xxhash

from tokencache.core.chain import Conversation
from tokencache.core.media import MediaPart
from tokencache.core.messages import Message
from tokencache.dialects.chat.vocabulary import MessageReader
from tokencache.dialects.json_io import FIELDS, VALUES, fields_of, items_of, strict_fields
from tokencache.errors import HarnessError
from tokencache.pauses import LARGE, pause
from tokencache.recent import RecentBySize

Raw = msgspec.Raw

_NAME = b'"messages"'
_TRIES = 4
MEMORY = 256 * 2**20
PER_MESSAGE = 600
"""Estimated bytes of a message without its text: two digests, links of two chains, its position, and the objects that hold them."""
PER_BODY = 1500
"""Estimated bytes of a body without its messages: the objects that hold them."""


class MessageSpans(Sequence[bytes]):
    """The raw messages of `body`, cut out on access; `spans` holds the begin and end of each in bytes."""

    __slots__ = ("_body", "_spans")

    def __init__(self, body: bytes, spans: "array[int]") -> None:
        self._body, self._spans = body, spans

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        body, spans = self._body, self._spans
        if isinstance(index, int):
            place = range(len(spans) // 2)[index]
            return body[spans[2 * place] : spans[2 * place + 1]]
        return [*map(body.__getitem__, map(slice, spans[0::2][index], spans[1::2][index]))]


def find_spans(body: bytes, entries: Iterable[bytes], at: int) -> "array[int] | None":
    """Find the spans of consecutive JSON objects in a body, from `at` on; `None` if they are not there.

    Two messages are separated by white space and a comma, and no object begins with either.
    """
    spans = array("Q")
    for entry in entries:
        start = body.find(b"{", at)
        if start < 0 or not body.startswith(entry, start):
            return None
        at = start + len(entry)
        spans.fromlist([start, at])
    return spans


class ParsedHistory(msgspec.Struct, frozen=True):
    """The parsed messages of a body.

    Attributes:
        scope: the prompt context that `conversation` is chained under.
        conversation: the messages in canonical form.
        media: index of a message → its parts that are not text.
        malformed: indexes of messages with tool-call arguments that an engine may refuse.
        rewritten: whether a message differs from the body's: token ids were removed (`gym`), or it was rewritten (`gym_request`).
    """

    scope: bytes
    conversation: Conversation
    media: Mapping[int, tuple[MediaPart, ...]]
    malformed: tuple[int, ...]
    rewritten: bool = False


class SplitBody(msgspec.Struct, frozen=True):
    """A body split into members and messages.

    Attributes:
        fields: the members, raw.
        entries: the messages, raw.
        new: those of them that `known` does not cover.
        spans: positions of the messages in the body; empty if unknown.
        old: how many messages `known` covers.
        before: what is kept of the previous body; `None` if the whole body has to be parsed.
        head: a hash that has read the known part of the body.
        rewritten: whether `entries` differ from the body's messages.
    """

    fields: dict[str, Raw]
    entries: Sequence[bytes]
    new: Sequence[bytes]
    spans: "array[int]"
    old: int = 0
    before: "_CachedBody | None" = None
    head: xxhash.xxh3_128 | None = None
    rewritten: bool = False

    def rewrite(self, new: Sequence[bytes]) -> Self:
        """Return this body with other new messages."""
        return msgspec.structs.replace(self, entries=[*self.entries[: self.old], *new], new=new, rewritten=True)


async def split_whole(body: bytes) -> SplitBody:
    """Split a body without knowledge of a previous one.

    Raises:
        HarnessError: it is not a JSON object, or `messages` is not a list of objects.
    """
    large = len(body) > LARGE
    fields = fields_of(body)
    raw = fields.get("messages")
    if raw is None:
        raise HarnessError("'messages' is missing", param="messages")
    fields = {name: value if value is raw else value.copy() for name, value in fields.items()}  # otherwise each would keep the body
    if large:
        await pause()
    try:
        items = items_of(raw)
    except (ValueError, RecursionError):
        raise HarnessError("'messages' must be a list of objects", param="messages") from None
    if large:
        await pause()
    entries = [*map(bytes, items)]
    for i, item in enumerate(entries):
        if item[:1] != b"{":
            raise HarnessError(f"'messages[{i}]' must be an object", param=f"messages[{i}]")
    if large:
        await pause()
    start = _find_list(body, bytes(raw))
    spans = find_spans(body, entries, start) if start >= 0 else None
    if large:
        await pause()
    return SplitBody(fields, entries, entries, spans if spans is not None else array("Q"))


class _CachedBody(msgspec.Struct, frozen=True):
    """What the parser keeps of a session's last body.

    Attributes:
        head: hash of its bytes up to the end of the last message.
        start: where the list of messages begins.
        leading: the members before that list.
        spans: position of each message.
        rewritten: the messages, if they differ from the body's.
        known: the parsed messages.
        size: approximate size of this object in bytes.
    """

    head: bytes
    start: int
    leading: dict[str, Raw]
    spans: "array[int]"
    rewritten: Sequence[bytes] | None
    known: ParsedHistory
    size: int


class IncrementalParser:
    """Remembers the last parsed body of recently active sessions, up to `memory` bytes.

    `secret` is the deployment's (`Store.secret`) and is part of every chain. Set it before the first body is parsed. A change drops
    everything that is remembered.
    """

    def __init__(self, messages: MessageReader | None = None, *, memory: int = MEMORY) -> None:
        self.messages = messages or MessageReader()
        self._secret = b""
        self._seed = secrets.randbits(64)  # as for messages: clients cannot construct two heads with one hash
        self._cache: RecentBySize[str, _CachedBody] = RecentBySize(memory, attrgetter("size"))

    @property
    def secret(self) -> bytes:
        """The deployment's secret."""
        return self._secret

    @secret.setter
    def secret(self, secret: bytes) -> None:
        if secret != self._secret:
            self._secret = secret
            self._cache.clear()

    def split(self, session: str, body: bytes) -> SplitBody | None:
        """Split a body that continues the session's previous one; `None` if the whole body has to be parsed."""
        cached = self._cache.get(session)
        if cached is None or len(body) < cached.spans[-1]:
            return None
        at, view = cached.spans[-1], memoryview(body)
        head = xxhash.xxh3_128(view[:at], self._seed)
        if head.digest() != cached.head:
            return None
        comma = body[at : at + 1] == b","
        rest = body[at + comma :]
        if _NAME in rest:  # a second member of that name, or some text: parse the whole body
            return None
        try:
            following = strict_fields(b'{"messages":[' + rest)
            listed = following["messages"]
            new = [*map(bytes, VALUES.decode(listed))]
        except (ValueError, RecursionError):
            return None
        added = find_spans(body, new, at + comma)
        repeated = cached.leading.keys() & following.keys() != {"messages"}  # parsing the whole body refuses it
        if comma != bool(new) or added is None or repeated:
            return None
        end = at + comma + len(listed) - 1
        copied = dict(zip(following, map(Raw.copy, following.values()), strict=True))  # otherwise each would keep the new messages
        fields = {**cached.leading, **copied, "messages": Raw(view[cached.start : end])}
        spans = cached.spans + added
        entries = MessageSpans(body, spans) if cached.rewritten is None else [*cached.rewritten, *new]
        return SplitBody(fields, entries, new, spans, len(cached.spans) // 2, cached, head, cached.known.rewritten)

    def remember(self, session: str, body: bytes, split: SplitBody, known: ParsedHistory, secret: bytes) -> None:
        """Remember a parsed body for the session's next one; without a session nothing is remembered.

        Another call of the session may have been parsed since the body was split, so what it continues is in `split`. With another
        `secret` than that of the chain, it is not remembered.
        """
        before = split.before
        if not session or not split.spans or secret != self._secret:
            self._cache.pop(session, None)
            return
        if before is not None:
            start, leading, hashed, size = before.start, before.leading, before.spans[-1], before.size
        else:
            start = body.rindex(b"[", 0, split.spans[0])
            hashed, size = 0, start + PER_BODY
            try:
                members = FIELDS.decode(body[:start] + b"[]}")
            except ValueError:  # JSON that only the lenient reader accepts (`json_io`) is parsed as a whole each time
                self._cache.pop(session, None)
                return
            leading = dict(zip(members, map(Raw.copy, members.values()), strict=True))  # all calls share them
        head = split.head or xxhash.xxh3_128(b"", self._seed)
        head.update(memoryview(body)[hashed : split.spans[-1]])
        rewritten = split.entries if split.rewritten else None
        size += _size(known.conversation.messages[split.old :]) + sum(map(len, split.new if split.rewritten else ()))
        self._cache[session] = _CachedBody(head.digest(), start, leading, split.spans, rewritten, known, size)


def _size(messages: Iterable[Message]) -> int:
    """Estimate the memory of parsed messages, in bytes."""
    size = 0
    for message in messages:
        size += PER_MESSAGE + len(message.content or "") + len(message.reasoning or "")
        for call in message.calls:
            size += len(call.arguments) + PER_MESSAGE
    return size


def _find_list(body: bytes, listed: bytes) -> int:
    """Find where the list of messages begins in a body; -1 if a few searches do not find it."""
    at = -1
    for _ in range(_TRIES):
        at = body.find(_NAME, at + 1)
        start = body.find(b"[", at, at + 32)
        if at < 0:
            return -1
        if start >= 0 and body[at + len(_NAME) : start].strip() == b":" and body.startswith(listed, start):
            return start
    return -1
