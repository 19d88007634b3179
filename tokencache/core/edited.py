"""Tells whether an unrecognized reply is an edited one, or that of another model: a label for people.

The label is never evidence: it is given after the match, and changes only its reason. An edited reply and one of another session
need different remedies, so the reasons `rewritten-reply` and `unrecognised-reply` should not be confused.

A message is an edited reply if a recorded turn was sampled in its place, or after as many messages of which the last one is the same, or
has the id of its first call; and

- it has most of the words of that turn's reply, in any order; or
- its text is a part of the reply's text, or the reverse; or
- it is in that place, and has the ids of all calls.

The numbers of turns, calls and characters that are compared are limited, and each comparison is linear in them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from tokencache.core.chain import Conversation
from tokencache.core.evidence import preceding_hash, split_preceding_hash
from tokencache.core.messages import Message, ToolCall, digest
from tokencache.core.turn import Turn
from tokencache.core.verdict import keeps_id

_CANDIDATES = 8
_COMPARED, _CALLS = 20_000, 16
"""Characters of each text, and calls of each message, that are compared."""
_SHORTEST = 16
"""Characters of the shortest text that may be a part of another one: shorter ones are there by chance."""
_WORD = re.compile(r"[A-Za-z0-9_]+|\w")
"""A letter outside ASCII counts as a word, because Chinese and Japanese put no spaces between words."""


def is_edited_reply(conversation: Conversation, turns: Sequence[Turn]) -> bool:
    """Whether the last assistant message of a conversation is an edited reply of one of these turns, the newest of which come last."""
    place = conversation.replies[-1] if conversation.replies else None
    if place is None:
        return False
    here = _Place(place, conversation.messages[place], conversation.chain[place], preceding_hash(conversation, place))
    candidates = [*islice(filter(here.may_be, reversed(turns)), _CANDIDATES)]
    if any(digest(turn.served) == conversation.digests[place] for turn in candidates):
        return False
    return any(map(here.resembles, candidates))


def is_a_reply_of(conversation: Conversation, turns: Iterable[Turn]) -> bool:
    """Whether the last assistant message of a conversation is the reply of one of the first of these turns."""
    own = conversation.digests[conversation.replies[-1]] if conversation.replies else b""
    return any(digest(turn.served) == own for turn in islice(turns, _CANDIDATES))


class _Place(NamedTuple):
    """A reply in a conversation: its place, the chain of the messages before it, and their `evidence.preceding_hash`."""

    place: int
    echoed: Message
    chain: bytes
    before: bytes

    def may_be(self, turn: Turn) -> bool:
        """Whether a turn was sampled here, or has the id of the first call."""
        return self.is_here(turn) or any(_has_call(turn.served, call) for call in self.echoed.calls[:1])

    def is_here(self, turn: Turn) -> bool:
        """Whether a turn was sampled here, or after as many messages of which the last one is the same."""
        before = split_preceding_hash(self.before).message
        after_same = bool(before) and turn.messages == self.place and split_preceding_hash(turn.before).message == before
        return turn.position_key == self.chain or after_same

    def resembles(self, turn: Turn) -> bool:
        """Whether the message is the reply of a turn with changes."""
        served, echoed = turn.served, self.echoed
        if self.is_here(turn) and 0 < len(echoed.calls) == len(served.calls) and all(_has_call(served, call) for call in echoed.calls):
            return True
        ours, theirs = served.text[:_COMPARED], echoed.text[:_COMPARED]
        if min(len(ours), len(theirs)) >= _SHORTEST and (ours in theirs or theirs in ours):
            return True
        words, others = _words(served), _words(echoed)
        return 2 * (words & others).total() > max(words.total(), others.total())


def _has_call(served: Message, call: ToolCall) -> bool:
    return any(keeps_id(own.id, call.id) for own in served.calls[:_CALLS])


def _words(message: Message) -> Counter[str]:
    texts = (message.text, *[text for call in message.calls[:_CALLS] for text in (call.name, call.arguments)])
    return Counter(word for text in texts for word in _WORD.findall(text[:_COMPARED]))
