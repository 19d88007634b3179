"""Finds the ids that the template writes after a history, without rendering the history.

Only the new messages are rendered, in a small conversation that ends like the real one, with a sentinel in place of the reply
(`boundary`). For every **shape** (`shapes`), full renderings of the first real conversation must *prove* that the small conversation has
the same tail as the real one:

1. The full conversation with a sentinel in the last reply shows where that reply ends. What follows is a suffix of the full rendering
   with the real reply.
2. Other words in the new messages change nothing before that place. vLLM 0.32 moves later system messages to the front if there are
   developer messages, and DeepSeek's template always does. Then a spliced prompt would lack their text, and no suffix would show it.
3. The full rendering still begins with the ids before the model's first words, and the messages directly before the last reply are still
   rendered as they were. If a template moves its tools, or a hint, to the last user message, every new message changes the past. Then the
   old past, with which the reply was sampled, is not a prefix of the new rendering.
4. The small conversation gives exactly the same tail.

The result is a method for each shape. At first after 64 tails of a shape, later less often, the proof is repeated:

`local`    all steps succeed, also with the local tokenizer, which then makes the small renderings
`small`    all steps succeed: the engine's small renderings are trusted for this shape
`context`  all steps succeed if the small conversation begins with the real one's system messages and tools
`full`     all steps but the last succeed (DeepSeek-V3's second round of tool results): this shape is rendered in full each time
refused    nothing is spliced, the call is rendered plainly, and the reason is recorded; every 8th call tries again

A shape belongs to one context: the system messages, tools and template arguments from which a conversation starts. If the form was proven
in another context, steps 3 and 4 are enough, with one full rendering and that of the beginning. Another full rendering is compared each
time that a history is four times as long as any before it.

Templates may also react to words in the middle: `/no_think` in any user message changes the generation prompt from then on (Nemotron Nano
2). This is visible while the message is new, and stays visible in the prompt of the next reply. So the generation prompt of each tail is
compared with the one before the last reply, and with the one of the proof. If either differs, the tail is taken from a full rendering.
So is each tail that ends with a message of the assistant and shows no generation prompt after it (Nemotron Nano 2 writes it before).

If the client added words to the last reply (`TailRequest.words`), they follow the sentinel, and the tail begins with them. In the full
rendering, their first token may be one with the end of the reply. So there, the text is compared up to the end of the message, and the ids
from there on. In every such tail, the decoded words must be those of the client.

A refusal that is due to one conversation applies only to that conversation. What was learned is keyed by the number of known stop ids: when
a new stop id is found, everything is learned again.
"""

import logging
from typing import NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.chain import FIRST_MEDIA
from tokencache.core.messages import BLANK
from tokencache.core.reasons import Reason
from tokencache.engine.template.boundary import SENTINEL, Boundary, BoundaryUnknownError, answering, reworded, stand_in
from tokencache.engine.template.learned import (
    LearnedTemplate,
    as_refusal,
    check_same_past,
    other_call_ids,
    reason_of,
    with_call_ids,
)
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.engine.template.shapes import Shape, TailRequest, counted_twice, shape_of
from tokencache.recent import Recent

log = logging.getLogger(__name__)

RECHECK_EVERY, MOST_TRUST = 64, 16
"""A proven shape is checked again after this many uses, by rendering a whole history. After each successful check the number doubles, up
to 16 times: at 141 KB a rendering costs as much as five calls."""
DEEPER = 4
"""A history that is this many times as long as any checked before is rendered in full: a template may count messages."""
RETRY_EVERY = 8
MOST_SHAPES, MOST_FORMS = 65_536, 4096
"""Limits for remembered shapes and forms: template arguments and system prompts come from clients and may be new with every call."""


class _Proven(NamedTuple):
    """A tail, the method that finds it, and the rendering of the small conversation that contains it (`b""` for the method `full`)."""

    tail: bytes
    method: str
    small: bytes


