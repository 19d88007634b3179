"""Evidence: what a turn keeps of the history that it answered, so that a later history can be held against it.

A chain says that the same words stand in the same places. Some things it does not say: whether a reply came back with other
reasoning than the model's, whether a rule that is switched off was needed for it, whether the harness changed an assistant's
message of its own. Each turn was sent after all of that was judged for its own history. So a turn keeps three short hashes:

`judged_hash`    the assistant's messages of its history as they were written, the handles that came back with them, and what was forgiven
            then. A history that begins with the same bytes under the same rules needs no second judgement: nearly always.
`foreign_hash`   the assistant's messages in its prompt that are the harness's own; nothing if there are none.
`preceding_hash`    what stands directly before the reply, however it is written: evidence of where the reply was sampled.

Where `judged_hash` differs, `still_holds` judges every reply in the turn's prompt again, along the line of turns that it continues.

A client may also send back the token ids of a reply (`ReturnedIdHashes`). They name the turn, if its words came back, too.
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
    """A reply that stands in a prompt with its exact ids: its place among the messages, whose it is, and its range of tokens."""

    place: int
    turn: Turn
    start: int
    end: int

    @property
    def anchor(self) -> Anchor:
        """The same, to be recorded."""
        return Anchor(self.turn.id, self.start, self.end, self.place)


def whole_reply(place: int, turn: Turn) -> PlacedReply:
    """A turn's reply at the end of its own prefix."""
    return PlacedReply(place, turn, turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens)


class ReturnedIdHashes(NamedTuple):
    """Hashes of the token ids that came back with a message, to be compared with those of a turn.

    `prefix` is the hash of the ids of its prompt and its generation together, `completion` that of its generation (`turn.hash_ids`);
    `completion` is empty where only the prefix as a whole came back.
    """

    prefix: bytes
    completion: bytes = b""

    def names(self, turn: Turn) -> bool:
        """Whether these are the ids of a turn."""
        return turn.prefix_hash == self.prefix and self.completion in {b"", turn.completion_hash}


Echoes = Callable[[Turn, int], bool]
"""Whether the message at a place of the history is a turn's reply, come back."""


def judged_hash(conversation: Conversation, until: int, leniency: Leniency, handles: Mapping[int, str]) -> bytes:
    """Name the assistant's messages among the first `until` as they came back, and the rules under which they were judged: 8 bytes."""
    came = "".join([handle for place, handle in handles.items() if place < until])
    return xxhash.xxh3_64_digest(conversation.written[until] + _rules(leniency) + came.encode())


@lru_cache(maxsize=256)
def _rules(leniency: Leniency) -> bytes:
    return "\0".join([*sorted(leniency.off), "", *sorted(leniency.harness_rules)]).encode()


class PrecedingHash(NamedTuple):
    """What stands directly before a reply, white space, content shape and ids aside: the last message, and all since the reply before.

    8 and 4 bytes of keyed hashes; nothing at the beginning of a conversation.
    """

    message: bytes
    messages: bytes


def preceding_hash(conversation: Conversation, place: int) -> bytes:
    """Name what stands directly before a place: 12 bytes (`PrecedingHash`), none at the beginning."""
    if not place:
        return b""
    start = place
    while start and conversation.messages[start - 1].role != "assistant":
        start -= 1
    salt, said = conversation.salt, conversation.digests
    return keyed_hash(salt, b"before" + said[place - 1])[:_LAST] + keyed_hash(salt, b"since" + b"".join(said[start:place]))[:_SINCE]


def split_preceding_hash(preceding_hash: bytes) -> PrecedingHash:
    """Part what `preceding_hash` returned."""
    return PrecedingHash(preceding_hash[:_LAST], preceding_hash[_LAST:])


_LAST, _SINCE = 8, 4


def foreign_hash(conversation: Conversation, start: int, until: int, replies: Collection[int], inherited: bytes = b"") -> bytes:
    """Name the harness's own assistant's messages up to `until` as they are written: 16 bytes, none if there are none.

    `replies` are the places from `start` on at which replies of the model stand; `inherited` is the name of what stands before `start`.
    """
    own = [i for i in range(start, until) if conversation.messages[i].role == "assistant" and i not in replies]
    return keyed_hash(conversation.salt, b"foreign" + inherited + b"".join(conversation.exacts[i] for i in own)) if own else inherited


def placed_replies(turn: Turn, turns: Mapping[str, Turn]) -> tuple[PlacedReply, ...] | None:
    """List the replies that stand in a turn's prompt, in order; `None` if the records do not say where.

    `turns` holds all turns that it rests on.
    """
    line: list[PlacedReply] = []
    at = turn
    while at.parent is not None and not at.anchors:
        parent = turns.get(at.parent)
        if parent is None:
            return None
        line.append(whole_reply(parent.messages, parent))
        at = parent
    if at.reason == Reason.CLIENT_IDS:  # which of its messages stand in the client's ids is not recorded
        return None
    if any(anchor.place < 0 or anchor.turn not in turns for anchor in at.anchors):
        return None
    first = [PlacedReply(anchor.place, turns[anchor.turn], anchor.start, anchor.end) for anchor in at.anchors]
    return (*first, *reversed(line))


def still_holds(turn: Turn, conversation: Conversation, turns: Mapping[str, Turn], echoes: Echoes) -> bool:
    """Whether a turn's prompt is what these messages call for: every reply in it came back, and nothing else has changed.

    The conversation is known to have the same chain as the turn's history (`chain`). `turns` holds all turns that it rests on.
    """
    replies = placed_replies(turn, turns)
    if replies is None or not all(reply.place < turn.messages and echoes(reply.turn, reply.place) for reply in replies):
        return False
    line = [turn]
    while line[-1].parent is not None and not line[-1].anchors:
        line.append(turns[line[-1].parent])
    name, start = b"", 0
    for at in reversed(line):
        name = foreign_hash(conversation, start, at.messages, {anchor.place for anchor in at.anchors}, name)
        start = at.messages + 1
    return turn.foreign == name
