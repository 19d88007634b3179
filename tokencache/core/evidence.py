"""What a turn keeps of the history that it answered, so that later histories can be compared with it.

Two histories with one chain have the same messages in the same positions. A chain does not say whether a reply came back with other
reasoning than the model's, whether it needed a rule that is switched off, or whether the harness changed an assistant message of its own.
All of that was checked for each turn's own history before the turn was sent. So a turn keeps three short hashes:

`judged`    the assistant messages of its history as they were written, the handles that came back with them, and the rules that applied.
            A history that begins with the same bytes under the same rules needs no second check: nearly always.
`foreign`   the assistant messages in its prompt that the harness wrote itself; empty if there are none.
`before`    what comes directly before the reply, however it is written: evidence of where the reply was sampled.

Where `judged` differs, `still_holds` checks every reply in the turn's prompt again, along the lineage.
"""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec
import xxhash

from tokencache.core.chain import Conversation, keyed_hash
from tokencache.core.reasons import Reason
from tokencache.core.rules import Leniency
from tokencache.core.turn import Anchor, Turn


class PlacedReply(msgspec.Struct, frozen=True):
    """A reply inside a prompt: its place among the messages, its turn, and its half-open range of tokens."""

    place: int
    turn: Turn
    start: int
    end: int

    @property
    def anchor(self) -> Anchor:
        """The same as a record."""
        return Anchor(self.turn.id, self.start, self.end, self.place)


def whole_reply(place: int, turn: Turn) -> PlacedReply:
    """Return a turn's reply at the end of its own prefix."""
    return PlacedReply(place, turn, turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens)


class ReturnedIdHashes(NamedTuple):
    """Hashes of token ids that a client sent back with a message (`turn.hash_ids`).

    `prefix` covers the ids of its prompt and its generation together, `completion` those of its generation; `completion` is empty if
    only the prefix as a whole came back.
    """

    prefix: bytes
    completion: bytes = b""

    def names(self, turn: Turn) -> bool:
        """Whether these are the ids of a turn."""
        return turn.prefix_hash == self.prefix and self.completion in {b"", turn.completion_hash}


def judged_hash(conversation: Conversation, until: int, leniency: Leniency, handles: Mapping[int, str]) -> bytes:
    """Hash the assistant messages among the first `until` as they came back, and the rules that applied: 8 bytes."""
    returned = "".join([handle for place, handle in handles.items() if place < until])
    return xxhash.xxh3_64_digest(conversation.written_chain[until] + _rules(leniency) + returned.encode())


@lru_cache(maxsize=256)
def _rules(leniency: Leniency) -> bytes:
    return "\0".join([*sorted(leniency.off), "", *sorted(leniency.harness_rules)]).encode()


class PrecedingHash(NamedTuple):
    """What comes directly before a reply: the last message (8 bytes), and all messages since the reply before (4 bytes).

    Keyed hashes, without whitespace, content shape and ids; empty at the beginning of a conversation.
    """

    message: bytes
    messages: bytes


_MESSAGE, _MESSAGES = 8, 4


def preceding_hash(conversation: Conversation, place: int) -> bytes:
    """Hash what comes directly before a place: 12 bytes (`PrecedingHash`), none at the beginning."""
    if not place:
        return b""
    start = place
    while start and conversation.messages[start - 1].role != "assistant":
        start -= 1
    salt, digests = conversation.salt, conversation.digests
    last = keyed_hash(salt, b"before" + digests[place - 1])[:_MESSAGE]
    return last + keyed_hash(salt, b"since" + b"".join(digests[start:place]))[:_MESSAGES]


def split_preceding_hash(packed: bytes) -> PrecedingHash:
    """Split the result of `preceding_hash`."""
    return PrecedingHash(packed[:_MESSAGE], packed[_MESSAGE:])


def foreign_hash(conversation: Conversation, start: int, until: int, replies: Collection[int], inherited: bytes = b"") -> bytes:
    """Hash the harness's own assistant messages up to `until` as they are written: 16 bytes, none if there are none.

    `replies` are the places from `start` on with replies of the model; `inherited` is the hash of what comes before `start`.
    """
    own = [i for i in range(start, until) if conversation.messages[i].role == "assistant" and i not in replies]
    return keyed_hash(conversation.salt, b"foreign" + inherited + b"".join(conversation.exacts[i] for i in own)) if own else inherited


def placed_replies(turn: Turn, turns: Mapping[str, Turn]) -> tuple[PlacedReply, ...] | None:
    """List the replies inside a turn's prompt, in order; `None` if the records do not say where they are.

    `turns` contains all turns that it rests on.
    """
    line: list[PlacedReply] = []
    at = turn
    while at.parent is not None and not at.anchors:
        parent = turns.get(at.parent)
        if parent is None:
            return None
        line.append(whole_reply(parent.messages, parent))
        at = parent
    if at.reason == Reason.CLIENT_IDS:  # where its messages are within the client's ids is not recorded
        return None
    if any(anchor.place < 0 or anchor.turn not in turns for anchor in at.anchors):
        return None
    first = [PlacedReply(anchor.place, turns[anchor.turn], anchor.start, anchor.end) for anchor in at.anchors]
    return (*first, *reversed(line))


def still_holds(turn: Turn, conversation: Conversation, turns: Mapping[str, Turn], came_back: Callable[[Turn, int], bool]) -> bool:
    """Whether a turn's prompt is right for these messages: every reply in it came back, and no other assistant message changed.

    The conversation is known to have the chain of the turn's history. `turns` contains all turns that it rests on. `came_back` says
    whether the message at a place is the reply of a turn.
    """
    replies = placed_replies(turn, turns)
    if replies is None or not all(reply.place < turn.messages and came_back(reply.turn, reply.place) for reply in replies):
        return False
    line = [turn]
    while line[-1].parent is not None and not line[-1].anchors:
        line.append(turns[line[-1].parent])
    hashed, start = b"", 0
    for at in reversed(line):
        hashed = foreign_hash(conversation, start, at.messages, {anchor.place for anchor in at.anchors}, hashed)
        start = at.messages + 1
    return turn.foreign == hashed
