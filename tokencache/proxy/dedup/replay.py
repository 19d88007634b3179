"""Sends a recorded reply again to a retry, and decides which requests receive one.

The reply is made from the recorded turns: the text, the tool calls with their ids, the finish reason, and the original handle. So the echo
of the replayed reply leads to the same turn. Log probabilities, the token ids as the engine wrote them, and other extras are not recorded
in that form and cannot be sent again. A request for them is sampled again. So is a request that continues a reply: its turn has the whole
reply, not the part that was served.

A marked retry receives the recorded reply every time. Any other request receives it once, and only if no client has received it yet.
Otherwise the request is sampled again: the new turn is a sibling of the first, with the mark `second-sample`.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec
from aiohttp import web

from tokencache.core.turn import BROKEN_OFF, Turn, TurnMark
from tokencache.dialects.chat.reply import WrittenChoice, WrittenReply
from tokencache.dialects.json_io import member
from tokencache.engine.reply import Reply
from tokencache.proxy.call import undelivered
from tokencache.proxy.dedup.fingerprint import Fingerprint, Policy
from tokencache.proxy.engine_sender import with_request_id
from tokencache.proxy.response import REQUEST_ID, Response
from tokencache.store.base import Store, StoreError

_NOT_WHOLE = BROKEN_OFF | {TurnMark.UNCERTAIN}


def whole_reply_of(turns: Sequence[Turn], choices: int) -> tuple[Turn, ...]:
    """Return the turns of the last call among these, one per choice; empty if its reply is incomplete."""
    if not turns:
        return ()
    reply = tuple(sorted((turn for turn in turns if turn.call == turns[-1].call), key=lambda turn: turn.choice))
    sound = all(turn.finish_reason and not turn.begun and _NOT_WHOLE.isdisjoint(turn.marks) for turn in reply)
    return reply if sound and len(reply) == choices else ()


def refused_second_sample(fingerprint: bytes) -> str:
    """Return the name of a document. It holds the id of an earlier call; retries of a later call without a turn must not get its reply."""
    return f"passed-over:{fingerprint.hex()}"


class Claim(Enum):
    """Whether a request may receive a recorded reply."""

    OURS = "no client has received it, and now this one is the only one that may"
    RECEIVED = "a client has received it, or may"
    UNKNOWN = "the store failed: it may be ours"
    NOT_DUE = "the request must not receive it"


async def claim_due(store: Store, policy: Policy, session: str, fingerprint: Fingerprint, turns: Sequence[Turn]) -> Claim:
    """Claim the recorded reply `turns` for a request, if it may receive it."""
    if not fingerprint.marked:
        return await claim(store, session, turns) if policy == "join" else Claim.NOT_DUE
    try:
        (later,) = await store.documents(session, [refused_second_sample(fingerprint.digest)])
    except StoreError:
        return Claim.NOT_DUE
    return await claim(store, session, turns) if later != turns[0].call.encode() else Claim.NOT_DUE


async def claim(store: Store, session: str, turns: Sequence[Turn]) -> Claim:
    """Claim a recorded reply."""
    try:
        return Claim.OURS if await store.delete_document(session, undelivered(turns[0].call)) else Claim.RECEIVED
    except StoreError:
        return Claim.UNKNOWN


async def was_received(store: Store, session: str, turns: Sequence[Turn]) -> bool:
    """Whether a client has received the whole reply of one of the calls with these turns, or may. If the store fails, none has."""
    calls = {turn.call for turn in turns if turn.finish_reason and BROKEN_OFF.isdisjoint(turn.marks)}
    try:
        return None in await store.documents(session, [*map(undelivered, calls)])
    except StoreError:
        return False


async def send_again(response: Response, turns: Sequence[Turn]) -> web.StreamResponse:
    """Send a recorded reply in the form that the client requested; `turns` are its choices."""
    first, chat, exchange = turns[0], response.chat, response.exchange
    assert response.encoder_for is not None  # noqa: S101 - nothing was sent, so the body was not released
    response.exchange = msgspec.structs.replace(exchange, encoder=await response.encoder_for(first.handle))
    per_prompt = max(1, member(chat.fields, "n", (int,), 1))
    prompt = sum(turn.prompt_tokens for turn in turns if turn.choice % per_prompt == 0)  # a text completion may have several prompts
    reply = WrittenReply(
        call=with_request_id(exchange.headers, first.call)[REQUEST_ID],
        created=first.created,
        model=first.model,
        choices=[WrittenChoice(turn.choice, turn.served, turn.engine_reason or turn.finish_reason, turn.stop_reason) for turn in turns],
        prompt_tokens=prompt,
        completion_tokens=sum(turn.completion_tokens for turn in turns),
    )
    return await response.send(exchange.dialect.completion(reply), Reply(chat.n), first.prompt_tokens)
