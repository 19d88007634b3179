"""Finds the text that a reply's ids have after the text that was served.

A reply that ended at a stop string has its ids, and what the last token has beyond it, but the client was not served their text. Where the
served text ends in the decoded ids shows what follows it. The engine's own `/detokenize` decodes, so the proof uses no other tokenizer.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from tokencache.core import ids
from tokencache.core.added_text import AddedText, stop_string
from tokencache.core.messages import BLANK
from tokencache.core.splice import without_stop_id
from tokencache.core.turn import Turn
from tokencache.proxy.plan import PlanningContext


async def words_after(context: PlanningContext, added: AddedText) -> str | None:
    """Return the words that a client added to a reply after the text of its ids.

    `None` if it is not proven where they begin, or if the engine adds the tail itself: after the end of the message, without them.

    Raises:
        RenderError: the engine cannot decode its ids.
    """
    sampled = await sampled_after(context, added.turn)
    words = added.words_after(sampled) if sampled is not None else None
    return None if words and context.model.driver.adds_tail else words


async def sampled_after(context: PlanningContext, turn: Turn) -> str | None:
    """Return the text that a recorded reply's ids have after the text that was served; `None` if that is not certain.

    Raises:
        RenderError: the engine cannot decode its ids.
    """
    model = context.model
    if not model.capability.tokenizes:
        return None
    prefix = (await context.prefixes.get(context.session, turn.id)).prefix
    body = without_stop_id(ids.tail(prefix.ids, turn.prompt_tokens), model.stop_ids)
    read = partial(model.renderer.read, context.call.model)
    return await text_after(turn.served_text, stop_string(turn.stop_reason), body, read, thought=(turn.served.reasoning or "").strip(BLANK))


async def text_after(served: str, stop: str, body: bytes, read: Callable[[bytes], Awaitable[str]], *, thought: str = "") -> str | None:
    """Return the text that a reply's ids have after the served text; `None` if that is not certain.

    Without a stop string, the decoded ids must end with the served text. With one, the served text and the stop string must follow each
    other directly, and the last token must complete the stop string. After the thinking, the served text must not be there before: a call
    that was cut off, of which nothing was served, may end like it ("OK" and a call of "LOOK").

    Args:
        served: the served text, as it was sent.
        stop: the stop string that ended the reply; `""` if none did.
        body: the packed ids of the reply, without a stop id at their end.
        read: decodes packed ids to text.
        thought: the reasoning that was served in a member of its own.

    Raises:
        RenderError: the engine cannot decode its ids.
    """
    whole = await read(body) if body else ""
    first_end = whole.find(served, whole.find(thought) + len(thought) if thought in whole else 0) + len(served)
    if not stop:
        return "" if whole.endswith(served) and (first_end == len(whole) or not served) else None
    before = (await read(ids.head(body, ids.count(body) - 1))).rstrip("\ufffd") if ids.count(body) > 1 else ""  # an incomplete character
    if not whole.startswith(before):
        return None
    ends = range(max(len(before) + 1, len(served) + len(stop)), len(whole) + 1)
    found = [end - len(stop) for end in ends if whole.endswith(served + stop, 0, end)]
    return whole[found[0] :] if len(found) == 1 and (first_end == found[0] or not served) else None
