"""Shapes: on what the form of a tail may depend, and what is known of each.

A tail is the ids that a template puts behind a reply (`tails`). Which template, which arguments, what kind of reply, who speaks behind
it and who has spoken before: conversations that agree in all of this have one *form*. A template may look further: at the system
prompt, the tools. So what is trusted is a form in one *context* (what the conversation starts from), a *shape*: what was proven for one
conversation of a shape holds for all that have it.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby

import msgspec

from tokencache.core.chain import FIRST_CALL, Conversation
from tokencache.core.messages import Message
from tokencache.core.verdict import is_unique
from tokencache.dialects.chat.rendering import RenderArgs

MANY = 2


class TailAsk(msgspec.Struct, frozen=True):
    """A request for a tail: what stands behind the reply `messages[at - 1]` of a history.

    The history is the whole `conversation`; `raw` are its messages as they were written. Both are long, and only looked into. `opened`
    is the prompt that the reply was sampled behind (packed), `None` if it is not known. `session` is whose conversation this is.
    """

    model: str
    args: RenderArgs
    conversation: Conversation
    raw: Sequence[bytes]
    at: int
    opened: bytes | None = None
    session: str = ""

    @property
    def reply(self) -> Message:
        """The reply whose end is the boundary."""
        return self.conversation.messages[self.at - 1]

    @property
    def new(self) -> Sequence[Message]:
        """The messages behind it."""
        return self.conversation.messages[self.at :]

    @property
    def raw_new(self) -> Sequence[bytes]:
        """The messages behind it, raw."""
        return self.raw[self.at :]

    @property
    def lead(self) -> int:
        """How many messages stand before the first answer to a user: a greeting in front is none, and may be all that stands still."""
        messages = self.conversation.messages
        asked = self.conversation.debuts.get("user", 0)
        return next((i for i in range(asked, self.at) if messages[i].role == "assistant"), self.conversation.debuts["assistant"])

    @property
    def systems(self) -> Sequence[bytes]:
        """The system messages in front, raw."""
        return self.raw[: self.conversation.systems]


_ROLES = frozenset({"system", "user", "assistant", "tool"})


class TailRefusal:
    """Why no tail is given, and how often one was asked for since."""

    __slots__ = ("asked", "reason")

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, 0


class Shape:
    """What is known of one shape.

    `way` is set if it was proven, `opener` is then what its small conversations end with: the generation prompt.
    `deepest` is the longest history (messages) that was looked at as a whole. `refusals` are those of single conversations; that of `None`
    is the template's own, whoever asks.
    """

    __slots__ = ("deepest", "lock", "name", "opener", "proofs", "refusals", "trust", "uses", "way")

    def __init__(self, name: tuple[object, ...]) -> None:
        self.name = name
        self.lock = asyncio.Lock()
        self.way = ""
        self.opener = b""
        self.deepest = 0
        self.refusals: dict[object, TailRefusal] = {}
        self.proofs = 0
        self.uses = 0  # since it was proven or looked at again
        self.trust = 1

    @property
    def form(self) -> tuple[object, ...]:
        """Its name without its context."""
        return self.name[1:]

    def __str__(self) -> str:
        """Describe it for the log. Roles that a harness made up are not shown."""
        context, model, digest, calls, text, thought, _, runs, *_ = self.name
        assert isinstance(context, bytes) and isinstance(digest, bytes) and isinstance(runs, tuple)  # noqa: S101, PT018 - `shape_of` makes them
        new = ", ".join(f"{n} {role if role in _ROLES else 'other'}" for role, n in runs)
        reply = [*(["thinking"] if thought else []), *(["text"] if text else []), *([f"{calls} tool calls"] if calls else [])]
        after = " and ".join(reply) or "nothing"
        return f"new messages ({new}) after a reply with {after} (model {model}, context {context.hex()[:8]}, arguments {digest.hex()[:8]})"

    def forget(self) -> None:
        """Unlearn what was proven."""
        self.way, self.trust, self.deepest = "", 1, 0


def shape_of(ask: TailAsk) -> tuple[object, ...]:
    """Name what the form of a tail may depend on: its context first, then arguments, the reply, the new messages, what came before."""
    new = ask.new
    runs = tuple((role, min(len(list(run)), MANY)) for role, run in groupby(m.role for m in new))
    spoken = {role for role, place in ask.conversation.debuts.items() if place < ask.at - 1}
    return (
        ask.conversation.context,
        ask.model,
        ask.args.digest,
        min(len(ask.reply.calls), MANY),
        bool(ask.reply.text),
        bool(ask.reply.thought),
        counted_twice(ask),
        runs,
        # Behind whom the reply was sampled: a template may write the last message otherwise than those before it.
        ask.conversation.messages[ask.at - 2].role if ask.at > 1 else "",
        any(m.calls for m in new),
        "tool" in spoken,
        FIRST_CALL in spoken,
        "assistant" in spoken,
        "user" in spoken,
        ask.at > 1 and ask.conversation.messages[0].role == "system",
        # A later system message stays where it is, unless vLLM makes system messages of a developer's, and one of all of them.
        any(m.role == "system" for m in new) and any(b'"developer"' in raw for raw in ask.raw),
    )


def counted_twice(ask: TailAsk) -> bool:
    """Whether a call of the reply has an id that an earlier call has: a template that looks results up by it finds the earlier one."""
    names = {call.id for call in ask.reply.calls if not is_unique(call.id)}
    if not names or ask.conversation.debuts.get(FIRST_CALL, ask.at) >= ask.at - 1:
        return False
    return any(call.id in names for message in ask.conversation.messages[: ask.at - 1] for call in message.calls)
