"""Sends a recorded reply again to a retry, and decides which requests receive one.

The reply is made from the recorded turns: the text, the tool calls with their ids, the finish reason, and the original handle. So the echo
of the replayed reply leads to the same turn. Log probabilities, the token ids as the engine wrote them, and other extras are not recorded
in that form and cannot be sent again. A request for them is sampled again. So is a request that continues a reply: its turn has the whole
reply, not the part that was served.

A marked retry receives the recorded reply every time. Any other request receives it once, and only if no client has received it yet.
Otherwise the request is sampled again: the new turn is a sibling of the first, with the mark `second-sample`.
"""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from tokencache.core.turn import Turn, TurnMark
from tokencache.dialects.chat.reply import WrittenChoice, WrittenReply
from tokencache.dialects.json_io import member
from tokencache.engine.reply import Reply
from tokencache.proxy.call import undelivered
from tokencache.proxy.dedup.fingerprint import Fingerprint, Policy
from tokencache.proxy.engine_sender import with_request_id
from tokencache.proxy.response import REQUEST_ID, Response
from tokencache.store.base import Store, StoreError

_NOT_WHOLE = frozenset({
    TurnMark.ABORTED, TurnMark.UPSTREAM_BROKE, TurnMark.ENGINE_ABORTED, TurnMark.ENGINE_ERROR, TurnMark.UNCERTAIN,
})  # fmt: skip


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


async def is_due(store: Store, policy: Policy, session: str, fingerprint: Fingerprint, turns: Sequence[Turn]) -> bool:
    """Decide whether a request may receive the recorded reply `turns`: if it is not marked, only if it can `claim` the reply."""
    if not fingerprint.marked:
        return policy == "join"
    try:
        (later,) = await store.documents(session, [refused_second_sample(fingerprint.digest)])
    except StoreError:
        return False
    return later != turns[0].call.encode()


async def claim(store: Store, session: str, turns: Sequence[Turn]) -> bool | None:
    """Claim a reply that no client has received; false if a client has received or claimed it, `None` if the store failed."""
    if TurnMark.UNANSWERED not in turns[0].marks:
        return False
    try:
        return await store.delete_document(session, undelivered(turns[0].call))
    except StoreError:
        return None


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
