"""Shapes: on what the form of a tail may depend, and what is known of each.

A tail is the ids that a template puts behind a reply (`tails`). Which template, which arguments, what kind of reply, who speaks behind
it and who has spoken before: conversations that agree in all of this have one *shape*, and what was proven for one of them holds for all.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tokencache.core.canonical import Message
from tokencache.core.chain import Conversation
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.render.boundary import Boundary

MANY = 2


class TailAsk(msgspec.Struct, frozen=True):
    """A request for a tail: what stands behind the reply `messages[at - 1]` of a history, up to `messages[until]`.

    The history is the whole `conversation`; `raw` are its messages as they were written. Both are long, and only looked into.
    """

    model: str
    args: RenderArgs
    conversation: Conversation
    raw: Sequence[bytes]
    at: int
    until: int

    @property
    def reply(self) -> Message:
        """The reply whose end is the boundary."""
        return self.conversation.messages[self.at - 1]

    @property
    def new(self) -> Sequence[Message]:
        """The messages behind it."""
        return self.conversation.messages[self.at : self.until]

    @property
    def raw_new(self) -> Sequence[bytes]:
        """The messages behind it, raw."""
        return self.raw[self.at : self.until]


_ROLES = frozenset({"system", "user", "assistant", "tool"})


class Shape:
    """What is known of one shape: a way and a boundary if it was proven, else why it was refused, if it was."""

    def __init__(self, name: tuple[object, ...]) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.way = ""
        self.boundary = Boundary(b"", b"", b"")
        self.refused = ""
        self.proofs = 0
        self.uses = 0  # since it was proven or looked at again, or refused
        self.trust = 1

    def __str__(self) -> str:
        """Write its name for the log: with the roles of the new messages that everybody knows, not with those that a harness made up."""
        model, digest, calls, text, thought, runs, *rest = self.name
        assert isinstance(digest, bytes) and isinstance(runs, tuple)  # noqa: S101, PT018 - as `shape_of` makes them
        known = tuple((role if role in _ROLES else "other", n) for role, n in runs)
        return f"({model}, {digest.hex()[:8]}, {calls}, {text}, {thought}, {known}, {', '.join(map(str, rest))})"

    def forget(self) -> None:
        """Unlearn what was proven."""
        self.way, self.trust = "", 1


def shape_of(ask: TailAsk) -> tuple[object, ...]:
    """Name what the form of a tail may depend on: template arguments, the reply, the new messages, what came before."""
    new = ask.new
    runs = tuple((role, min(len(list(run)), MANY)) for role, run in groupby(m.role for m in new))
    spoken = {role for role, place in ask.conversation.debuts.items() if place < ask.at - 1}
    return (
        ask.model,
        ask.args.digest,
        min(len(ask.reply.calls), MANY),
        bool(ask.reply.text),
        bool(ask.reply.thought),
        runs,
        any(m.calls for m in new),
        "tool" in spoken,
        "assistant" in spoken,
        "user" in spoken,
        ask.at > 1 and ask.conversation.messages[0].role == "system",
        # A later system message stays where it is, unless vLLM makes system messages of a developer's, and one of all of them.
        any(m.role == "system" for m in new) and any(b'"developer"' in raw for raw in ask.raw[: ask.until]),
    )
