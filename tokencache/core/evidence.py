"""Hashes the history that a turn answered, so that later histories can be compared with it.

Two histories with the same chain have the same messages in the same positions. But the chain ignores some differences: other reasoning than
the model's in an echo, an echo that needed a rule which is now switched off, and changes to an assistant message that the harness wrote
itself. The proxy checked all of that for each turn's own history before it sent the turn. So a turn keeps three short hashes:

`judged`    of the assistant messages of its history exactly as written, the handles that came with them, and the rules that applied.
            A history that begins with the same bytes under the same rules needs no second check. That is nearly always so.
`foreign`   of the assistant messages in its prompt that the harness wrote itself; empty if there are none.
`before`    of the messages directly before the reply, as they were written: evidence of where the reply was sampled.

Where `judged` differs, `still_holds` checks every reply in the turn's prompt again, along the lineage.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from itertools import filterfalse
from typing import NamedTuple

import msgspec
import xxhash

from tokencache.core import ids
from tokencache.core.chain import Conversation, keyed_hash
from tokencache.core.reasons import Reason
from tokencache.core.rules import Leniency
from tokencache.core.turn import Anchor, Turn


class PlacedReply(msgspec.Struct, frozen=True):
    """A reply inside a prompt: its place among the messages, its turn, and its half-open range of tokens.

    `offset` is the number of tokens that its turn sampled before those of the range.
    """

    place: int
    turn: Turn
    start: int
    end: int
    offset: int = 0

    @property
    def anchor(self) -> Anchor:
        """The stored form."""
        return Anchor(self.turn.id, self.start, self.end, self.place, self.offset)

    def tokens_in(self, completion: bytes) -> bytes:
        """Cut the range out of its turn's completion (packed ids)."""
        return ids.head(ids.tail(completion, self.offset), self.end - self.start)


def whole_reply(place: int, turn: Turn) -> PlacedReply:
    """Return a turn's reply at the end of its own prefix."""
    return PlacedReply(place, turn, turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens)


class ReturnedIdHashes(NamedTuple):
    """Hashes of token ids that a client sent back with a message (`turn.hash_ids`).

    `prefix` covers the ids of its prompt and its generation together, `completion` those of its generation. `completion` is empty if the
    client sent only the prefix as a whole.
    """

    prefix: bytes
    completion: bytes = b""

    def names(self, turn: Turn) -> bool:
        """Whether these are hashes of this turn's ids."""
        return turn.prefix_hash == self.prefix and self.completion in {b"", turn.completion_hash}


def judged_hash(conversation: Conversation, until: int, leniency: Leniency, handles: Mapping[int, str]) -> bytes:
    """Hash the assistant messages among the first `until` exactly as written, and the rules that applied: 8 bytes."""
    returned = "".join([handle for place, handle in handles.items() if place < until]) if handles else ""
    return xxhash.xxh3_64_digest(conversation.written_chain[until] + _rules(leniency.off, leniency.harness_rules) + returned.encode())


@lru_cache(maxsize=256)
def _rules(off: frozenset[str], harness_rules: frozenset[str]) -> bytes:
    return "\0".join([*sorted(off), "", *sorted(harness_rules)]).encode()


class PrecedingHash(NamedTuple):
    """Hashes of the last message before a reply (8 bytes), and of all messages since the preceding reply (4 bytes).

    Keyed hashes of digests that cover whitespace, parts, and the id of the call that a result answers (`messages.context_digest`), because
    short messages ("ok") occur in the histories of several agents. Empty at the beginning of a conversation.
    """

    message: bytes
    messages: bytes


_MESSAGE, _MESSAGES = 8, 4


def preceding_hash(conversation: Conversation, place: int) -> bytes:
    """Hash the messages directly before a place: 12 bytes (`PrecedingHash`); empty at the beginning."""
    if not place:
        return b""
    start = place
    while start and conversation.messages[start - 1].role != "assistant":
        start -= 1
    salt, digests = conversation.salt, conversation.digests
    message = conversation.exacts[place - 1] if start == place else digests[place - 1]
    last = keyed_hash(salt, b"before" + message)[:_MESSAGE]
    return last + keyed_hash(salt, b"since" + b"".join(digests[start:place]))[:_MESSAGES]


def split_preceding_hash(packed: bytes) -> PrecedingHash:
    """Split the result of `preceding_hash`."""
    return PrecedingHash(packed[:_MESSAGE], packed[_MESSAGE:])


def foreign_hash(conversation: Conversation, start: int, until: int, replies: Collection[int], inherited: bytes = b"") -> bytes:
    """Hash the harness's own assistant messages up to `until` exactly as written: 16 bytes; empty if there are none.

    `replies` are the places from `start` on with replies of the model. `inherited` is the hash of the messages before `start`.
    """
    first, end = bisect_left(conversation.replies, start), bisect_left(conversation.replies, until)
    own = [*filterfalse(replies.__contains__, conversation.replies[first:end])]
    return keyed_hash(conversation.salt, b"foreign" + inherited + b"".join([conversation.exacts[i] for i in own])) if own else inherited


def placed_replies(turn: Turn, turns: Mapping[str, Turn]) -> tuple[PlacedReply, ...] | None:
    """List the replies inside a turn's prompt, in order; `None` if the records do not contain their positions.

    `turns` contains its ancestors and the turns of their anchors.
    """
    line: list[PlacedReply] = []
    at = turn
    while at.parent is not None and not at.anchors:
        parent = turns.get(at.parent)
        if parent is None:
            return None
        line.append(whole_reply(parent.messages, parent))
        at = parent
    if at.reason == Reason.CLIENT_IDS:  # the positions of its messages within the client's ids are not recorded
        return None
    if any(anchor.place < 0 or anchor.turn not in turns for anchor in at.anchors):
        return None
    first = [PlacedReply(anchor.place, turns[anchor.turn], anchor.start, anchor.end, anchor.offset) for anchor in at.anchors]
    return (*first, *reversed(line))


def still_holds(turn: Turn, conversation: Conversation, turns: Mapping[str, Turn], came_back: Callable[[Turn, int], bool]) -> bool:
    """Whether a turn's prompt still fits these messages: each of its replies has an echo, and no other assistant message changed.

    The conversation has the chain of the turn's history; the caller has checked that. `turns` contains the turn's ancestors and the turns
    of their anchors. `came_back` returns whether the message at a place is an echo of a turn's reply.
    """
    replies = placed_replies(turn, turns)
    if replies is None:
        return False
    whole = {reply.place: reply for reply in replies}  # of a reply that the client continued, the last part has the whole message
    if turn.begun:
        whole.pop(turn.messages, None)  # the beginning of its own reply
    if not all(place < turn.messages and came_back(reply.turn, place) for place, reply in whole.items()):
        return False
    line = [turn]
    while line[-1].parent is not None and not line[-1].anchors:
        line.append(turns[line[-1].parent])
    hashed, start = b"", 0
    for at in reversed(line):
        hashed = foreign_hash(conversation, start, at.messages, {anchor.place for anchor in at.anchors}, hashed)
        start = at.messages + 1
    return turn.foreign == hashed
