"""Defines the features of a conversation that its tail may depend on, and stores what is known about each combination.

A tail is what a template writes after a reply (`tails`). The *form* of a conversation contains the features that a tail may depend on: the
template and its arguments, the kind of reply, the roles of the messages after it, and the roles before it. A template may also use the
system prompt and the tools: the *context*, from which a conversation starts. A form in one context is a *shape*. What was proven for one
conversation of a shape is used for all conversations of that shape.
"""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from tokencache.core import ids
from tokencache.core.chain import FIRST_ANSWER, FIRST_CALL, FIRST_MEDIA, Conversation
from tokencache.core.messages import Message
from tokencache.core.verdict import is_unique
from tokencache.dialects.chat.rendering import RenderArgs

MANY = 2
"""Counts of calls and messages are distinguished up to this number."""
MOST_REFUSALS = 64
"""Limit for the remembered refusals of one shape."""
_ROLES = frozenset({"system", "user", "assistant", "tool"})


class TailRequest(msgspec.Struct, frozen=True):
    """A request for a tail, the ids that the template writes after the reply `messages[at - 1]` of a history.

    Attributes:
        model: the model's name.
        args: the template arguments.
        conversation: the whole history.
        raw: its messages as JSON.
        at: the number of messages up to and including the reply.
        reply: that message.
        prefix: the ids of the history as it was sampled: the prompt and the reply (packed); `b""` if unknown.
        reply_start: the number of tokens of that prompt.
        session: the session that the conversation belongs to.
        words: the words of the client with which the reply's message ends (`core.added_text`). They are not a part of the reply; its tail
            begins with them.
    """

    model: str
    args: RenderArgs
    conversation: Conversation
    raw: Sequence[bytes]
    at: int
    reply: Message
    prefix: bytes = b""
    reply_start: int = 0
    session: str = ""
    words: str = ""

    def reply_follows(self, generation_prompt: bytes) -> bool:
        """Whether the reply was sampled after a generation prompt (packed ids); true if that is unknown."""
        return not self.prefix or self.prefix.endswith(generation_prompt, 0, self.reply_start * ids.ID_BYTES)

    @property
    def new(self) -> Sequence[Message]:
        """The messages after the reply."""
        return self.conversation.messages[self.at :]

    @property
    def raw_new(self) -> Sequence[bytes]:
        """The messages after the reply, raw."""
        return self.raw[self.at :]

    @property
    def lead(self) -> int:
        """The number of messages before the first answer to a user; an assistant's greeting before them is not an answer."""
        places = self.conversation.first_places
        answer = places.get(FIRST_ANSWER, self.at)
        return answer if answer < self.at else places["assistant"]

    @property
    def systems(self) -> Sequence[bytes]:
        """The system messages at the beginning, raw."""
        return self.raw[: self.conversation.system_count]

    @property
    def episode(self) -> object:
        """The key of conversations that share a refusal: the session, and the beginning of the conversation."""
        return self.session, self.conversation.chain[self.lead]


class TailRefusal:
    """The reason why a tail was refused, and how many calls have requested it since."""

    __slots__ = ("asked", "reason")

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, 0


