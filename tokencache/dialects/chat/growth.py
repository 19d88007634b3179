"""Growth: a body that begins like the session's last one is read from where that one ended.

An agent sends its whole history with every call, so nearly all of a body is the body before. Its bytes up to the last
known message are compared with one `memcmp`; if they are the same, only the rest is parsed: new messages and whatever
members stand behind them. What comes out is what a whole reading would give, or the whole body is read.

    {"model":"m","messages":[{…},{…}          ,{…},{…}],"tools":[…]}
    └──────────── head, as before ──┘          └─────── parsed ────┘
"""

from collections import OrderedDict

import msgspec

from tokencache.core.chain import Conversation
from tokencache.dialects.body import entries_of, fields_of
from tokencache.dialects.chat.messages import MessageReader, ReadMessage
from tokencache.errors import HarnessError

Raw = msgspec.Raw

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_NAME = b'"messages"'
_TRIES = 4
MEMORY = 256 * 2**20


class Known(msgspec.Struct, frozen=True):
    """What was read of a body: its messages, the conversation they make under `scope`, and what is said of them all.

    `echoed` is whether token ids came with one of its messages (`gym`), and were taken out.
    """

    scope: bytes
    read: list[ReadMessage]
    conversation: Conversation
    media: bool
    malformed: bool
    echoed: bool = False


class Split(msgspec.Struct, frozen=True):
    """A body taken apart: its members, its raw messages, and what is `known` of the first `old` of them.

    `echoed` is whether `entries` lack the token ids that came with them in the body.
    """

    fields: dict[str, Raw]
    entries: list[bytes]
    old: int = 0
    known: Known | None = None
    echoed: bool = False


def split_whole(body: bytes) -> Split:
    """Take a body apart of which nothing is known.

    Raises:
        HarnessError: it is no JSON object, or has no list of objects for messages.
    """
    fields = fields_of(body)
    return Split(fields, _messages(fields))


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
    """A session's last body.

    `head` are its bytes up to the end of the last message, `start` is where the list of messages begins, `leading` are
    the members in front of it, `entries` its raw messages.
    """

    head: bytes
    start: int
    leading: dict[str, Raw]
    entries: list[bytes]
    known: Known


class Bodies:
    """The last body of every session that was seen here lately; up to `memory` bytes.

    `secret` is the deployment's, under which all conversations are chained (`Store.secret`): to be set before the first body is read. If
    it changes, what was read is forgotten.
    """

    def __init__(self, messages: MessageReader | None = None, *, memory: int = MEMORY) -> None:
        self.messages = messages or MessageReader()
        self._secret = b""
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

    def split(self, session: str, body: bytes) -> Split | None:
        """Take a body apart with what is known of the session; `None` if it has to be read whole."""
        held = self._held.get(session)
        if held is None or not body.startswith(held.head):
            return None
        at = len(held.head)
        at += body[at : at + 1] == b","
        rest = body[at:]
        if _NAME in rest:  # as a member once more, or in some text: not worth telling apart
            return None
        try:
            behind = _FIELDS.decode(b'{"messages":[' + rest)
            new = [bytes(entry) for entry in _LIST.decode(behind["messages"])]
        except (ValueError, RecursionError):
            return None
        if (at > len(held.head)) != bool(new) or any(entry[:1] != b"{" for entry in new):
            return None
        end = at + len(bytes(behind["messages"])) - 1
        fields = {**held.leading, **behind, "messages": Raw(body[held.start : end])}
        return Split(fields, [*held.entries, *new], len(held.entries), held.known, held.known.echoed)

    def remember(self, session: str, body: bytes, split: Split, known: Known) -> None:
        """Keep what was read of a body for the session's next one; a body without a session is not kept."""
        before = self._forget(session)
        if not session:
            return
        listed = bytes(split.fields["messages"])
        grown = before is not None and split.known is not None
        start = before.start if before is not None and grown else _place(body, listed)
        end = start + len(listed) - 1
        if start < 0 or body[end - 1 : end] != b"}":
            return
        try:
            leading = before.leading if before is not None and grown else _FIELDS.decode(body[:start] + b"[]}")
        except ValueError:  # what only a lenient reader takes (`chat`) is read whole each time
            return
        self._held[session] = _Held(body[:end], start, leading, split.entries, known)
        self._bytes += 2 * end
        while self._bytes > self._memory:
            self._forget(next(iter(self._held)))

    def _forget(self, session: str) -> _Held | None:
        held = self._held.pop(session, None)
        if held is not None:
            self._bytes -= 2 * len(held.head)
        return held


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
