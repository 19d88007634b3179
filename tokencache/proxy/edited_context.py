"""Finds the prompt that a recorded turn would have had if messages before its reply were others.

The engine renders the edited messages, and every sampled reply that was in the recorded prompt keeps its exact ids there: a resplice
(`proxy.resplice`). The same is done first without the edit. Only if that gives the recorded prompt, token for token, does the rendering
prove anything about the edited one. What cannot be proven is refused.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.context import Context
from tokencache.core.context_edits import Edit, EditRefusal, edit_messages
from tokencache.core.evidence import PlacedReply
from tokencache.core.reasons import Reason
from tokencache.core.rules import ToolNames
from tokencache.core.session import History
from tokencache.core.turn import Turn, TurnMark
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.request import read_chat
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.engine.model import Model
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError, HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles
from tokencache.proxy.plan import PlanningContext
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.resplice import Resplice
from tokencache.store.base import SessionInfo, Store

_MEANINGS = {f"{reason}": reason.meaning for reason in Reason}
_CACHED_BYTES = 64 * 2**20
"""Prefixes that are kept: an own cache, so that those of calls in progress stay in theirs."""


class EditRefusedError(Exception):
    """A turn has no prompt under the edits: `kind`, with further words in `detail`."""

    def __init__(self, kind: EditRefusal, detail: str = "") -> None:
        super().__init__(f"{kind.meaning} ({detail})" if detail else kind.meaning)
        self.kind = kind


class RecordedTurn(NamedTuple):
    """A turn of a session, and its whole request; `None` if that is not kept."""

    session: SessionInfo
    turn: Turn
    context: Context | None


class EditedPrompt(NamedTuple):
    """A prompt (packed ids), and the indexes of the edits that changed it."""

    ids: bytes
    edits: list[int]


class EditedContexts:
    """Finds prompts under edits.

    Args:
        store: the store.
        parser: parses requests.
        profiles: the rules of harnesses.
        history: what prompts keep of earlier replies, in sessions that do not choose.
    """

    def __init__(self, store: Store, parser: IncrementalParser, profiles: HarnessProfiles, history: History) -> None:
        self._store = store
        self._parser = parser
        self._profiles = profiles
        self._history = history
        self._prefixes = PrefixCache(store, max_bytes=_CACHED_BYTES)

    async def prompt(self, asked: RecordedTurn, edits: Sequence[Edit], model: Model) -> EditedPrompt:
        """Return the prompt of a turn under edits, which `check_edits` accepted; the recorded one if no edit has a place in it.

        `model` is the turn's.

        Raises:
            EditRefusedError: the prompt is not proven.
            HarnessError: two edits replace the same message.
            EngineError: the engine cannot answer now.
            StoreError: the store failed.
        """
        turn = asked.turn
        try:
            recorded = (await self._prefixes.get(asked.session.id, turn.id)).prefix.prompt
        except (KeyError, ValueError):
            raise EditRefusedError(EditRefusal.TORN_RECORD) from None
        if all(edit.place(turn.messages) is None for edit in edits):
            return EditedPrompt(recorded, [])
        if TurnMark.MEDIA in turn.marks or turn.media:
            raise EditRefusedError(EditRefusal.MEDIA)
        if turn.begun:
            raise EditRefusedError(EditRefusal.REPLY_IN_PARTS)
        if turn.reason == Reason.CLIENT_IDS:
            raise EditRefusedError(EditRefusal.UNPROVEN, Reason.CLIENT_IDS.meaning)
        if asked.context is None or len(asked.context.messages) != turn.messages:
            raise EditRefusedError(EditRefusal.NOT_KEPT)
        try:
            return await self._edited(asked, asked.context, edits, model, recorded)
        except TemplateRefusedError as why:
            raise EditRefusedError(EditRefusal.TEMPLATE_REFUSES, str(why)) from None
        except RenderError as why:
            raise EngineError("the engine cannot render this", private=str(why)) from why

    async def _edited(self, asked: RecordedTurn, context: Context, edits: Sequence[Edit], model: Model, recorded: bytes) -> EditedPrompt:
        try:
            edited = edit_messages(edits, context.messages)
        except ValueError as why:
            raise HarnessError(str(why), status=HTTPStatus.UNPROCESSABLE_ENTITY, param="edits") from None
        before = await self._planning(asked, context, model)
        after = await self._planning(asked, msgspec.structs.replace(context, messages=edited.messages), model)
        if blocked := await before.blocked() or ("" if model.capability.tokenizes else Reason.NO_RENDERING):
            raise EditRefusedError(EditRefusal.NO_PROOF, _MEANINGS[blocked])
        try:
            replies = await before.placed_replies(asked.turn)
            if any(edited.places[reply.place] < 0 for reply in replies):
                raise EditRefusedError(EditRefusal.SAMPLED_REPLY)
            if await _prompt(before, replies) != recorded:
                raise EditRefusedError(EditRefusal.RENDERED_OTHERWISE)
            moved = [msgspec.structs.replace(reply, place=edited.places[reply.place]) for reply in replies]
            prompt = await _prompt(after, moved)
            generation_prompts = [await _generation_prompt(one) for one in (before, after)]
        except TailRefusedError as why:
            raise _unproven(why) from why
        if prompt is None:
            raise EditRefusedError(EditRefusal.REPLY_CHANGES)
        if generation_prompts[0] != generation_prompts[1] or not prompt.endswith(generation_prompts[0]):
            raise EditRefusedError(EditRefusal.PROMPT_CHANGES)
        return EditedPrompt(prompt, edited.edits)

    async def _planning(self, asked: RecordedTurn, context: Context, model: Model) -> PlanningContext:
        """Read the turn's request, with the messages of `context`, as if it came now."""
        session, turn = asked.session, asked.turn
        body = {"model": turn.model, "messages": context.messages, "chat_template_kwargs": context.kwargs, **context.members}
        if context.tools is not None:
            body["tools"] = context.tools
        call = await read_chat(msgspec.json.encode(body), self._parser)
        if call.plain or call.conversation is None:
            raise EditRefusedError(EditRefusal.NO_PROOF, _MEANINGS[call.plain])
        call.leniency = msgspec.structs.replace(self._profiles.leniency(turn.harness), tools=ToolNames(context.tools))
        call.history = session.settings.history or self._history
        return PlanningContext(self._store, self._prefixes, session.id, call, call.conversation, model)