class Shape:
    """What is known about one shape.

    Attributes:
        key: context and form, as from `shape_of`.
        lock: held while the shape is proven.
        method: how its tails are found (`tails`); `""` while it is not proven.
        generation_prompt: the packed ids with which its small conversations end; set by the proof.
        deepest: the length in messages of the longest history that was rendered in full.
        proofs: the number of attempts to prove it.
        uses: the number of tails that were found since the last proof.
        trust: the factor by which the usual number of uses until the next proof is multiplied.
    """

    __slots__ = ("_refusals", "deepest", "generation_prompt", "key", "lock", "method", "proofs", "trust", "uses")

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.lock = asyncio.Lock()
        self.method = ""
        self.generation_prompt = b""
        self.deepest = 0
        self.proofs = 0
        self.uses = 0
        self.trust = 1
        self._refusals: dict[object, TailRefusal] = {}  # by episode; `None` is the key of a refusal that is due to the template

    @property
    def form(self) -> tuple[object, ...]:
        """The key without the context."""
        return self.key[1:]

    def __str__(self) -> str:
        """Describe the shape for the log. Roles that a client invented are not shown."""
        context, model, digest, calls, text, thought, _, runs, *_ = self.key
        assert isinstance(context, bytes) and isinstance(digest, bytes) and isinstance(runs, tuple)  # noqa: S101, PT018 - `shape_of` makes them
        new = ", ".join(f"{n} {role if role in _ROLES else 'other'}" for role, n in runs)
        reply = [*(["thinking"] if thought else []), *(["text"] if text else []), *([f"{calls} tool calls"] if calls else [])]
        after = " and ".join(reply) or "nothing"
        return f"new messages ({new}) after a reply with {after} (model {model}, context {context.hex()[:8]}, arguments {digest.hex()[:8]})"

    def refusal(self, request: TailRequest, *, everyone: bool = False) -> TailRefusal | None:
        """Return the refusal of a request's episode; with `everyone`, also a refusal of all conversations."""
        if not self._refusals:
            return None
        own = self._refusals.get(request.episode)
        return (self._refusals.get(None) or own) if everyone else own

    def refuse(self, request: TailRequest, reason: str, *, everyone: bool) -> None:
        """Remember a refusal of a request's episode, or of all conversations."""
        key = None if everyone else request.episode
        if len(self._refusals) >= MOST_REFUSALS and key not in self._refusals:
            del self._refusals[next(iter(self._refusals))]
        self._refusals[key] = TailRefusal(reason)

    def proven(self, request: TailRequest, method: str) -> None:
        """Remember that a request's tail was proven, and the method."""
        self.method, self.uses, self.deepest = method, 0, request.at
        self._refusals.pop(None, None)
        self._refusals.pop(request.episode, None)

    def forget(self) -> None:
        """Forget what was proven."""
        self.method, self.trust, self.deepest = "", 1, 0


def shape_of(request: TailRequest) -> tuple[object, ...]:
    """Return the key of a shape: its context, the model and arguments, the reply, the new messages, and the messages before the reply."""
    conversation, reply, at = request.conversation, request.reply, request.at
    new, first = conversation.messages[at:], conversation.first_places
    roles = [*map(attrgetter("role"), new)]
    runs = tuple([(role, min(len(list(run)), MANY)) for role, run in groupby(roles)])
    return (
        conversation.sampling_context,
        request.model,
        request.args.digest,
        min(len(reply.calls), MANY),
        bool(reply.text),
        bool(reply.thought),
        bool(reply.calls) and counted_twice(request),
        runs,
        # The role before the reply: a template may write the last message differently from those before it.
        conversation.messages[at - 2].role if at > 1 else "",
        any(map(attrgetter("calls"), new)),
        first.get("tool", at) < at - 1,
        first.get(FIRST_CALL, at) < at - 1,
        first.get("assistant", at) < at - 1,
        first.get("user", at) < at - 1,
        at > 1 and conversation.messages[0].role == "system",
        # A later system message stays in its place, unless vLLM turns developer messages into system messages and merges them all.
        "system" in roles and any(b'"developer"' in raw for raw in request.raw),
        # A template may count images, and write the number of each.
        any(map(attrgetter("media"), new)),
        first.get(FIRST_MEDIA, at) < at - 1,
        bool(request.words),
    )


def counted_twice(request: TailRequest) -> bool:
    """Whether a call of the reply has the id of an earlier call: a template that looks up results by id finds the earlier one."""
    names = {call.id for call in request.reply.calls if not is_unique(call.id)}
    if not names or request.conversation.first_places.get(FIRST_CALL, request.at) >= request.at - 1:
        return False
    return any(call.id in names for message in request.conversation.messages[: request.at - 1] for call in message.calls)
