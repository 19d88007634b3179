"""Defines how a call is sent, and what planning one call needs.

`planner` decides; `resplice` plans prompts for histories that were edited.
"""

from typing import Self

import msgspec

from tokencache.core import evidence, experts, ids
from tokencache.core.chain import Conversation
from tokencache.core.evidence import PlacedReply
from tokencache.core.media import PlacedMedia
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.turn import Anchor, MatchKind, Turn, TurnMark
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.earlier_thoughts import Part
from tokencache.engine.model import Model
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.store.base import Store


class Basis(msgspec.Struct, frozen=True):
    """The recorded turn whose prefix begins like a prompt, so that the beginning is not stored again.

    Attributes:
        id: the id of the turn; `None` if there is none.
        tokens: the number of tokens that its prefix and the prompt have in common; 0 if it is not known yet.
        messages: the number of the request's messages that are those of the turn's request, whose reply follows them; 0 if it is not known.
        media: the images and other media of the turn's prompt, with which this prompt begins.
        routed: the number of tokens at the beginning of the prompt whose routed experts are stored with the turn (`core.experts`).
        served: the turn's reply, if it follows the common messages.
        foreign: a hash of the client's own assistant messages among the common messages (`core.evidence`).
    """

    id: str | None = None
    tokens: int = 0
    messages: int = 0
    media: tuple[PlacedMedia, ...] = ()
    routed: int = 0
    served: Message | None = None
    foreign: bytes = b""

    @classmethod
    def of(cls, turn: Turn, tokens: int = 0, messages: int = 0) -> Self:
        """Return what a prompt has in common with a turn; `tokens` and `messages` as in the attributes."""
        routed = min(tokens, experts.covered(turn)) if turn.experts or turn.experts_start else 0
        served, foreign = (turn.served, turn.foreign) if messages else (None, b"")
        return cls(turn.id, tokens, messages, turn.media if tokens else (), routed, served, foreign)


NO_BASIS = Basis()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is sent.

    Attributes:
        match: how the history relates to recorded turns. It is recorded with the turn, like `reason`, `parent`, `origin`, `anchors` and
            `applied_rules`.
        prefix: the exact packed ids up to `tail`; `None` if the engine renders. A turn's own are those of the prefix cache, so that a long
            stream holds no copy.
        tail: the packed ids after them.
        fragment: all these ids as a JSON fragment.
        whole: whether these are the whole prompt; otherwise they end with the last reply, and the engine adds the tail.
        last_reply: the last reply in the prompt.
        parent: the id of the turn that this one continues.
        basis: the recorded turn whose prefix begins like the prompt.
        begun: the recorded reply that the call continues, as the client has it.
        sampled: positions in the prompt at which the model itself sampled an id of a placeholder.
        changed: what earlier thoughts in the prompt change for the reply (`engine.earlier_thoughts`).
        client_places: the places of replies with unrecorded ids that the client sent back and the prompt uses (`client_ids`).
    """

    match: MatchKind
    reason: str = ""
    prefix: bytes | None = None
    tail: bytes = b""
    fragment: ids.Fragment | None = None
    whole: bool = True
    last_reply: LastReply | None = None
    parent: str | None = None
    origin: str | None = None
    anchors: tuple[Anchor, ...] = ()
    applied_rules: tuple[str, ...] = ()
    basis: Basis = NO_BASIS
    begun: Message | None = None
    sampled: tuple[int, ...] = ()
    changed: tuple[Part, ...] = ()
    client_places: tuple[int, ...] = ()

    @property
    def prompt(self) -> bytes | None:
        """The exact packed ids, joined; `None` if the engine renders."""
        return None if self.prefix is None else self.prefix + self.tail

    @property
    def exact(self) -> ExactPrompt | None:
        """The exact prompt for a driver; `None` if the engine renders."""
        if self.prefix is None or self.fragment is None or self.last_reply is None:
            return None
        return ExactPrompt(self.prefix, self.fragment, self.last_reply, self.basis.media, self.sampled, self.tail)

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """The exact packed ids up to the end of the last reply, and after it; a prefix that ends there is not copied."""
        end = self.last_reply.end * ids.ID_BYTES if self.last_reply is not None else 0
        prefix = self.prefix or b""
        return prefix[:end], prefix[end:] + self.tail

    def rendered(self, reason: str) -> "Plan":
        """Return the plan of a call that the engine renders in place of this one, for a `reason`."""
        return Plan(match="plain", reason=reason, basis=Basis(self.basis.id))

    @property
    def sent(self) -> ids.Fragment:
        """The whole prompt as a JSON fragment, as the engine should report it; empty if it is not known."""
        return self.fragment if self.fragment is not None and self.whole else ids.NO_IDS


class PlanningContext(msgspec.Struct, frozen=True):
    """One call that is planned, and where the records of its session are.

    Attributes:
        store: the store.
        prefixes: the ids of recent turns.
        session: the session's name.
        call: the call.
        conversation: its messages.
        model: the model of the engine for which it is planned.
    """

    store: Store
    prefixes: PrefixCache
    session: str
    call: ChatCall
    conversation: Conversation
    model: Model

    @property
    def follows_template(self) -> bool:
        """Whether the prompt omits the thinking of earlier replies where the template does."""
        return self.call.history == "follow"

    async def blocked(self) -> str:
        """Return the reason why nothing can be spliced for this model or these arguments; `""` if it can."""
        capability = self.model.capability
        if capability.level != "exact":
            return Reason.RECORD_ONLY
        if not self.call.leniency.off.isdisjoint(self.call.left_out):
            return Reason.SWITCHED_OFF  # parsing the request needed a rule that is switched off
        if not capability.tokenizes:
            return ""  # the engine adds the tail
        return "" if await self.model.renders_alike(self.call.args) else Reason.RENDERINGS_DIFFER

    async def turns(self) -> dict[str, Turn]:
        """Read all turns of the session's history, by their ids."""
        return {turn.id: turn for turn in await self.store.turns(self.session) if TurnMark.NOT_IN_HISTORY not in turn.marks}

    async def placed_replies(self, turn: Turn) -> tuple[PlacedReply, ...]:
        """List the replies in a turn's prompt.

        Raises:
            TailRefusedError: the records do not contain their positions.
        """
        if turn.parent is None and not turn.anchors:
            return ()
        known = evidence.placed_replies(turn, await self.turns())
        if known is None:
            raise TailRefusedError(Reason.UNPLACED_REPLIES)
        return known

    def sampled(self, prefix: bytes, turn: Turn) -> tuple[int, ...]:
        """Return the positions in a turn's prefix that have an id of a placeholder, but belong to no image."""
        if not self.call.media:
            return ()
        inside = {place for medium in turn.media for place in range(medium.start, medium.end)}
        return tuple(place for place in ids.places_of(prefix, self.model.capability.placeholder_ids) if place not in inside)

    def request(self, at: int, prefix: bytes = b"", reply_start: int = 0, words: str = "") -> TailRequest:
        """Make the request for the tail before the message at `at`."""
        call, conversation = self.call, self.conversation
        raw, reply = call.safe_messages(), conversation.messages[at - 1]
        return TailRequest(call.model, call.args, conversation, raw, at, reply, prefix, reply_start, self.session, words)
