"""Echoes: token ids that came back with a history (`dialects.gym`), held against what was recorded.

The record is the truth. But who sends back other ids than it was given will hand other ids to its trainer, too, and who sends back ids
that are not recorded here trains on a turn that this session lacks. So both are noted, with the places of the messages:

`echo-differs`      the words of a recorded turn came back with other ids, or its ids with other words; the ids are not used
`echo-unrecorded`   no recorded turn said these words with these ids: the store was restarted, or another proxy recorded the turn

In a line of turns each turn's ids are a beginning of the next turn's prompt. So what came back is compared, as text, with the
prefix that the call continues, which is at hand; only what is no beginning of it is looked up among the session's turns.
"""

import logging
from collections.abc import Sequence

from tokencache.core.incidents import IncidentKind
from tokencache.core.messages import digest
from tokencache.core.turn import Turn
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.gym import ReturnedIdFragments
from tokencache.proxy.client_ids import hashed, is_prefix, read_echo
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Plan
from tokencache.store.base import StoreError

log = logging.getLogger(__name__)

_SHOWN = 8


async def compared(session: str, call: ChatCall, plan: Plan, ledger: Ledger) -> list[tuple[IncidentKind, str]]:
    """Say what is wrong with the ids that came back with a call, as kinds of incidents and details; nothing if that cannot be told."""
    echoes = {place: echo for place, echo in call.echoes.items() if call.messages and call.messages[place].role == "assistant"}
    if not echoes or call.conversation is None:
        return []
    try:
        if plan.parent is not None and plan.heard:
            held = await ledger.prefixes.get(session, plan.parent)
            beginning = b"".join(held.fragment)
            # Where an older reply is parted was looked at when it was the last.
            echoes = {
                place: echo
                for place, echo in echoes.items()
                if not (is_prefix(echo, held) if place == plan.heard else beginning.startswith(echo.whole + b","))
            }
        known = await ledger.store.turns(session) if echoes else []
    except (StoreError, KeyError, ValueError) as why:
        log.debug("session %s: what came back is not compared: %s", session, why)
        return []
    digests = call.conversation.digests
    turns = {place: _turns_of(echo, known) for place, echo in echoes.items()}
    wrong = [place for place, found in turns.items() if digests[place] not in {digest(turn.served) for turn in found}]
    said = {digest(turn.served) for turn in known}
    differs = [place for place in wrong if (digests[place] in said or turns[place]) and place not in plan.client]
    unrecorded = [place for place in wrong if place not in differs]
    found = []
    if differs:
        detail = f"{_listed(differs)}: these words and these token ids were not recorded together; the ids are not used"
        found.append((IncidentKind.ECHO_DIFFERS, detail))
    if unrecorded:
        used = "the prompt begins with them" if plan.client else "they are not used"
        words = "token ids came back that are not recorded here (the store was restarted, or another proxy recorded them)"
        found.append((IncidentKind.ECHO_UNRECORDED, f"{_listed(unrecorded)}: {words}; {used}"))
    return found


def _listed(places: Sequence[int]) -> str:
    more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return f"messages {', '.join(map(str, places[:_SHOWN]))}{more}"


def _turns_of(echo: ReturnedIdFragments, known: list[Turn]) -> list[Turn]:
    """The turns that were recorded with these ids."""
    read = read_echo(echo)
    if read is None:
        return []
    named = hashed(*read)
    return [turn for turn in known if named.names(turn)]
