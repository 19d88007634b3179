"""Again: a recorded reply is said once more, to a call that asks for the same.

What the harness hears is made of the turns: the words, the calls with their ids, how it ended, and the handle that was given out the first
time, so that whatever it echoes leads to the same turn. Not kept, and so not said again, are the log probabilities, the token ids
as the engine wrote them, and what else a request may ask for beside the words: a call that wants those is sampled anew.
"""

from collections.abc import Sequence

from aiohttp import web

from tokencache.core.turn import Turn
from tokencache.dialects.body import member
from tokencache.dialects.chat.call import ChatCall
from tokencache.dialects.chat.whole import WholeChoice, whole_reply
from tokencache.dialects.completions import whole_text
from tokencache.engine.reply import Reply
from tokencache.proxy.delivery import Delivery
from tokencache.proxy.engine_retry import Hold
from tokencache.proxy.exchange import REQUEST_ID, Exchange, request_id
from tokencache.proxy.recorder import ABORTED, BROKE, DROPPED

_NOT_WHOLE = frozenset({ABORTED, BROKE, DROPPED, "engine-error"})
_NOT_KEPT = ("prompt_logprobs", "echo", "return_weight_versions", "return_prompt_text")
_NOT_ASKED = frozenset({b"null", b"false"})


def can_be_said(call: ChatCall, exchange: Exchange) -> bool:
    """Whether all that a call asks for is kept of its reply."""
    more = any(bytes(call.fields[name]) not in _NOT_ASKED for name in _NOT_KEPT if name in call.fields)
    return not (call.shows_ids or call.shows_logprobs or exchange.token_ids or more)


def whole(turns: Sequence[Turn], choices: int) -> tuple[Turn, ...]:
    """The reply of the last call among these turns, choice by choice; empty if it was not whole."""
    reply = tuple(sorted((turn for turn in turns if turn.call == turns[-1].call), key=lambda turn: turn.choice))
    sound = all(turn.finish_reason and _NOT_WHOLE.isdisjoint(turn.marks) for turn in reply)
    return reply if sound and len(reply) == choices else ()


async def say_again(request: web.Request, call: ChatCall, exchange: Exchange, hold: Hold, turns: Sequence[Turn]) -> web.StreamResponse:
    """Say a whole reply once more, in the form that was asked for; `turns` are its choices."""
    first = turns[0]
    if exchange.speaks_as is not None:
        exchange = exchange._replace(speaker=await exchange.speaks_as(first.handle))
    per_prompt = max(1, member(call.fields, "n", (int,), 1))
    prompt = sum(turn.prompt_tokens for turn in turns if turn.choice % per_prompt == 0)  # a text completion may have several
    write = whole_text if call.dialect == "completions" else whole_reply
    body = write(
        call=request_id(exchange.headers, first.call, 1)[REQUEST_ID],
        created=first.created,
        model=first.model,
        choices=[WholeChoice(turn.choice, turn.served, turn.finish_reason, turn.stop_reason) for turn in turns],
        prompt_tokens=prompt,
        completion_tokens=sum(turn.completion_tokens for turn in turns),
    )
    return await Delivery(request, call, exchange, Reply(call.n), hold).say(body, first.prompt_tokens)
