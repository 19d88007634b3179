"""The turns of a call follow from its facts alone. If none can be made, the client gets its reply, and the session is not complete."""

import json

from tests.proxy.kit import user
from tests.support.reading import at_once, read_chat
from tokencache.core import ids
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

EVENTS = [  # the engine counts 2 tokens after the second event, and has reported 3 ids
    {"choices": [{"delta": {"content": "A"}, "token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}}], "prompt_token_ids": [1, 2]},
    {
        "choices": [{"delta": {"content": " cat."}, "token_ids": [6, 7], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0.0}]}}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2},
    },
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
]


def test_the_same_facts_give_the_same_turns():
    """Also of a reply of which not all ids are recorded: the store may ask for the turns again (`TurnLostError`)."""
    chat = read_chat(json.dumps({"model": "m", "stream": True, "messages": [user("look")]}).encode(), IncrementalParser())
    reply = Reply()
    for event in EVENTS:
        reply.add(json.dumps(event).encode())
    facts = CallFacts(
        call=BegunCall(id="c", session="s", chat=chat, started=0.0),
        epoch="e",
        planned=PlannedCall(engine=None, model=None, plan=Plan(match="root"), weights=VersionReading(UNREPORTED, NO_SALT)),
        reply=reply,
        judged=judge_reply(reply),
        ended=1.0,
    )
    first, again = (at_once(turns_of(facts, PrefixCache(MemoryStore(), max_bytes=1000))) for _ in range(2))
    assert (again.entries, again.incidents) == (first.entries, first.incidents)
    (entry,) = first.entries
    assert (entry.turn.marks, ids.unpack(entry.tokens.completion), entry.turn.seconds) == (("uncertain",), [5], 1.0)
    assert [incident.kind for incident in first.incidents] == ["inconsistent-reply"]


async def test_a_call_of_which_no_turn_can_be_made_is_a_hole(rig, monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("a bug")

    asked = [user("EPISODE:talk")]
    with monkeypatch.context() as broken:
        broken.setattr("tokencache.proxy.call.turns_of", fails)
        assert (await rig.say("s", asked))["content"]
    session = await rig.info()
    assert (session["complete"], session["turns"], session["open_calls"]) == (False, 0, [])
    assert [incident["kind"] for incident in session["incidents"]] == ["internal-error"]
    await rig.say("s", asked)
    assert len(await rig.turns()) == 1
