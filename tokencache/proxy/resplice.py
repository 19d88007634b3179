"""Plans the prompt of a history that was edited: the engine renders it again, and every recognized reply keeps its exact ids."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tokencache.core import evidence, ids
from tokencache.core.added_text import added_text
from tokencache.core.evidence import PlacedReply
from tokencache.core.match import Match
from tokencache.core.messages import Message, inline_end
from tokencache.core.reasons import Reason
from tokencache.core.splice import fill
from tokencache.core.turn import Tokens, Turn
from tokencache.core.verdict import CUT_OFF
from tokencache.engine.drivers.base import LastReply
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.engine.template.visible import SampledReply, as_served
from tokencache.proxy.plan import Basis, Plan, PlanningContext

_NOT_PLACED = frozenset({Reason.OPENER_UNKNOWN, Reason.VISIBLE_PART_UNKNOWN, Reason.ADDED_TEXT_UNPROVEN})
"""Reasons for which a recognized reply is rendered as text."""


class Resplice:
    """Plans the prompt of one call."""

    def __init__(self, context: PlanningContext) -> None:
        self._context = context

    async def plan(self, found: Match, cut: bytes | None) -> Plan:
        """Render the history again, with the exact ids of every recognized reply.

        A frame has no place for words that the client added to a reply, nor for the parts of one that the client continued. So such replies
        are rendered as text.

        Raises:
            TailRefusedError: the frame of the replies, or the generation prompts before them, cannot be proven.
        """
        replies = [evidence.whole_reply(place, hit.turn) for place, hit in found.anchors]
        if found.parent is not None:
            last = evidence.whole_reply(found.at - 1, found.parent)
            last = last if cut is None else msgspec.structs.replace(last, end=ids.count(cut))
            replies = [*await self._context.placed_replies(found.parent), last, *replies]
        in_parts = {reply.place for reply in replies if reply.turn.begun}
        framed = [reply for reply in replies if reply.place not in in_parts and not self._has_words(reply)]
        if len(framed) < len(replies):
            found = found._replace(reason=Reason.OPENER_UNKNOWN if in_parts else Reason.ADDED_TEXT_UNPROVEN)
        if not framed:
            raise TailRefusedError(found.reason)
        prompt, replies, stored, laid = await self._fill(framed)
        found = found._replace(reason=laid.reason or found.reason or laid.default_reason)
        last = replies[-1]
        parent = await self._same_prefix(prompt, last)
        plan = Plan(
            match="resplice",
            reason=found.reason,
            prefix=prompt,
            fragment=ids.Fragment.of(prompt),
            last_reply=LastReply(last.place, last.start, last.end, _logprobs_from(last.offset, stored[last.turn.id].logprobs)),
            origin=last.turn.id,
            anchors=tuple(reply.anchor for reply in replies),
            applied_rules=found.applied_rules,
            basis=Basis.of(parent or found.parent or last.turn),
            sampled=self._sampled_in(prompt, replies),
        )
        if parent is None:
            return plan
        reason = found.reason if found.reason in _NOT_PLACED else Reason.RENDERED_ALIKE
        follows = msgspec.structs.replace(
            plan,
            match="continue",
            reason=reason,
            parent=parent.id,
            origin=None,
            basis=Basis.of(parent, last.end),
            sampled=self._context.sampled(ids.head(prompt, last.end), parent),
        )
        if parent is found.parent and not found.anchors and reason == Reason.RENDERED_ALIKE:  # not edited after all
            if not self._context.follows_template:
                await self._context.model.edited_histories.confirm(parent, laid.request, [reply.place for reply in replies], laid.frame)
            basis = Basis.of(parent, last.end, found.at - 1)
            return msgspec.structs.replace(follows, match=found.kind, reason="", anchors=(), basis=basis)
        continued = any(hit.continued for _, hit in found.anchors if hit.turn.id == parent.id)
        return msgspec.structs.replace(follows, match="branch") if continued else follows

    async def exact(self, replies: Sequence[PlacedReply]) -> bytes | None:
        """Render the history again with exactly these ranges of recorded replies, each at its place in this history.

        Returns:
            The packed prompt; `None` if the template shows another part of a reply.

        Raises:
            TailRefusedError: it is not proven where a reply is.
        """
        if any(reply.turn.begun or self._has_words(reply) for reply in replies):
            raise TailRefusedError(Reason.ADDED_TEXT_UNPROVEN)
        filled = await self._fill(replies)
        if filled.laid.reason:
            raise TailRefusedError(filled.laid.reason)
        same = [(one.turn.id, one.offset, one.end - one.start) for one in replies] == [
            (one.turn.id, one.offset, one.end - one.start) for one in filled.replies
        ]
        return filled.prompt if same else None

    async def _fill(self, replies: Sequence[PlacedReply]) -> "_Filled":
        """Insert replies into the rendering of the history.

        Raises:
            TailRefusedError: the frame of the replies, or all generation prompts before them, cannot be proven.
        """
        stored = await self._context.store.tokens(self._context.session, [reply.turn.id for reply in replies])
        laid = await (self._lay_out_visible(replies, stored) if self._context.follows_template else self._lay_out(replies, stored))
        completions = [reply.tokens_in(stored[reply.turn.id].completion) for reply in laid.replies]
        prompt, spans = fill(laid.gaps, laid.generation_prompts, completions, self._context.model.stop_ids)
        placed = [msgspec.structs.replace(reply, start=start, end=end) for reply, (start, end) in zip(laid.replies, spans, strict=True)]
        return _Filled(prompt, placed, stored, laid)

    def _has_words(self, reply: PlacedReply) -> bool:
        """Whether the client added words of its own to a reply."""
        added = added_text(reply.turn, self._context.conversation.messages[reply.place], self._context.call.leniency)
        return added is not None and not added.restored

    def _sampled_in(self, prompt: bytes, replies: Sequence[PlacedReply]) -> tuple[int, ...]:
        """Return the positions in replies, half-open ranges of a prompt, that have an id of a placeholder."""
        if not self._context.call.media:
            return ()
        inside = {place for reply in replies for place in range(reply.start, reply.end)}
        return tuple(place for place in ids.places_of(prompt, self._context.model.capability.placeholder_ids) if place in inside)

    async def _lay_out(self, replies: Sequence[PlacedReply], stored: Mapping[str, Tokens]) -> "_Layout":
        """Lay out replies as they were sampled, after their generation prompts. A reply whose generation prompt is unknown is left out.

        Raises:
            TailRefusedError: the frame of the replies, or all generation prompts, cannot be proven.
        """
        reason = ""
        while replies:
            request = self._context.request(replies[-1].place + 1)
            frame = await self._context.model.edited_histories.frame(request, [reply.place for reply in replies])
            prompts = [await self._generation_prompt(frame, n, reply, stored) for n, reply in enumerate(replies)]
            known = [prompt for prompt in prompts if prompt is not None]
            if len(known) == len(prompts):
                return _Layout(request, frame, frame.gaps, known, replies, reason, Reason.PAST_CHANGES)
            replies = [reply for reply, prompt in zip(replies, prompts, strict=True) if prompt is not None]
            reason = Reason.OPENER_UNKNOWN
        raise TailRefusedError(Reason.OPENER_UNKNOWN)

    async def _lay_out_visible(self, replies: Sequence[PlacedReply], stored: Mapping[str, Tokens]) -> "_Layout":
        """Lay out the parts of replies that the template shows. A reply whose visible part is not proven is left out.

        Raises:
            TailRefusedError: the frame of the replies, or all visible parts, cannot be proven.
        """
        reason = ""
        while replies:
            places = [reply.place for reply in replies]
            raw = list(self._context.call.safe_messages())
            for reply in replies:
                raw[reply.place] = as_served(raw[reply.place], self._received(reply))
            request = msgspec.structs.replace(self._context.request(places[-1] + 1), raw=raw)
            frame = await self._visible_frame(request, places)
            sampled = [
                SampledReply(_received_tokens(reply, stored), self._received(reply), await self._generation_prompt(frame, n, reply, stored))
                for n, reply in enumerate(replies)
            ]
            parts = await self._context.model.visible_replies.parts(request, frame, places, sampled)
            shown = [(n, part) for n, part in enumerate(parts) if part is not None and part.tokens]
            if len(shown) == len(replies):
                gaps = [frame.gaps[n] if part.whole else frame.fronts[n] for n, part in shown]
                generation_prompts = [sampled[n].generation_prompt or b"" if part.whole else b"" for n, part in shown]
                kept = [msgspec.structs.replace(replies[n], start=0, end=part.tokens, offset=part.offset) for n, part in shown]
                default = Reason.PAST_CHANGES if all(part.whole for _, part in shown) else Reason.THINKING_DROPPED
                return _Layout(request, frame, [*gaps, frame.gaps[-1]], generation_prompts, kept, reason, default)
            reason = Reason.VISIBLE_PART_UNKNOWN if None in parts else reason
            replies = [replies[n] for n, _ in shown]
        raise TailRefusedError(reason or Reason.THINKING_DROPPED)

    async def _visible_frame(self, request: TailRequest, places: Sequence[int]) -> HistoryFrame:
        """Find a frame with the sentinels in the texts of the replies; in their calls, if the template writes later calls in another form.

        Raises:
            TailRefusedError: neither frame can be proven.
        """
        frames = self._context.model.edited_histories
        try:
            return await frames.frame(request, places, in_text=True)
        except TailRefusedError:
            if not any(request.conversation.messages[place].calls for place in places):
                raise
            return await frames.frame(request, places)

    def _received(self, reply: PlacedReply) -> Message:
        """Return a reply as the client has it, with its thinking. Of an interrupted reply, only the echo shows how much that is."""
        served, echoed = reply.turn.served, self._context.conversation.messages[reply.place]
        if CUT_OFF.isdisjoint(reply.turn.marks):
            added = added_text(reply.turn, echoed, self._context.call.leniency)
            return served if added is None else msgspec.structs.replace(served, content=(served.content or "") + added.text)
        if echoed.calls:
            return msgspec.structs.replace(served, calls=served.calls[: len(echoed.calls)])
        content = echoed.content if served.reasoning is None or not echoed.content else echoed.content[inline_end(echoed.content) :]
        reasoning = served.reasoning if echoed.text else echoed.reasoning or echoed.thought or None
        return msgspec.structs.replace(served, content=content, reasoning=reasoning, calls=())

    async def _generation_prompt(self, frame: HistoryFrame, n: int, reply: PlacedReply, stored: Mapping[str, Tokens]) -> bytes | None:
        """Find the generation prompt after which reply `n` was sampled; `None` if it cannot be identified."""
        prompt = stored[reply.turn.id].delta
        if len(prompt) < frame.longest:  # most of its prompt is stored with another turn
            prompt = (await self._context.prefixes.get(self._context.session, reply.turn.id)).prefix.prompt
        before = evidence.split_preceding_hash(evidence.preceding_hash(self._context.conversation, reply.place)).message
        same_message = before == evidence.split_preceding_hash(reply.turn.before).message
        return frame.generation_prompt(n, prompt, same_message=same_message)

    async def _same_prefix(self, prompt: bytes, last: PlacedReply) -> Turn | None:
        """Return the last reply's turn if the prompt still begins with its exact prefix after the edit; otherwise `None`."""
        if (self._context.call.media or last.turn.media) and not self._has_media_of(last):
            return None  # another image may have the same ids
        if last != evidence.whole_reply(last.place, last.turn):
            return None
        cached = await self._context.prefixes.get(self._context.session, last.turn.id)
        return last.turn if prompt.startswith(cached.prefix.ids) else None

    def _has_media_of(self, last: PlacedReply) -> bool:
        """Whether the messages before a reply have the media of its turn's prompt."""
        here = [(part.modality, part.sha256) for part in self._context.call.media_parts(last.place)]
        return here == [(medium.modality, medium.sha256) for medium in last.turn.media]


