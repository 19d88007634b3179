"""A turn's request is stored with it: complete, once, and in the format of chat completions."""

import hashlib
import json

import msgspec
import pytest

from tests.proxy.kit import CHAT, TOOLS, echo, proxied, results, user
from tests.support.reading import at_once, read_chat
from tokencache.core.context import unpack_context, whole_context
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.figures import judge_reply
from tokencache.engine.reply import Reply
from tokencache.proxy.facts import BegunCall, CallFacts, PlannedCall
from tokencache.proxy.kv_salt import NO_SALT
from tokencache.proxy.plan import Plan
from tokencache.proxy.policy_version import UNREPORTED, VersionReading
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.recorder import turns_of
from tokencache.store.memory import MemoryStore


async def contexts(store, session="s"):
    """The turns of a session, each with the whole of its messages and the number that was stored with it."""
    turns = await store.turns(session)
    packed = await store.contexts(session, [turn.id for turn in turns])
    lookup = {turn.id: turn for turn in turns}
    whole = [whole_context(turn.id, lookup, packed).messages for turn in turns]
    return [
        ([msgspec.json.decode(raw) for raw in messages], len(messages) - turn.context_shared)
        for turn, messages in zip(turns, whole, strict=True)
    ]


async def test_a_conversation_is_stored_once_and_read_complete():
    store, asked = MemoryStore(), []
    async with proxied(store=store) as rig:
        messages = [user("EPISODE:demo go")]
        for _ in range(3):
            asked.append(list(messages))
            said = await rig.say("s", messages, tools=TOOLS, chat_template_kwargs={"enable_thinking": True})
            messages += [echo(said), *(results(said) or [user("on")])]
    found = await contexts(store)
    assert [whole for whole, _ in found] == asked
    assert sum(kept for _, kept in found) == len(asked[-1])
    turns = await store.turns("s")
    packed = await store.contexts("s", [turn.id for turn in turns])
    first, later = unpack_context(packed[turns[0].id]), unpack_context(packed[turns[1].id], turns[0].served)
    assert json.loads(bytes(first.tools)) == TOOLS
    assert first.kwargs == {"enable_thinking": True}
    assert later.tools is None  # they are the first one's
    # The reply comes back in words that are known; 40 bytes each and what is new.
    assert len(packed[turns[1].id]) < len(json.dumps(asked[1][1:]).encode()) / 3


async def test_an_edited_history_shares_its_beginning():
    store = MemoryStore()
    async with proxied(store=store) as rig:
        messages = [user("EPISODE:talk go"), user("so"), user("and more")]
        said = await rig.say("s", messages)
        edited = [*messages, echo(said), user("next")]
        await rig.say("s", edited)
        await rig.say("s", [messages[0], user("something else"), *edited[2:], user("again")])
    found = await contexts(store)
    assert [kept for _, kept in found] == [3, 2, 5]
    assert found[2][0] == [messages[0], user("something else"), *edited[2:], user("again")]
    assert [turn.match for turn in await store.turns("s")] == ["root", "continue", "resplice"]


def test_of_images_only_references_are_stored_with_the_messages():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, picture]}]}
    call = read_chat(json.dumps(body).encode(), IncrementalParser())
    reply = Reply()
    choice = {"message": {"content": "A cat."}, "finish_reason": "stop", "token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}}
    reply.add(json.dumps({"choices": [choice], "prompt_token_ids": [1, 2]}).encode())
    planned = PlannedCall(engine=None, model=None, plan=Plan(match="plain", reason=call.plain), weights=VersionReading(UNREPORTED, NO_SALT))
    begun = BegunCall(id="c", session="s", chat=call, started=0.0)
    facts = CallFacts(call=begun, epoch="l", planned=planned, reply=reply, judged=judge_reply(reply), ended=1.0)
    recorded = at_once(turns_of(facts, PrefixCache(MemoryStore(), max_bytes=1000)))
    (entry,), (held,) = recorded.entries, recorded.prefixes
    assert entry.turn.marks == ("media",)
    assert entry.keys == ()  # the engine did not say where the image is, so no call continues from here
    (stored,) = unpack_context(entry.context).messages
    reference = "media:" + hashlib.sha256(b"\0\0\0").hexdigest()
    assert json.loads(bytes(stored))["content"][1] == {"type": "image_url", "image_url": {"url": reference}}
    assert held.chain == call.chain


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_context_is_dialect_neutral(path):
    store = MemoryStore()
    async with proxied(store=store) as rig:
        status, _ = await rig.post(
            "s", path, messages=[user("EPISODE:talk go")], max_tokens=50, **({} if path == CHAT else {"model": "sim"})
        )
    assert status == 200
    ((whole, _),) = await contexts(store)
    assert [one["role"] for one in whole] == ["user"]
    assert "EPISODE:talk go" in json.dumps(whole)
