"""What the memory store holds of one session."""

import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from tokencache.core.match import Hit
from tokencache.core.turn import Tokens, Turn
from tokencache.store.base import Entry, Incident, Join, OpenCall
from tokencache.store.encoding import pack, unpack


class HeldSession:
    """A session: its turns packed, what finds them, its calls, and how many bytes all that is."""

    def __init__(self) -> None:
        self.life = secrets.token_hex(8)
        self.created = self.used = time.time()
        self.sealed = False
        self.turns: dict[str, bytes] = {}
        self.tokens: dict[str, Tokens] = {}
        self.contexts: dict[str, bytes] = {}
        self.index: dict[bytes, tuple[str, ...] | str] = {}  # nearly always one turn
        self.continued: set[str] = set()
        self.calls: dict[str, OpenCall] = {}
        self.begun = self.sampled = self.bytes = 0
        self.incidents: list[Incident] = []
        self.documents: dict[str, bytes] = {}
        self._latest: Turn | None = None  # what the next call nearly always continues, and so need not be unpacked for

    def turn(self, name: str) -> Turn:
        """A turn, by its name."""
        latest = self._latest
        return latest if latest is not None and latest.id == name else unpack(self.turns[name], Turn)

    def hits(self, key: bytes) -> list[Hit]:
        """The turns under a key, in the order recorded."""
        found = self.index.get(key, ())
        return [Hit(self.turn(t), t in self.continued) for t in ((found,) if isinstance(found, str) else found)]

    def keep(self, documents: Mapping[str, bytes]) -> None:
        """Keep documents, in the place of those of the same names."""
        self.bytes += sum(map(len, documents.values()))
        self.documents |= documents

    def add(self, entry: Entry) -> None:
        """Record a turn."""
        turn = entry.turn
        packed, tokens = pack(turn), entry.tokens
        self.turns[turn.id], self._latest = packed, turn
        self.bytes += sum(map(len, (packed, tokens.delta, tokens.completion, tokens.logprobs, entry.context, *entry.keys)))
        self.sampled += turn.completion_tokens
        self.tokens[turn.id] = tokens
        self.contexts[turn.id] = entry.context
        for key in entry.keys:
            known = self.index.get(key, ())
            self.index[key] = (*((known,) if isinstance(known, str) else known), turn.id) if known else turn.id
        if turn.parent is not None:
            self.continued.add(turn.parent)

    def twin(self, call: str, asked: bytes, join: Join) -> OpenCall | None:
        """Find a call in flight that asks for the same, and tell it that it is wanted; a call that began already has none."""
        if call in self.calls:
            return None
        for name, one in self.calls.items():
            if asked and one.asked == asked and not one.given_up and (join == "any" or (join == "left" and one.left)):
                self.calls[name] = msgspec.structs.replace(one, wanted=True)
                return self.calls[name]
        return None

    def end(self, call: str, incidents: Sequence[Incident]) -> None:
        """Close a call."""
        self.calls.pop(call, None)
        self.incidents += incidents
        self.used = time.time()