class Tails:
    """Finds tails for one engine; proves each shape once and remembers the result.

    `recheck_every` is the number of uses after which a proven shape is checked again.
    """

    def __init__(self, template: LearnedTemplate, *, recheck_every: int = RECHECK_EVERY) -> None:
        self.template = template
        self._warned = False
        self._recheck_every = recheck_every
        self._shapes: Recent[object, Shape] = Recent(MOST_SHAPES)
        self._forms: Recent[object, bool] = Recent(MOST_FORMS)
        """Forms that were proven in some context."""

    async def tail(self, request: TailRequest) -> bytes:
        """Find the packed ids that the template writes after a reply: end of turn, new messages, generation prompt.

        Raises:
            TailRefusedError: the ids cannot be proven.
        """
        try:
            shape, found = self._shape(request), None
            proofs = shape.proofs
            if not shape.method or shape.refusal(request):
                async with shape.lock:  # thousands of rollouts begin in the same way: one proves the shape, the others wait
                    if not shape.method or shape.refusal(request):
                        found = await self._first(request, shape, waited=shape.proofs != proofs)
            found = found if found is not None else await self._again(request, shape)
            if request.words:
                await self._check_words(request, found)
        except (BoundaryUnknownError, RenderError) as why:
            raise as_refusal(why) from why
        return found

    async def _check_words(self, request: TailRequest, tail: bytes) -> None:
        """Check that a tail begins with the words of the client, whatever precedes them, and that a stop id follows."""
        mark = (await self.template.boundary(request)).mark
        end = self.template.turn_end(tail)
        text = await self._read(request, mark + ids.head(tail, end))
        if not end or text.partition(SENTINEL)[2].rstrip(BLANK) != request.words.rstrip(BLANK):
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)

    def _shape(self, request: TailRequest) -> Shape:
        key = (*shape_of(request), len(self.template.stop_ids))
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = Shape(key)
        else:
            self._shapes.move_to_end(key)
        return shape

    async def _first(self, request: TailRequest, shape: Shape, *, waited: bool) -> bytes:
        """Prove a shape. After a refusal, only every 8th call tries again."""
        refusal = shape.refusal(request, everyone=True)
        if refusal is not None:
            refusal.asked += 0 if waited else 1
            if waited or refusal.asked % RETRY_EVERY:
                raise BoundaryUnknownError(refusal.reason)
        everyone = True
        try:
            boundary = await self.template.boundary(request)
            everyone = False
            confirms = shape.form in self._forms and refusal is None
            found = await (self._confirm(request, boundary) if confirms else self._prove(request, boundary))
            shape.generation_prompt = await self._generation_prompt(request, boundary, found)
        except (BoundaryUnknownError, TemplateRefusedError) as why:
            if isinstance(why, TemplateRefusedError) and FIRST_MEDIA in request.conversation.first_places:
                raise  # perhaps because of one image that the engine cannot load: the next may be valid
            shape.refuse(request, reason_of(why), everyone=everyone)
            level = logging.WARNING if everyone else logging.INFO  # a refusal of one conversation is not a fault of the template
            log.log(
                level, "session %s: no tail can be proven for %s; they are rendered as text: %s", request.session, shape, reason_of(why)
            )
            raise
        finally:
            shape.proofs += 1
        shape.proven(request, found.method)
        self._forms[shape.form] = True
        log.debug("session %s: proved the tail for %s; method: %s", request.session, shape, found.method)
        return found.tail

    async def _again(self, request: TailRequest, shape: Shape) -> bytes:
        """Find a tail of a proven shape by its method, or with a full rendering if the generation prompt is not the expected one."""
        shape.uses += 1
        recheck = shape.uses >= shape.trust * self._recheck_every
        shape.uses = 0 if recheck else shape.uses  # so that only one of many concurrent calls checks
        try:
            boundary = await self.template.boundary(request)
            tail = await self._local_tail(request, boundary) if shape.method == "local" else None
            if not tail and shape.method != "full":
                method = "small" if shape.method == "local" else shape.method
                tail = self._tail_in(await self.template.small(request, boundary, method), boundary)
            expected = shape.generation_prompt
            if not tail or not tail.endswith(expected) or not request.reply_follows(expected):
                tail = await self._full_tail(request, boundary)  # correct by construction
            if recheck:
                await self._recheck(request, boundary, tail, shape.method)
                shape.trust = min(2 * shape.trust, MOST_TRUST)
            elif request.at > DEEPER * shape.deepest and shape.method != "full":
                shape.deepest = request.at
                _check_same_tail(tail, await self._full_tail(request, boundary))
        except BoundaryUnknownError as why:
            log.error("session %s: a proven tail has changed (%s); it must be proven again for %s", request.session, why, shape)  # noqa: TRY400
            shape.forget()
            self.template.forget_boundaries()
            raise
        return tail

    async def _recheck(self, request: TailRequest, boundary: Boundary, tail: bytes, method: str) -> None:
        """Prove a shape again, and compare the result with the tail that its method gave."""
        found = await self._prove(request, boundary)
        if found.tail != tail and method == "local":
            log.error("the local tokenizer is no longer used: it gave other ids than the engine")
            self.template.local = None
            for shape in self._shapes.values():
                shape.method = "" if shape.method == "local" else shape.method
        _check_same_tail(found.tail, tail)
        if method not in {found.method, "local"}:  # the local tokenizer may have declined this one conversation
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)

    # proofs

    async def _prove(self, request: TailRequest, boundary: Boundary) -> _Proven:
        """Find a tail and prove it by the steps in the module's docstring."""
        real = await self.template.real(request, [request.at - 1])
        rendered = await self._full(request, boundary)
        tail = self._tail_in(rendered, boundary)
        if not real.endswith(tail) and not await self._is_end_with_words(request, tail, real):
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
        other = msgspec.structs.replace(request, raw=[*request.raw[: request.at], *map(reworded, request.raw_new)])
        if boundary.until(await self._full(other, boundary)) != rendered.removesuffix(tail):
            raise BoundaryUnknownError(Reason.NEW_MESSAGES_REACH_BACK)
        await self._prove_past(request, boundary, real)
        return await self._method(request, boundary, tail)

    async def _confirm(self, request: TailRequest, boundary: Boundary) -> _Proven:
        """Find a tail of a form that was proven in another context, and the method that finds it in this one."""
        rendered = await self._full(request, boundary)
        tail = self._tail_in(rendered, boundary)
        await self._prove_past(request, boundary, rendered)
        return await self._method(request, boundary, tail)

    async def _prove_past(self, request: TailRequest, boundary: Boundary, rendered: bytes) -> None:
        """Prove that the messages before the model's first reply, and those directly before its last reply, are rendered as before."""
        if not request.lead:
            return
        check_same_past(await self.template.render("full", request, request.raw[: request.lead], generation=False), rendered)
        last = max((i for i in range(request.lead, request.at - 1) if request.conversation.messages[i].role == "assistant"), default=None)
        if last is None:
            return
        other = await self.template.boundary(request, request.conversation.messages[last])
        marked = {last: other, request.at - 1: boundary}
        then, now = [other.split(await self.template.full(request, marked, end=end, generation=False))[1] for end in (request.at - 1, None)]
        check_same_past(then, now)

    async def _method(self, request: TailRequest, boundary: Boundary, tail: bytes) -> _Proven:
        """Choose the cheapest method that gives this tail, and shows a generation prompt that can be compared."""
        found = await self._cheapest(request, boundary, tail)
        if request.new and request.new[-1].role == "assistant" and not await self._generation_prompt(request, boundary, found):
            return _Proven(tail, "full", b"")  # the template opens the last message with the generation prompt
        return found

    async def _cheapest(self, request: TailRequest, boundary: Boundary, tail: bytes) -> _Proven:
        if counted_twice(request) and not await self._ignores_call_ids(request, boundary, tail):
            return _Proven(tail, "full", b"")  # the template searches all calls for the call of each result
        local = await self._local_tail(request, boundary)
        if local == tail:
            return _Proven(tail, "local", await self.template.small(request, boundary, "local"))
        for method in ("small", "context") if request.systems or request.args.tools is not None else ("small",):
            try:
                rendered = await self.template.small(request, boundary, method)
                small = boundary.after(rendered)
            except (BoundaryUnknownError, TemplateRefusedError):
                continue  # a template may refuse such a small conversation
            if small == tail:
                if local is not None and not self._warned:
                    self._warned = True
                    log.warning("the local tokenizer gives other ids than the engine for some conversations: the engine renders those")
                return _Proven(tail, method, rendered)
        return _Proven(tail, "full", b"")

    async def _ignores_call_ids(self, request: TailRequest, boundary: Boundary, tail: bytes) -> bool:
        """Whether the tail stays the same if the reply's calls and their results get ids that no other call has."""
        names = other_call_ids(request.reply)
        reply = stand_in(with_call_ids(request.reply, names), SENTINEL, boundary.place)
        messages = [*request.raw[: request.at - 1], reply, *(answering(raw, names) for raw in request.raw_new)]
        try:
            return boundary.after(await self.template.render("full", request, messages)) == tail
        except (BoundaryUnknownError, TemplateRefusedError):
            return False

    async def _generation_prompt(self, request: TailRequest, boundary: Boundary, found: _Proven) -> bytes:
        """Find the generation prompt with which the small conversations of a shape end."""
        if found.method == "full":
            return b""
        without = await self.template.small(request, boundary, found.method, generation=False)
        return self.template.generation_prompt(found.small, without, last=request.conversation.messages[-1].role)

    async def _is_end_with_words(self, request: TailRequest, tail: bytes, real: bytes) -> bool:
        """Whether a rendering ends with a tail that begins with words of the client: with their text, and with the ids after them."""
        end = self.template.turn_end(tail)
        if not request.words or not end or not real.endswith(ids.tail(tail, end)):
            return False
        before = real[: len(real) - len(ids.tail(tail, end))]
        return (await self._read(request, before)).endswith(await self._read(request, ids.head(tail, end)))

    # renderings

    async def _read(self, request: TailRequest, packed: bytes) -> str:
        return await self.template.renderer.read(request.model, packed)

    def _tail_in(self, rendered: bytes, boundary: Boundary) -> bytes:
        return self.template.check_tail(boundary.after(rendered), boundary)

    async def _full(self, request: TailRequest, boundary: Boundary) -> bytes:
        return await self.template.full(request, {request.at - 1: boundary})

    async def _full_tail(self, request: TailRequest, boundary: Boundary) -> bytes:
        return self._tail_in(await self._full(request, boundary), boundary)

    async def _local_tail(self, request: TailRequest, boundary: Boundary) -> bytes | None:
        """Return the local tokenizer's tail; `None` if it declines this conversation, `b""` if its rendering does not show the tail."""
        if self.template.local is None:
            return None
        try:
            return boundary.after(await self.template.small(request, boundary, "local"))
        except TemplateRefusedError:
            return None
        except BoundaryUnknownError:
            return b""


def _check_same_tail(one: bytes, other: bytes) -> None:
    if one != other:
        raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