def check_edits(edits: Sequence[Edit], counts: Sequence[int]) -> None:
    """Check edits for turns with so many messages each.

    Raises:
        HarnessError: a message cannot be read or has media, or no turn has the place of an edit. The message names the member.
    """
    for n, edit in enumerate(edits):
        what = "insert" if edit.insert else "replace"
        for i, message in enumerate(edit.insert or edit.replace):
            where = f"edits[{n}].{what}[{i}]"
            try:
                read = read_message(message)
            except (ValueError, RecursionError) as why:
                raise _invalid(where, f"is no message of chat completions: {why}") from None
            if read.media:
                raise _invalid(where, "has parts that are not text; only text can be scored")
        if all(edit.place(count) is None for count in counts):
            raise _invalid(
                f"edits[{n}].at", f"is {edit.at}, and no chosen turn has that place: the longest has {max(counts, default=0)} messages"
            )


def _invalid(where: str, why: str) -> HarnessError:
    return HarnessError(f"`{where}` {why}", status=HTTPStatus.UNPROCESSABLE_ENTITY, param=where)


async def _prompt(planning: PlanningContext, replies: Sequence[PlacedReply]) -> bytes | None:
    """Render messages with the exact ids of these replies; `None` if the template shows another part of one.

    Raises:
        TailRefusedError: it is not proven where a reply is.
        RenderError: the messages cannot be rendered.
    """
    return await Resplice(planning).exact(replies) if replies else await _rendered(planning, generation=True)


async def _rendered(planning: PlanningContext, *, generation: bool) -> bytes:
    call = planning.call
    return await planning.model.renderer.render(call.model, call.safe_messages(), call.args, generation=generation)


async def _generation_prompt(planning: PlanningContext) -> bytes:
    """Return what the template writes after the last message only because a reply follows.

    Raises:
        RenderError: the messages cannot be rendered.
    """
    with_it, without = [await _rendered(planning, generation=generation) for generation in (True, False)]
    return ids.tail(with_it, ids.common_head(with_it, without))


def _unproven(why: TailRefusedError) -> Exception:
    """Return the error for a reply that was not placed."""
    reason = str(why)
    if reason == Reason.RENDER_ERROR:
        return EngineError("the engine cannot render this", private=str(why.__cause__))
    if reason == Reason.TEMPLATE_REFUSES:
        return EditRefusedError(EditRefusal.TEMPLATE_REFUSES)
    return EditRefusedError(EditRefusal.UNPROVEN, _MEANINGS[reason])