class _Layout(NamedTuple):
    """Replies and what the template writes around them.

    Attributes:
        request: the request whose rendering it is.
        frame: the frame of the replies.
        gaps: the ids before each reply, since the preceding one, and the ids after the last (packed).
        generation_prompts: the ids that follow each gap and precede the reply.
        replies: the replies that are placed; their ranges show which tokens of each, and how many.
        reason: why other replies are not placed; `""` if all are.
        default_reason: why the history is rendered again, if nothing else was found.
    """

    request: TailRequest
    frame: HistoryFrame
    gaps: Sequence[bytes]
    generation_prompts: Sequence[bytes]
    replies: Sequence[PlacedReply]
    reason: str
    default_reason: str


class _Filled(NamedTuple):
    """A packed prompt, the replies in it, the stored tokens of their turns, and the layout."""

    prompt: bytes
    replies: list[PlacedReply]
    stored: Mapping[str, Tokens]
    laid: _Layout


def _received_tokens(reply: PlacedReply, stored: Mapping[str, Tokens]) -> bytes:
    """Return the packed ids of a whole reply, as far as the client received it."""
    completion = stored[reply.turn.id].completion
    return ids.head(completion, reply.offset + reply.end - reply.start) if not CUT_OFF.isdisjoint(reply.turn.marks) else completion


def _logprobs_from(offset: int, packed: bytes) -> bytes:
    """Return packed log probabilities without those of the first `offset` tokens."""
    return ids.pack_logprobs(ids.unpack_logprobs(packed)[offset:]) if offset else packed
