"""Echoes: token ids that came back with a history (`dialects.gym`), held against what was recorded.

The record is the truth, and what comes back is never used. But who sends back other ids than it was given will hand other ids
to its trainer, too, and so it is noted: `echo-differs`, with the places of the messages.

In a line of turns each turn's ids are a beginning of the next turn's prompt. So what came back is compared, as text, with the
prefix that the call continues, which is at hand; only what is no beginning of it is looked up among the session's turns.
"""

import logging

from tokencache.core import ids
from tokencache.core.canonical import digest
from tokencache.core.turn import Prefix, Turn, hash_ids
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.gym import Echo
from tokencache.engines.echoed import read_ids
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Plan
from tokencache.store.contract import StoreError

log = logging.getLogger(__name__)

DIFFERS = "echo-differs"
_SHOWN = 8


async def differing(session: str, call: ChatCall, plan: Plan, ledger: Ledger) -> str:
    """Say which messages of a call came back with other ids than were recorded for them; `""` if none, or if that cannot be told."""
    echoes = {place: echo for place, echo in call.echoes.items() if call.messages and call.messages[place].role == "assistant"}
    if not echoes or call.conversation is None:
        return ""
    try:
        if plan.parent is not None and plan.heard:
            held = await ledger.prefixes.get(session, plan.parent)
            fragment = b"".join(held.fragment)
            echoes = {place: echo for place, echo in echoes.items() if not _agrees(fragment, held.prefix, echo, last=place == plan.heard)}
        known = await ledger.store.turns(session) if echoes else []
    except (StoreError, KeyError, ValueError) as why:
        log.debug("session %s: what came back is not compared: %s", session, why)
        return ""
    wrong = [place for place, echo in echoes.items() if not _recorded(echo, call.conversation.digests[place], known)]
    if not wrong:
        return ""
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f"messages {', '.join(map(str, wrong[:_SHOWN]))}{more}: other token ids came back than were recorded; they are not used"


def _agrees(fragment: bytes, prefix: Prefix, echo: Echo, *, last: bool) -> bool:
    """Whether a prefix begins with what came back; with the `last` reply, whether it is all of it, parted in the same place."""
    if not last:  # where it is parted was looked at when it was the last
        return fragment.startswith(echo.whole + b",")
    generated = echo.generation.count(b",") + 1 if echo.generation else 0
    return fragment == echo.whole and generated == prefix.completion


def _recorded(echo: Echo, words: bytes, known: list[Turn]) -> bool:
    """Whether one of these turns said these words with these ids."""
    prompt, generation = read_ids(b"[%s]" % echo.prompt), read_ids(b"[%s]" % echo.generation)
    if prompt is None or generation is None or not ids.count(prompt):
        return False
    whole, own = hash_ids(prompt + generation), hash_ids(generation)
    return any(turn.prefix_hash == whole and turn.completion_hash == own and digest(turn.served) == words for turn in known)
