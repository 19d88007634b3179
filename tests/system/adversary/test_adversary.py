"""The adversary finds nothing in the product, and finds each fault that is injected.

`python -m tests.system.adversary --turns 1000000 --processes 2` is the long run.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from tests.engine.template.more_kinds import ALL_KINDS
from tests.support.material import require
from tests.support.pairwise import some
from tests.support.redis_server import RealRedis, find_binary
from tests.system.adversary import dialects, stack
from tests.system.adversary.observed import NEVER, Entry, SampledTurn, Span, Tally
from tests.system.adversary.oracle import Oracle
from tests.system.adversary.run import CALLS, replay, run
from tests.system.adversary.stack import Stack
from tests.system.adversary.template_reading import ReplyOpening, reading_of
from tests.system.adversary.words import HARMLESS, arguments_of, bare, says, with_mended_names, without_repeated_calls, without_text
from tokencache.core import ids, match, verdict
from tokencache.core.messages import digest, split_think
from tokencache.core.rules import Leniency
from tokencache.dialects.chat import vocabulary
from tokencache.engine.drivers.base import LastReply
from tokencache.engine.model import Model
from tokencache.engine.template.edited import EditedHistories
from tokencache.engine.template.tails import Tails
from tokencache.engine.template.visible import ShownPart, VisibleReplies
from tokencache.proxy import client_ids, partial_reply, recorder, resplice
from tokencache.proxy import planner as planning
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.plan import Basis, Plan
from tokencache.proxy.recorder import Recorded, turns_of

FEW, SEED = 250, 11
USUAL = ("Qwen2.5",)
ASK = {"role": "user", "content": "Look."}
DRAWN_ID = "chatcmpl-tool-567dc421e65c3c45"
CALL = {"id": "functions.bash:0", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}


@pytest.mark.parametrize("turns", [FEW // 8, pytest.param(FEW, marks=pytest.mark.whole)])
@pytest.mark.parametrize("template", some(ALL_KINDS, 10))
def test_there_is_no_violation(template, turns):
    tally = run(turns, SEED, templates=[template])
    assert not tally.guilty, "\n".join([tally.table(), *tally.shown(3)])
    assert tally.counts["turns"] > turns / 2
    assert {"root", "continue", "branch", "resplice"} <= set(tally.matches)


@pytest.mark.parametrize("template", some(["Qwen3", "Qwen3.5 think", "GLM-4.5", "Nemotron-3", "Kimi-K2-Thinking", "EXAONE 4.0"], 2))
def test_there_is_no_violation_in_sessions_that_follow_the_template(template):
    tally = run(FEW // 2, SEED + 2, templates=[template], history="follow")
    assert not tally.guilty, "\n".join([tally.table(), *tally.shown(3)])
    assert tally.reasons["resplice: thinking-dropped"] > FEW / 20
    # a text that the harness trimmed may begin or end within a token, and a call may be written otherwise than it was sampled: that is text
    assert tally.counts["not placed"] + tally.counts["missed"] <= tally.counts["owed"] / 2


@pytest.mark.parametrize("turns", [FEW, pytest.param(4 * FEW, marks=pytest.mark.whole)])
def test_replies_that_can_be_identified_are_supplied(turns):
    tally = run(turns, SEED, templates=USUAL)
    assert tally.counts["owed"] > turns / 2
    assert tally.counts["missed"] <= tally.counts["owed"] / 200, "\n".join([tally.table(), *tally.shown(5, misses=True)])


@pytest.mark.redis
def test_a_run_with_redis_is_the_one_in_memory():
    require("redis-server", find_binary())
    with RealRedis() as server:
        with_redis = run(FEW // 4, SEED, templates=USUAL, redis=server.url)
    assert with_redis.table() == run(FEW // 4, SEED, templates=USUAL).table()
    assert with_redis.counts["turns"] > FEW / 8


def test_a_session_is_replayed_as_it_was():
    whole = run(3 * CALLS, SEED, templates=USUAL)
    last = replay(SEED, 2, USUAL)
    assert last.counts["calls"] == CALLS
    assert last.trace[0].startswith("call 1:")
    assert replay(SEED, 2, USUAL).trace == last.trace
    assert last.counts["owed"] <= whole.counts["owed"]


# --- the oracle finds injected faults -----------------------------------------------------------------------------------------------------


def finds(kind, templates=USUAL, history="supply", first=0):
    """Whether the adversary finds a violation of this kind in the changed product; `first` is a seed that finds a rare one."""
    return any(run(2 * CALLS, seed, templates=templates, history=history).counts[kind] for seed in range(first, first + 200))


def test_it_finds_a_verdict_that_accepts_any_reasoning(monkeypatch):
    monkeypatch.setattr(verdict, "_judge_reasoning", lambda *_: set())
    assert finds("false")


def test_it_finds_a_verdict_that_accepts_any_arguments(monkeypatch):
    monkeypatch.setattr(verdict, "_judge_call", lambda *_: ("args-json",))
    assert finds("false")


def test_it_finds_a_matcher_that_guesses(monkeypatch):
    monkeypatch.setattr(match, "_interchangeable", lambda *_, **__: True)
    assert finds("false", first=29)


def test_it_finds_a_matcher_that_takes_words_for_evidence(monkeypatch):
    monkeypatch.setattr(match._Finder, "_evident", lambda _, __, genuine: genuine)
    assert finds("false")


def test_it_finds_a_matcher_that_accepts_other_words_with_the_right_ids(monkeypatch):
    in_place = match._Finder.in_place

    def trusting(self, i):
        came = self.echoed.get(i)
        named = [hit for hits in self.hits.values() for hit in hits if came is not None and came.names(hit.turn)]
        return [match._Found(named[0], verdict.Verdict("same"))] if named else in_place(self, i)

    monkeypatch.setattr(match._Finder, "in_place", trusting)
    assert finds("false")


def test_it_finds_a_planner_that_trusts_a_clients_ids(monkeypatch):
    monkeypatch.setattr(client_ids, "_same_words", lambda *_: True)
    assert finds("false", first=15)


def test_it_finds_a_matcher_that_does_not_judge_older_replies(monkeypatch):
    monkeypatch.setattr(match._Finder, "was_judged", lambda *_: True)
    assert finds("false")


def test_it_finds_a_reader_that_ignores_white_space_in_the_context(monkeypatch):
    monkeypatch.setattr(vocabulary, "exact_digest_of_json", lambda entry: digest(vocabulary.read_message(entry)))
    assert finds("unfaithful")


def test_it_finds_a_planner_that_loses_a_token(monkeypatch):
    whole = Tails.tail

    async def shorter(self, ask):
        tail = await whole(self, ask)
        return ids.head(tail, 2) + ids.tail(tail, 3)

    monkeypatch.setattr(Tails, "tail", shorter)
    assert finds("unfaithful")


def test_it_finds_a_planner_that_believes_every_turn_settled(monkeypatch):
    monkeypatch.setattr(EditedHistories, "is_stable", lambda *_: True)
    assert finds("unfaithful", templates=["GLM-4.5"])


def test_it_finds_a_planner_that_keeps_an_incomplete_call(monkeypatch):
    async def all_that_came(delivered, *_):
        return delivered.after

    monkeypatch.setattr(partial_reply, "tokens_of_calls", all_that_came)
    assert finds("false", first=3)


def test_it_finds_thinking_that_should_be_omitted(monkeypatch):
    async def none_omitted(*_):
        return set()

    monkeypatch.setattr(VisibleReplies, "_omitted", none_omitted)
    assert finds("unfaithful", templates=["Qwen3"], history="follow")


def test_it_finds_thinking_that_should_be_kept(monkeypatch):
    async def all_omitted(*_):
        return set(range(99))

    as_served = resplice.as_served
    monkeypatch.setattr(VisibleReplies, "_omitted", all_omitted)
    monkeypatch.setattr(resplice, "as_served", lambda raw, served: as_served(raw, msgspec.structs.replace(served, reasoning=None)))
    assert finds("unfaithful", templates=["Qwen3"], history="follow")


def test_it_finds_a_visible_part_that_begins_late(monkeypatch):
    part = VisibleReplies._part

    async def late(*arguments):
        found = await part(*arguments)
        return found and ShownPart(found.offset + 1, max(found.tokens - 1, 0), whole=False)

    monkeypatch.setattr(VisibleReplies, "_part", late)
    assert finds("unfaithful", templates=["Qwen3"], history="follow")


def test_it_finds_a_recorder_that_drops_turns(monkeypatch):
    rng = random.Random(3)

    async def careless(facts, prefixes):
        return await turns_of(facts, prefixes) if rng.random() > 0.02 else Recorded([], [], [])

    monkeypatch.setattr(stack, "turns_of", careless)
    assert finds("lost")


def test_it_finds_a_ledger_that_records_twice(monkeypatch):
    end = Ledger.end

    async def twice(self, begun, facts, recorded, documents):
        turns = [msgspec.structs.replace(entry.turn, id=f"{entry.turn.id}-2") for entry in recorded.entries]
        again = [msgspec.structs.replace(entry, turn=turn, keys=()) for entry, turn in zip(recorded.entries, turns, strict=True)]
        await end(self, begun, facts, Recorded([*recorded.entries, *again], recorded.prefixes * 2, []), documents)

    monkeypatch.setattr(Ledger, "end", twice)
    assert finds("trained twice")


def test_it_finds_a_recorder_that_shifts_log_probabilities(monkeypatch):
    pack = ids.pack_logprobs
    monkeypatch.setattr(ids, "pack_logprobs", lambda values: pack([*values[1:], *values[:1]]))
    assert finds("broken")


def test_it_finds_a_recorder_that_knows_no_forced_ids(monkeypatch):
    monkeypatch.setattr(recorder, "forced_spans", lambda *_: ())
    assert finds("mislabelled", templates=["Qwen3"])


def test_it_finds_a_recorder_that_forces_one_id_less(monkeypatch):
    spans = recorder.forced_spans
    monkeypatch.setattr(recorder, "forced_spans", lambda *given: tuple((start + 1, end) for start, end in spans(*given) or ()))
    assert finds("mislabelled", templates=["Qwen3"])


def test_it_finds_a_recorder_that_believes_the_engines_finish_reason(monkeypatch):
    monkeypatch.setattr(recorder, "finish_reason", lambda choice, *_: choice.finish_reason)
    assert finds("mislabelled", first=145)


def test_it_finds_a_model_that_learns_a_stop_id_from_every_reply(monkeypatch):
    monkeypatch.setattr(Model, "observe", lambda self, choice: self._learn(choice.ids[-1]))
    assert finds("unfaithful", templates=["Qwen2.5"])


def test_it_counts_the_misses_of_a_matcher_without_records(monkeypatch):
    monkeypatch.setattr(planning, "match", lambda *_, **__: match.Match("plain", "unrecognised-reply"))
    monkeypatch.setattr(client_ids.ReturnedIds, "last", -1)  # no ids came back
    counts = run(FEW, SEED, templates=USUAL).counts
    assert counts["missed"] == counts["owed"] > 0
    assert not counts["false"]


# --- the oracle knows the evidence of a position ------------------------------------------------------------------------------------------


async def said_twice(second, now, earlier):
    """Sample the same words after the system prompts "Answer." and `second`; then send the first of them back after `now`.

    `earlier` is how an earlier reply is written then. Returns how many false matches the oracle finds in that call, and its plan.
    """
    stack, tally = Stack("Qwen3", seed=3), Tally()
    oracle = Oracle(stack, 0, tally)

    async def ask(system, *entries, **reply):
        entries = (Entry({"role": "system", "content": system}), Entry(ASK), *entries)
        called = await stack.call("s", dialects.write("chat", entries, [], {}), reply)
        number = oracle.judge(called, entries, scope="")
        return called.plan, Entry(dialects.served("chat", called.answer)[0], number)

    _, looking = await ask("Answer.", content="I look.")
    _, done = await ask("Answer.", looking, Entry(ASK), content="Done.")
    await ask(second, looking, Entry(ASK), content="Done.", reasoning="hm")
    looking = replace(looking, message={**looking.message, "content": earlier})
    plan, _ = await ask(now, looking, Entry(ASK), done, Entry(ASK), content="Yes.")
    return tally.counts["false"], plan


def as_part(text):
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize("earlier", ["I look.", "I look.\n"])
@pytest.mark.parametrize("written", [str, as_part])
async def test_the_position_identifies_a_reply_however_its_context_is_written(written, earlier):
    false, plan = await said_twice("Answer. ", written("Answer. "), earlier)
    assert (false, plan.match, plan.reason) == (0, "continue", "")


@pytest.mark.parametrize("earlier", ["I look.", "I look.\n"])
@pytest.mark.parametrize("written", [str, as_part])
async def test_the_position_does_not_choose_between_two_turns_in_it(written, earlier, monkeypatch):
    false, plan = await said_twice("Answer.", written("Answer."), earlier)
    assert (false, plan.reason) == (0, "ambiguous-reply")
    monkeypatch.setattr(match, "_interchangeable", lambda *_, **__: True)
    in_place = match._Finder.in_place
    monkeypatch.setattr(match._Finder, "in_place", lambda self, i: list(in_place(self, i))[::-1])
    false, plan = await said_twice("Answer.", written("Answer."), earlier)
    assert (false, plan.reason) == (1, "")


# --- the oracle knows what a harness may make of a reply ----------------------------------------------------------------------------------

AFTER_RESULT = "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
END, NEXT = "<|im_end|>", "\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"


def plan_next(stack, plan):
    """Let the proxy use this plan for the calls that follow."""

    async def planned(*_):
        return plan, await stack.model()

    stack._planner = SimpleNamespace(plan=planned)


class Spliced:
    """A conversation whose prompts a test writes: each continues the reply before it with the text that the test gives."""

    def __init__(self):
        self.stack, self.tally = Stack("Qwen2.5", seed=3), Tally()
        self.oracle, self.before = Oracle(self.stack, 0, self.tally), None

    async def ask(self, entries, reply, after=None, scope="", **limits):
        """Call the model; with `after`, its prompt is the prefix of the call before and this text. Returns the reply as it was served."""
        if after is not None:
            before = self.before
            prefix = ids.pack(before.prompt + before.completion)
            prompt = prefix + ids.pack(self.stack.renderer.encode(after))
            reply_at = LastReply(len(before.call.raw_messages), len(before.prompt), ids.count(prefix))
            plan = Plan(
                match="continue",
                prefix=prompt,
                fragment=ids.Fragment.of(prompt),
                last_reply=reply_at,
                parent=before.turn.id,
                basis=Basis.of(before.turn, ids.count(prefix)),
            )
            plan_next(self.stack, plan)
        called = await self.stack.call("s", dialects.write("chat", entries, [], {}, limits), reply)
        number = self.oracle.judge(called, tuple(entries), scope=scope, owing=False)
        self.before = called
        return Entry(dialects.served("chat", called.answer)[0], number, owed=False, stop=called.generation.stop)

    async def found(self):
        """The kinds of findings, also in the record."""
        await self.oracle.close(["s"])
        return {kind for kind in NEVER if self.tally.counts[kind]}


def written(reply, added):
    """A reply to whose end the harness wrote a text."""
    message = {**reply.message, "content": reply.message["content"] + added}
    return replace(reply, message=message, kept=message, added=added)


@pytest.mark.parametrize(
    ("added", "after", "found"),
    [
        ("</search>", f"{END}{NEXT}", set()),
        ("</search>", f" of my own{END}{NEXT}", {"unfaithful"}),
        ("</search> a.txt", f" a.txt{END}{NEXT}", set()),
        ("</search> a.txt", f"{END}{NEXT}", {"unfaithful"}),
        ("</search> a.txt", f" b.txt{END}{NEXT}", {"unfaithful"}),
        ("</answer>", f"{END}{NEXT}", {"false"}),
        ("", f"{END}{NEXT}", set()),
    ],
)
async def test_words_behind_a_stop_string_are_the_harness_s(added, after, found):
    talk = Spliced()
    reply = await talk.ask([Entry(ASK)], {"content": "I search</search>"}, stop=["</search>"])
    assert (reply.message["content"], reply.stop) == ("I search", "</search>")
    await talk.ask([Entry(ASK), written(reply, added) if added else reply, Entry(ASK)], {"content": "Done."}, after)
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(
    ("before", "lost", "found"), [("Why?", False, set()), (ASK["content"], False, {"false"}), (ASK["content"], True, set())]
)
async def test_a_reply_with_words_at_its_end_may_have_all_the_evidence_of_another_turn(monkeypatch, before, lost, found):
    """Unless it was sampled after the same message itself, and is still recorded."""
    monkeypatch.setattr(match._Finder, "_may_be_unfound", lambda *_: False)
    monkeypatch.setattr(match._Finder, "has_rival", lambda *_: False)
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle = Oracle(stack, 0, tally)

    async def ask(text, *entries, session="s"):
        called = await stack.call(session, dialects.write("chat", entries, [], {}), {"content": text})
        number = oracle.judge(called, entries, scope="")
        return called, Entry(dialects.served("chat", called.answer)[0], number, owed=False)

    system, asked = Entry({"role": "system", "content": "Be brief."}), Entry({"role": "user", "content": before})
    _, reply = await ask("Yes.", system, asked, session="lost" if lost else "s")
    if lost:
        oracle.lose_store()
    await ask("Yes.</search>", Entry(ASK))
    edited = Entry({"role": "system", "content": "Answer."})
    called, _ = await ask("Done.", edited, Entry(ASK), written(reply, "</search>"), Entry(ASK))
    assert [anchor.place for anchor in called.turn.anchors] == [2]
    assert {kind for kind in NEVER if tally.counts[kind]} == found


@pytest.mark.parametrize(
    ("asked", "twice", "both", "found"),
    [
        (ASK["content"], False, False, {"false"}),
        (f" {ASK['content']}", False, False, set()),
        (ASK["content"], True, False, set()),
        (ASK["content"], True, True, {"false"}),
    ],
)
async def test_a_copy_has_no_tokens_if_the_reply_itself_can_be_identified(monkeypatch, asked, twice, both, found):
    """Blanks that changed before it leave it without evidence; of two replies with the same tokens one may be the copy.

    The matcher does not see the first reply of a history.
    """
    elsewhere, talk = match._Finder.elsewhere, Judged()
    own, hurry = Entry({"role": "assistant", "content": "Yes."}), Entry({"role": "user", "content": "Hurry."})
    first = await talk.ask({"content": "Yes."}, Entry(ASK))
    second = await talk.ask({"content": "Yes."}, hurry, Entry(ASK)) if twice else own
    monkeypatch.setattr(match._Finder, "in_place", lambda *_: [])
    monkeypatch.setattr(match._Finder, "elsewhere", lambda self, i: elsewhere(self, i) if i > 1 else match._Claim(i, ()))
    monkeypatch.setattr(match, "_claimed_by_others", lambda *_: set())
    more = [Entry(ASK), second, hurry] if both else []
    entries = Entry({"role": "user", "content": asked}), replace(first, owed=False), *more, Entry(ASK), own, Entry(ASK)
    await talk.ask({"content": "Done."}, *entries)
    last = talk.oracle.turns[len(talk.oracle.turns) - 1]
    assert [span.place for span in last.spans] == ([3, 6] if both else [3])
    assert {kind for kind in NEVER if talk.tally.counts[kind]} == found


@pytest.mark.parametrize(
    ("asked", "change", "after", "found"),
    [
        (ASK["content"], {}, f"es.{END}{NEXT}", set()),
        (ASK["content"], {}, f"{END}{NEXT}", {"unfaithful"}),
        (ASK["content"], {"content": "No."}, f"es.{END}{NEXT}", {"false"}),
        (ASK["content"], {"reasoning": "hm"}, f"es.{END}{NEXT}", {"false"}),
        ("Why?", {}, f"es.{END}{NEXT}", {"false"}),
    ],
)
async def test_a_message_of_the_harness_s_may_begin_with_a_reply_that_was_sampled_there(asked, change, after, found):
    """The reply's tokens are the policy's own in that place, and the rest is not trained."""
    talk = Spliced()
    await talk.ask([Entry(ASK)], {"content": "Y"})
    own = Entry({"role": "assistant", "content": "Yes.", **change})
    await talk.ask([Entry({"role": "user", "content": asked}), own, Entry(ASK)], {"content": "Done."}, after)
    also = {"unfaithful"} if found else set()  # what is false has other words in the prompt, too
    assert found <= await talk.found() <= found | also


@pytest.mark.parametrize(("after", "found"), [(f"es.</search> a.txt{END}{NEXT}", set()), (f" a.txt{END}{NEXT}", {"unfaithful"})])
async def test_a_longer_reply_with_words_may_stand_where_a_shorter_one_was_sampled(after, found):
    """The words of the harness's begin behind the shorter one, then."""
    talk = Spliced()
    shorter = await talk.ask([Entry(ASK)], {"content": "Y"})
    before = talk.before
    longer = await talk.ask([Entry(ASK), shorter, Entry(ASK)], {"content": "Yes.</search>"}, stop=["</search>"])
    talk.before = before
    await talk.ask([Entry(ASK), written(longer, "</search> a.txt"), Entry(ASK)], {"content": "Done."}, after)
    assert await talk.found() == found


class Judged:
    """A session whose calls are planned by the product, and judged."""

    def __init__(self, *rules, template="Qwen2.5", **limits):
        self.stack, self.tally, self.limits = Stack(template, seed=3), Tally(), limits
        self.oracle, self.leniency = Oracle(self.stack, 0, self.tally), Leniency(harness_rules=frozenset(rules))

    async def ask(self, reply, *entries):
        called = await self.stack.call("s", dialects.write("chat", entries, [], {}, self.limits), reply, leniency=self.leniency)
        number = self.oracle.judge(called, entries, scope="")
        return Entry(dialects.served("chat", called.answer)[0], number)


@pytest.mark.parametrize(("more", "owed"), [("", 1), (" ", 0)])
async def test_after_words_of_the_client_s_the_position_counts_as_long_as_these_stay(more, owed):
    """Nothing but its position identifies an empty reply."""
    talk = Judged(stop=["</search>"])
    ask, tally = talk.ask, talk.tally

    searched = replace(written(await ask({"content": "I search</search>"}, Entry(ASK)), "</search> a.txt"), stop="</search>", owed=False)
    done = await ask({"content": ""}, Entry(ASK), searched, Entry(ASK))
    message = {**searched.message, "content": f"{searched.message['content']}{more}"}
    tally.counts.clear()
    await ask({"content": "Yes."}, Entry(ASK), replace(searched, message=message), Entry(ASK), done, Entry(ASK))
    assert (tally.counts["owed"], tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("blanks", "owed"), [("", 1), (" ", 0)])
async def test_after_a_stop_string_the_position_counts_as_long_as_no_blanks_precede_it(blanks, owed):
    """Nothing but its position identifies an empty reply."""
    talk = Judged(stop=["</search>"])
    searched = replace(written(await talk.ask({"content": "I search</search>"}, Entry(ASK)), "</search>"), stop="</search>", owed=False)
    done = await talk.ask({"content": ""}, Entry(ASK), searched, Entry(ASK))
    talk.tally.counts.clear()
    again = replace(searched, message={**searched.message, "content": f"I search{blanks}</search>"})
    await talk.ask({"content": "Yes."}, Entry(ASK), again, Entry(ASK), done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(
    ("text", "arguments", "owed"), [(None, '{"cmd": "ls"}', 1), (None, '{"cmd":"ls"}', 0), ("I look.", '{"cmd": "ls"}', 0)]
)
async def test_after_a_dropped_text_the_position_counts_as_long_as_only_verbatim_calls_are_sent(text, arguments, owed):
    """Nothing but its position identifies an empty reply."""
    talk = Judged("text-dropped")
    ask, tally = talk.ask, talk.tally

    call = {**CALL, "id": DRAWN_ID}
    looked = await ask({"content": "I look.", "tool_calls": [call]}, Entry(ASK))
    looked = replace(looked, message={**looked.message, "content": None}, kept={**looked.message, "content": None}, owed=False)
    result = Entry({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
    done = await ask({"content": ""}, Entry(ASK), looked, result)
    again = {**call, "function": {**call["function"], "arguments": arguments}}
    sent = {**looked.message, "tool_calls": [again], "content": text}
    tally.counts.clear()
    await ask({"content": "Yes."}, Entry(ASK), replace(looked, message=sent), result, done, Entry(ASK))
    assert (tally.counts["owed"], tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(
    ("sent", "arguments", "owed"),
    [
        *[("{}", "{}", 0), ("{}", '{"n": 1}', 1), ("{}", "not JSON", 0)],
        *[('{"n": 1}', '{"n": 1, "m', 0), ('{"n": 1}', '{"n": 2, "m', 1), ('{"n": ["\\""]}', '{"n": ["\\"', 0)],
    ],
)
async def test_the_position_does_not_choose_between_replies_that_a_harness_may_understand_alike(sent, arguments, owed):
    """Ids that count do not either. What is in doubt need not be recognized."""
    talk = Judged()
    ask, tally = talk.ask, talk.tally

    async def called(text, name, arguments):
        return await ask({"content": text, "tool_calls": [{**CALL, "function": {"name": name, "arguments": arguments}}]}, Entry(ASK))

    looked = await called(None, "bash", sent)
    await called("No.", "Bash", arguments)
    await ask({"content": "Done."}, Entry(ASK), looked, Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"}))
    assert (tally.counts["owed"], tally.counts["missed"], tally.counts["false"]) == (owed, 0, 0)


@pytest.mark.parametrize(("message", "owed"), [({"content": None}, 1), ({}, 0)])
async def test_a_message_of_the_client_s_own_without_content_is_not_one_with_null(message, owed):
    """Nothing but its position identifies an empty reply."""
    talk = Judged()
    own, result = {"role": "assistant", "tool_calls": [CALL]}, Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"})
    done = await talk.ask({"content": ""}, Entry(ASK), Entry({**own, "content": None}), result)
    await talk.ask({"content": "Yes."}, Entry(ASK), Entry({**own, **message}), result, done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("other", "owed"), [("OK</search>", 1), ("No.", 2)])
async def test_a_reply_may_be_another_one_that_followed_the_reply_before_after_another_message(other, owed):
    """An edit may have made one message of the other."""
    talk, hurry = Judged(stop=["</search>"]), Entry({"role": "user", "content": "Hurry."})
    looked = await talk.ask({"content": None, "tool_calls": [{**CALL, "id": DRAWN_ID}]}, Entry(ASK))
    result = Entry({"role": "tool", "tool_call_id": DRAWN_ID, "content": "a.txt"})
    await talk.ask({"content": other}, Entry(ASK), looked, result, Entry(ASK))
    done = await talk.ask({"content": "OK"}, hurry)
    talk.tally.counts.clear()
    system = Entry({"role": "system", "content": "Answer."})
    await talk.ask({"content": "Yes."}, system, Entry(ASK), looked, result, hurry, done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("is_first", "chosen", "found"), [(True, 1, set()), (False, 1, set()), (False, 0, {"false"})])
async def test_between_turns_in_one_position_the_message_directly_before_decides(monkeypatch, is_first, chosen, found):
    """The client renamed a call of its own, asked again, was told the same in other tokens, and changed that call's message."""

    def called(name, **more):
        own = Entry({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": name}], **more})
        return Entry(ASK), own, Entry({"role": "tool", "tool_call_id": name, "content": "a.txt"})

    talk = Judged()
    first = await talk.ask({"content": "Done."}, *called("own000001"))
    await talk.ask({"content": "Done.\n"}, *called("n00000002"))
    said = f"Done.{chr(10) * chosen}"
    monkeypatch.setattr(
        match._Finder, "_after_same_message", lambda _, __, found: [one for one in found if one.hit.turn.served.content == said]
    )
    reply = first if is_first else Entry(first.message)
    await talk.ask({"content": "Yes."}, *called("n00000002", reasoning=None), reply, Entry(ASK))
    assert [span.turn for span in talk.oracle.turns[2].spans] == [chosen]
    assert {kind for kind in NEVER if talk.tally.counts[kind]} == found


@pytest.mark.parametrize(("there", "owed"), [("OK", 0), ("No.", 1)])
async def test_a_reply_is_not_owed_in_the_position_of_one_with_other_reasoning(there, owed):
    """The harness may have changed the reasoning of that one."""
    talk, system = Judged(template="Qwen3.5 nothink"), Entry({"role": "system", "content": "Answer."})
    done = await talk.ask({"content": "OK", "reasoning": "hm"}, Entry(ASK))
    await talk.ask({"content": there, "reasoning": "no"}, system, Entry(ASK))
    talk.tally.counts.clear()
    await talk.ask({"content": "Yes."}, system, Entry(ASK), done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("as_many", "owed"), [(True, 0), (False, 1)])
async def test_after_a_reply_that_is_not_known_a_reply_may_be_another_one_after_as_many_messages(as_many, owed):
    """An edit may have made one message of the other."""
    talk, hurry = Judged(), Entry({"role": "user", "content": "Hurry."})
    own = Entry({"role": "assistant", "content": "I see."})
    await talk.ask({"content": "I look, and then I look again."}, Entry(ASK), *([own] if as_many else []), Entry(ASK))
    done = await talk.ask({"content": "I look, and then I look again."}, hurry)
    talk.tally.counts.clear()
    await talk.ask({"content": "Yes."}, Entry(ASK), own, hurry, done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


async def test_a_reply_is_not_owed_where_a_message_in_its_position_may_be_it_changed():
    hurry = Entry({"role": "user", "content": "Hurry."})
    for first, owed in ((Entry(ASK), 1), (hurry, 0)):
        talk, own = Judged(), Entry({"role": "assistant", "content": "I see."})
        done = await talk.ask({"content": "I look, and then I look again."}, hurry)
        talk.tally.counts.clear()
        await talk.ask({"content": "Yes."}, first, own, hurry, done, Entry(ASK))
        assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("again", "owed"), [(True, 1), (False, 2)])
async def test_a_handle_shows_which_of_two_turns_with_the_same_tokens_a_reply_follows(again, owed):
    """So that the next one may be another reply that followed it, after another message."""
    stack, tally, hurry = Stack("Qwen2.5", seed=3), Tally(), Entry({"role": "user", "content": "Hurry."})
    oracle, system = Oracle(stack, 0, tally), Entry({"role": "system", "content": "Answer."})

    async def ask(text, *entries):
        called = await stack.call("s", dialects.write("responses", entries, [], {}), {"content": text}, dialect="responses")
        message, handle = dialects.served("responses", called.answer)
        return Entry(message, oracle.judge(called, entries, scope="", handle=called.handle), handle=handle)

    first, _ = await ask(".", Entry(ASK)), await ask(".", Entry(ASK))
    if again:
        await ask("I look, and then I look again.", Entry(ASK), first, Entry(ASK))
    done = await ask("I look, and then I look again.", hurry)
    tally.counts.clear()
    await ask("Yes.", system, Entry(ASK), first, hurry, replace(done, handle=""), Entry(ASK))
    assert (tally.counts["owed"], tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("before", "owed"), [((), 1), ((ASK,), 0), ((ASK, ASK), 1)])
async def test_the_first_reply_may_be_another_one_after_as_many_messages(before, owed):
    talk, hurry, brief = Judged(), Entry({"role": "user", "content": "Hurry."}), Entry({"role": "system", "content": "Be brief."})
    await talk.ask({"content": "I look, and then I look again."}, *map(Entry, before), Entry(ASK))
    done = await talk.ask({"content": "I look, and then I look again."}, hurry)
    talk.tally.counts.clear()
    await talk.ask({"content": "Yes."}, brief, hurry, done, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("handle_of", "owed"), [(0, 1), (1, 0)])
async def test_the_position_does_not_count_behind_a_reply_with_the_handle_of_another_one(handle_of, owed):
    """Before, it had come back without a handle; now it is the other one, which can be in one place only."""
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle = Oracle(stack, 0, tally)

    async def ask(*entries):
        called = await stack.call("s", dialects.write("responses", entries, [], {}), {"content": "OK"}, dialect="responses")
        message, handle = dialects.served("responses", called.answer)
        return Entry(message, oracle.judge(called, entries, scope="", handle=called.handle), handle=handle)

    first = await ask(Entry(ASK))
    second = await ask(Entry(ASK), replace(first, handle=""), Entry(ASK))
    tally.counts.clear()
    await ask(Entry(ASK), [first, second][handle_of], Entry(ASK), replace(second, handle=""), Entry(ASK))
    assert (tally.counts["owed"], tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("copied", "owed"), [(False, 1), (True, 0)])
async def test_of_two_messages_with_the_letters_and_digits_of_one_id_neither_is_owed(copied, owed):
    talk, name = Judged(), bare(DRAWN_ID)
    looked = await talk.ask({"content": None, "tool_calls": [{**CALL, "id": DRAWN_ID}]}, Entry(ASK))
    looked = replace(looked, message={**looked.message, "tool_calls": [{**CALL, "id": name}]})
    result = Entry({"role": "tool", "tool_call_id": name, "content": "a.txt"})
    more = [replace(looked, turn=None), result] if copied else []
    talk.tally.counts.clear()
    system = Entry({"role": "system", "content": "Answer."})
    await talk.ask({"content": "Yes."}, system, Entry(ASK), looked, result, *more, Entry(ASK))
    assert (talk.tally.counts["owed"], talk.tally.counts["missed"]) == (owed, 0)


@pytest.mark.parametrize(("before", "found"), [("Hurry.", set()), (ASK["content"], {"false"})])
async def test_a_message_of_the_client_s_may_be_a_reply_with_its_stop_string(monkeypatch, before, found):
    """If all evidence says so. The matcher believes all messages before a reply alike."""
    monkeypatch.setattr(match._Finder, "_after_same_message", lambda self, i, genuine: genuine)
    talk, asked = Judged(stop=["</search>"]), Entry({"role": "user", "content": before})
    await talk.ask({"content": "Yes.</search>"}, Entry({"role": "user", "content": "Hurry."}))
    await talk.ask({"content": "Done."}, Entry(ASK), asked, Entry({"role": "assistant", "content": "Yes.</search>"}), Entry(ASK))
    assert [span.place for span in talk.oracle.turns[1].spans] == [2]
    assert {kind for kind in NEVER if talk.tally.counts[kind]} == found


@pytest.mark.parametrize(("copy", "found"), [("Yes.</search>", set()), ("Yes", {"false"})])
async def test_a_history_that_was_sampled_from_is_that_one_whoever_wrote_its_last_message(monkeypatch, copy, found):
    """A copy of another reply, with the stop string at which both ended, stands there. The matcher chooses the first turn in a position."""
    talk, asked = Judged(stop=["</search>"]), Entry(ASK)

    async def yes(more, *before):
        said = await talk.ask({"content": f"Yes.</search>{more}"}, asked, *before)
        return written(replace(said, stop="</search>", owed=False), "</search>")

    first = await yes("")
    await yes("", first, asked)
    other = await yes(" more")
    monkeypatch.setattr(match, "_interchangeable", lambda *_, **__: True)
    copied = replace(other, message={**other.message, "content": copy})
    await talk.ask({"content": "Done."}, asked, other, asked, copied, asked)
    assert [span.turn for span in talk.oracle.turns[3].spans][:1] == [0]
    assert {kind for kind in NEVER if talk.tally.counts[kind]} == found


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"content": None}, set()),
        ({"content": "No."}, {"false"}),
        ({"content": None, "tool_calls": [{**CALL, "id": f"{DRAWN_ID[:-1]}6"}]}, {"false"}),
        ({"content": None, "tool_calls": [{**CALL, "id": DRAWN_ID, "function": {"name": "bash", "arguments": "{}"}}]}, {"false"}),
    ],
)
async def test_calls_under_ids_that_were_drawn_may_be_a_reply_without_its_text(change, found, copied):
    """Whoever wrote them, all evidence says so; but not if the reply itself is in the history, too (`copied`)."""
    talk = Spliced()
    reply = await talk.ask([Entry(ASK)], {"content": "I look.", "tool_calls": [{**CALL, "id": DRAWN_ID}]})
    result = Entry({"role": "tool", "tool_call_id": DRAWN_ID, "content": "a.txt"})
    own = Entry({**reply.message, **change})
    await talk.ask([Entry(ASK), own, result, *([reply, result] if copied else [])], {"content": "Done."}, AFTER_RESULT)
    assert await talk.found() & {"false"} == (found | {"false"} if copied else found)


@pytest.mark.parametrize(("added", "found"), [("</search> ", set()), ("</search> a.txt", {"unfaithful"})])
async def test_a_prompt_that_goes_on_with_a_clients_ids_has_its_replies_with_what_the_client_wrote_behind_them(added, found):
    """The record does not say where they are. Blanks after a stop string are not shown."""
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle, limits = Oracle(stack, 0, tally), {"stop": ["</search>"]}

    async def ask(session, reply, *entries, was=()):
        called = await stack.call(session, dialects.write("chat", entries, [], {}, limits), reply)
        number = oracle.judge(called, [*was, *entries[len(was) :]], scope="", owing=False)
        return called, Entry(dialects.served("chat", called.answer)[0], number, stop=called.generation.stop)

    called, searched = await ask("s", {"content": "I search</search>"}, Entry(ASK))
    oracle.lose_store()
    carried = {"prompt_token_ids": called.prompt, "generation_token_ids": called.completion}
    searched = replace(searched, message={**searched.message, **carried})
    sent = Entry(ASK), written(searched, "</search> "), Entry(ASK)
    called, done = await ask("t", {"content": "Done."}, *sent)
    assert called.plan.reason == "client-ids"
    called, _ = await ask("t", {"content": "Yes."}, *sent, written(done, "</search> b.txt"), was=[Entry(ASK), written(searched, added)])
    assert (called.plan.reason, len(called.plan.anchors)) == ("reply-extended", 1)
    assert {kind for kind in NEVER if tally.counts[kind]} == found


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("reason", "missed"), [("added-text-unproven", 0), ("foreign-reply", 1)])
async def test_before_words_that_cannot_be_rendered_no_reply_is_owed_twice(reason, missed, goes_on):
    """The reply was text in the prompt of the turn to which the words were added; it was counted then. A prompt may go on with another."""
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle = Oracle(stack, 0, tally)

    async def ask(reason, text, *entries, after=None):
        plan_next(stack, Plan(match="plain", reason=reason, basis=Basis.of(after) if after is not None else Basis()))
        called = await stack.call("s", dialects.write("chat", entries, [], {}), {"content": text})
        number = oracle.judge(called, entries, scope="")
        return called.turn, Entry(dialects.served("chat", called.answer)[0], number)

    first, began = await ask("root", "I begin.", Entry(ASK))
    began = replace(began, owed=False)
    _, looked = await ask("root", "I look.", Entry(ASK), began, Entry(ASK))
    history = (Entry(ASK), began, Entry(ASK), looked, Entry(ASK))
    _, searched = await ask("opener-unknown", "I search.", *history)
    assert (tally.counts["not placed"], tally.counts["missed"]) == (1, 0)
    searched = replace(written(searched, " a.txt"), owed=False)
    await ask(reason, "Done.", *history, searched, Entry(ASK), after=first if goes_on else None)
    assert tally.counts["missed"] == missed


@pytest.mark.parametrize(("said", "missed"), [("I search", 0), ("I search</search> ", 0), ("I seek", 1)])
async def test_before_a_reply_without_its_stop_string_no_reply_is_owed_twice(said, missed):
    """The reply is the same, also with blanks behind it; the one before was text in the prompt of the turn that is continued."""
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle = Oracle(stack, 0, tally)

    async def ask(reason, text, *entries, after=None):
        plan_next(stack, Plan(match="plain", reason=reason, basis=Basis.of(after) if after is not None else Basis()))
        called = await stack.call("s", dialects.write("chat", entries, [], {}, {"stop": ["</search>"]}), {"content": text})
        return called.turn, Entry(dialects.served("chat", called.answer)[0], oracle.judge(called, entries, scope=""))

    _, looked = await ask("root", "I look.", Entry(ASK))
    _, searched = await ask("opener-unknown", "I search</search>", Entry(ASK), looked, Entry(ASK))
    searched = replace(searched, owed=False, stop="</search>")
    searched = written(searched, "</search>")
    last, done = await ask("opener-unknown", "Done.", Entry(ASK), looked, Entry(ASK), searched, Entry(ASK))
    now = replace(searched, message={**searched.message, "content": said})
    await ask("foreign-reply", "Yes.", Entry(ASK), looked, Entry(ASK), now, Entry(ASK), replace(done, owed=False), Entry(ASK), after=last)
    assert tally.counts["missed"] == missed


@pytest.mark.parametrize(
    ("within", "change", "found"),
    [
        ("", str, set()),
        (f"{END}\n<|im_start|>assistant\n", str, {"unfaithful"}),
        ("", lambda text: text.replace("line", "word"), {"false"}),
        ("", lambda text: text + " And more.", {"false"}),
    ],
)
async def test_a_reply_that_was_sampled_in_two_calls_is_one(within, change, found):
    talk = Spliced()
    part = await talk.ask([Entry(ASK)], {"content": "First line. Second line."}, max_tokens=6)
    assert (talk.before.generation.cut, talk.before.turn.finish_reason) == (True, "length")
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    more = await talk.ask([Entry(ASK), part], {"content": " And a third line."}, within, **continues)
    message = {**part.message, "content": part.message["content"] + more.message["content"]}
    joined = replace(more, message=message, kept=message, parts=(part.turn, more.turn))
    joined = replace(joined, message={**message, "content": change(message["content"])})
    await talk.ask([Entry(ASK), joined, Entry(ASK)], {"content": "Done."}, NEXT)
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(("other", "found"), [(".", set()), ("!", {"false"})])
async def test_a_part_of_a_reply_may_be_another_turn_with_the_same_tokens_after_the_same_prompt(other, found):
    talk = Spliced()
    part = await talk.ask([Entry(ASK)], {"content": "First line. Second line."}, max_tokens=6)
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    first, before = talk.before, []
    for text in (other, "."):
        talk.before = first
        more = await talk.ask([Entry(ASK), part], {"content": text}, "", **continues)
        before.append(talk.before)
    message = {**part.message, "content": part.message["content"] + more.message["content"]}
    joined = replace(more, message=message, kept=message, parts=(part.turn, more.turn))
    talk.before = before[0]
    await talk.ask([Entry(ASK), joined, Entry(ASK)], {"content": "Done."}, NEXT)
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(
    ("change", "found"),
    [({}, set()), ({"content": "First words. And more."}, {"false"}), ({"reasoning": "hm"}, {"false"}), ({"reasoning": None}, {"false"})],
)
async def test_a_reply_whose_beginning_the_client_wrote_is_the_turns_as_long_as_that_stays(change, found):
    talk = Spliced()
    begun = {"role": "assistant", "content": "First words.", "reasoning": "of my own"}
    continues = {"continue_final_message": True, "add_generation_prompt": False}
    more = await talk.ask([Entry(ASK), Entry(begun)], {"content": " And a third line."}, **continues)
    message = {**begun, "content": begun["content"] + more.message["content"]}
    joined = replace(more, message={**message, **change}, kept=message, begun=True)
    await talk.ask([Entry(ASK), joined, Entry(ASK)], {"content": "Done."}, NEXT)
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(("change", "found"), [(str, set()), (lambda _: None, set()), (lambda thought: f"{thought}x", {"false"})])
async def test_thinking_that_was_cut_off_in_the_text_comes_back_as_reasoning_or_not_at_all(change, found):
    talk = Spliced()
    talk.stack.engine.parses = False
    reply = await talk.ask([Entry(ASK)], {"content": "Yes.", "reasoning": "I should look first."}, max_tokens=5)
    tag, thought = reply.message["content"][:7], reply.message["content"][7:]
    assert tag == "<think>"
    assert thought
    sent = replace(reply, message={"role": "assistant", "content": "", "reasoning": change(thought)})
    await talk.ask([Entry(ASK), sent, Entry(ASK)], {"content": "Done."}, f"{END}{NEXT}")
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(
    ("change", "after", "found"),
    [
        ({}, "\nObservation: a.txt", set()),
        ({}, "", {"unfaithful"}),
        ({"content": "\nObservation: b.txt"}, "\nObservation: a.txt", {"unfaithful"}),
        ({"content": "I look.\nObservation: a.txt"}, "\nObservation: a.txt", {"false", "unfaithful"}),
        ({"reasoning": "I shouldx"}, "\nObservation: a.txt", {"false", "unfaithful"}),
        ({"reasoning": None}, "\nObservation: a.txt", {"false", "unfaithful"}),
    ],
)
async def test_words_may_follow_thinking_that_was_cut_off(change, after, found):
    talk = Spliced()
    talk.stack.engine.parses = False
    reply = await talk.ask([Entry(ASK)], {"content": "Yes.", "reasoning": "I should look first."}, max_tokens=5)
    kept = {"role": "assistant", "content": "\nObservation: a.txt", "reasoning": reply.message["content"].removeprefix("<think>")}
    sent = replace(reply, message={**kept, **change}, kept=kept, added=kept["content"], stop="\nObservation:")
    await talk.ask([Entry(ASK), sent, Entry(ASK)], {"content": "Done."}, f"{after}{END}{NEXT}")
    assert await talk.found() & {"false", "unfaithful"} == found


@pytest.mark.parametrize(("late", "found"), [(0, set()), (1, {"unfaithful"})])
async def test_the_blank_that_a_template_writes_before_a_reply_may_be_the_reply_s_own(monkeypatch, late, found):
    """Mistral's template trims the text. In a session that follows it, a reply whose place changed begins with the last of its blanks."""
    part = VisibleReplies._part

    async def later(*arguments):
        shown = await part(*arguments)
        return shown and ShownPart(shown.offset + late, shown.tokens - late, whole=False)

    monkeypatch.setattr(VisibleReplies, "_part", later)
    stack, tally = Stack("Mistral-7B v0.3", seed=3), Tally()
    stack.history = "follow"
    oracle = Oracle(stack, 0, tally)

    async def ask(text, *entries):
        body = dialects.write("responses", entries, [], {})
        called = await stack.call("s", body, {"content": text}, dialect="responses")
        message, handle = dialects.served("responses", called.answer)
        return Entry(message, oracle.judge(called, entries, scope="", handle=called.handle), owed=False, handle=handle)

    own = Entry({"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "abcd12345"}]})
    reply = await ask("  I see.", Entry(ASK), own, Entry({"role": "tool", "tool_call_id": "abcd12345", "content": "a.txt"}))
    await ask("Done.", Entry(ASK), reply, Entry(ASK))
    (span,) = oracle.turns[1].spans
    assert span.offset == 1 + late
    assert {kind for kind in NEVER if tally.counts[kind]} == found


async def test_a_users_text_that_ends_like_a_generation_prompt_is_the_users():
    """DeepSeek-V3 writes nothing before a reply whose calls are not the first ones."""
    stack, tally, entries = Stack("DeepSeek-V3", seed=3), Tally(), [Entry(ASK)]
    oracle = Oracle(stack, 0, tally)
    said = [
        {"content": "", "tool_calls": [CALL]},
        {"content": "Done."},
        {"content": "", "tool_calls": [{**CALL, "id": "functions.bash:1"}]},
    ]
    for reply, after in zip(said, ["functions.bash:0", "", "functions.bash:1"], strict=True):
        called = await stack.call("s", dialects.write("chat", entries, [], {}), reply)
        entries.append(Entry(dialects.served("chat", called.answer)[0], oracle.judge(called, tuple(entries), scope="")))
        entries.append(Entry({"role": "tool", "tool_call_id": after, "content": "a.txt"} if after else ASK))
    entries[4] = Entry({"role": "user", "content": f"Look.{stack.kind.tokens[3]}"})
    called = await stack.call("s", dialects.write("chat", entries, [], {}), {"content": "Done."})
    oracle.judge(called, tuple(entries), scope="")
    assert [anchor.place for anchor in called.turn.anchors] == [1, 3, 5]
    assert not tally.guilty, tally.shown(5)


async def test_a_system_message_that_the_template_moves_is_not_between_a_result_and_the_reply_to_it():
    """DeepSeek-V3 writes all of them at the beginning, and a reply after a result follows the end of the results, which is there once."""
    stack = Stack("DeepSeek-V3", seed=3)
    result, hurry = Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"}), Entry({"role": "system", "content": "Hurry."})
    own = Entry({"role": "assistant", "content": "I look.", "tool_calls": [CALL]})
    called = await stack.call("s", dialects.write("chat", [Entry(ASK), own, result, hurry, own, result], [], {}), {"content": "Done."})
    end = called.text().rpartition("a.txt")[2]  # of the last result, and of all results
    before, _ = reading_of(stack).pieces(called, [Span(4, 0, 0, 0)], [ReplyOpening(end[end.rindex("<") :])], [False], [""])
    assert before.endswith(f"a.txt{end}")


@pytest.mark.parametrize("also", [False, True])
async def test_a_mended_name_is_the_model_s_and_any_other_change_is_not(also):
    talk = Spliced()
    call = {**CALL, "function": {**CALL["function"], "name": "Bash"}}
    reply = await talk.ask([Entry(ASK)], {"content": "I look.", "tool_calls": [call]})
    kept = with_mended_names(reply.message, ["bash", "look"])
    assert kept["tool_calls"] == [CALL]
    sent = {**kept, "content": "I looked."} if also else kept
    result = Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"})
    await talk.ask([Entry(ASK), replace(reply, message=sent, kept=kept), result], {"content": "Done."}, AFTER_RESULT)
    assert await talk.found() & {"false", "unfaithful"} == ({"false"} if also else set())


@pytest.mark.parametrize(("before", "found"), [(ASK["content"], set()), ("Hurry.", {"false"})])
async def test_a_prompt_that_goes_on_with_a_turns_has_the_replies_of_that_one_whatever_tools_there_are(before, found):
    talk = Spliced()
    first = await talk.ask([Entry(ASK)], {"content": "No."})
    begun = talk.before
    alike = await talk.ask([Entry(ASK)], {"content": "No.</s>"}, stop=["</s>"])
    assert alike.message == first.message
    talk.before = begun
    second = await talk.ask([Entry(ASK), first, Entry(ASK)], {"content": "Yes."}, NEXT)
    history = [Entry(ASK), alike, Entry({"role": "user", "content": before}), second, Entry(ASK)]
    await talk.ask(history, {"content": "Done."}, NEXT, scope="other tools")
    assert await talk.found() & {"false"} == found


@pytest.mark.parametrize(
    ("text", "begins", "sent", "found"),
    [
        ("<think>\nhm\n</think>", (8, 21), "<think>\nhm\n</think>\n\n", 0),
        ("<think>hm\n</think>", (0, 0), "<think>hm\n</think>", 0),
        ("<think>\nhm, so", (8, 21), "<think>\nhm\n</think>", 1),
        ("<think>hm, so\n</think>", (0, 0), "<think>hm\n</think>", 1),
    ],
)
def test_the_tokens_of_a_thought_may_have_its_end(text, begins, sent, found):
    stack, tally = Stack("Qwen3", seed=3), Tally()
    oracle, sampled = Oracle(stack, 0, tally), stack.renderer.encode(text)
    opening, reply = ReplyOpening("", ""), {"role": "assistant", "content": text}
    oracle.turns[0] = SampledTurn(0, reply, (Entry(ASK),), "", [], sampled, [], opening, None, begins=begins)
    entries = [Entry(ASK), Entry({"role": "assistant", "content": sent}, 0)]
    oracle._tokens(SimpleNamespace(prompt=sampled), [Span(1, 0, 0, len(sampled))], entries)
    assert tally.counts["false"] == found


@pytest.mark.parametrize(
    ("asked", "name", "id_", "itself", "found"),
    [
        (ASK["content"], "bash", CALL["id"], False, set()),
        (ASK["content"], "bash", CALL["id"], True, {"false"}),
        (ASK["content"], "look", CALL["id"], False, {"false"}),
        ("Hurry.", "bash", CALL["id"], False, {"false"}),
        ("Hurry.", "bash", DRAWN_ID, False, set()),
        ("Hurry.", "look", DRAWN_ID, False, {"false"}),
    ],
)
async def test_another_message_may_be_a_reply_with_its_name_mended(asked, name, id_, itself, found):
    """In its position, or with a drawn id, all evidence says so. But it is not known of this harness that it mends the names of replies."""
    talk = Spliced()
    call = {**CALL, "id": id_}
    reply = await talk.ask([Entry(ASK)], {"content": "I look.", "tool_calls": [{**call, "function": {**call["function"], "name": "Bash"}}]})
    calls = [{**call, "function": {**call["function"], "name": name}}]
    sent = replace(reply, message={**reply.message, "tool_calls": calls}, turn=reply.turn if itself else None)
    result = Entry({"role": "tool", "tool_call_id": id_, "content": "a.txt"})
    await talk.ask([Entry({"role": "user", "content": asked}), sent, result], {"content": "Done."}, AFTER_RESULT)
    assert await talk.found() & {"false"} == found


@pytest.mark.parametrize(
    ("template", "written", "name", "found"),
    [
        ("Kimi-K2-Thinking", "I look.", "BASH", set()),
        ("Qwen2.5", "I look.", "BASH", {"false"}),
        ("EXAONE 4.0", "\ufeff<think>\nHm.\n</think>\n\nI look.\n", "bash", set()),
        ("EXAONE 4.0", "\ufeff<think>\nHm.\n</think>\n\nI see.\n", "bash", {"false"}),
    ],
)
async def test_a_client_may_send_ids_with_a_message_that_the_template_writes_as_their_reply(template, written, name, found):
    """Kimi's templates write the id of a call, and not the name of its tool; EXAONE's leaves out all before the end of thinking."""
    stack, tally = Stack(template, seed=3), Tally()
    oracle = Oracle(stack, 0, tally)
    called = await stack.call("s", dialects.write("chat", [Entry(ASK)], [], {}), {"content": "I look.", "tool_calls": [CALL]})
    number = oracle.judge(called, (Entry(ASK),), scope="")
    served = dialects.served("chat", called.answer)[0]
    sent = {**served, "content": written, "tool_calls": [{**CALL, "function": {**CALL["function"], "name": name}}]}
    entries = (Entry(ASK), Entry(sent, number), Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"}))
    later = await stack.call("s", dialects.write("chat", entries, [], {}), {"content": "Done."})
    for places in ((1,), ()):  # a later prompt goes on with the ids
        later.plan = msgspec.structs.replace(later.plan, client_places=places)
        oracle._judge_span(Span(1, number, 0, 0), entries, "", {}, later)
    assert {kind for kind in NEVER if tally.counts[kind]} & {"false"} == found


@pytest.mark.parametrize(
    ("repeated", "known", "more", "found"),
    [
        (False, True, 0, set()),
        (False, True, -1, {"false"}),
        (True, True, 0, set()),
        (True, True, 9, {"false"}),
        (True, False, 0, set()),
        (True, False, 9, {"false"}),
    ],
)
async def test_a_reply_whose_client_left_ends_with_the_calls_in_the_message(monkeypatch, repeated, known, more, found):
    """A harness may also drop a call that stands twice (Hermes): then the reply ends before that, whether or not the harness is `known`."""
    tokens_of_calls = partial_reply.tokens_of_calls

    async def otherwise(*given):
        return await tokens_of_calls(*given) + more

    monkeypatch.setattr(partial_reply, "tokens_of_calls", otherwise)
    stack, tally = Stack("Qwen2.5", seed=3), Tally()
    oracle, last = Oracle(stack, 0, tally), SimpleNamespace(randrange=lambda _, stop: stop - 1, choice=min)
    calls = [CALL, {**CALL, "id": "functions.bash:1"}]
    called = await stack.call("s", dialects.write("chat", [Entry(ASK)], [], {}), {"content": "", "tool_calls": calls}, breaks=last)
    served = called.generation.message
    assert served["tool_calls"] == calls
    kept = without_repeated_calls(served, ["bash"]) if repeated else served
    number = oracle.judge(called, (Entry(ASK),), scope="", kept=kept if known else None)
    results = [Entry({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}) for call in kept["tool_calls"]]
    entries = [Entry(ASK), Entry(kept, number, kept=kept if known else None, owed=False), *results]
    called = await stack.call("s", dialects.write("chat", entries, [], {}), {"content": "Done."})
    assert called.plan.match in {"continue", "resplice"}
    oracle.judge(called, tuple(entries), scope="")
    assert {kind for kind in NEVER if tally.counts[kind]} & {"false"} == found


@pytest.mark.parametrize(("more", "found"), [(0, set()), (-1, {"false"}), (1, {"false"})])
async def test_a_reply_that_was_cut_within_its_text_ends_with_the_text_in_the_message(monkeypatch, more, found):
    delivered_tokens = partial_reply.delivered_tokens

    async def otherwise(*given):
        return await delivered_tokens(*given) + more

    monkeypatch.setattr(partial_reply, "delivered_tokens", otherwise)
    stack, tally, breaks = Stack("Qwen2.5", seed=3), Tally(), random.Random(8)
    oracle, said = Oracle(stack, 0, tally), {"content": "I look at all of this, and then at that.", "tool_calls": [CALL]}
    called = await stack.call("s", dialects.write("chat", [Entry(ASK)], [], {}), said, breaks=breaks)
    served = called.generation.message
    assert called.generation.begun
    assert said["content"].startswith(served["content"])
    number = oracle.judge(called, (Entry(ASK),), scope="")
    entries = [Entry(ASK), Entry(served, number), Entry(ASK)]
    called = await stack.call("s", dialects.write("chat", entries, [], {}), {"content": "Done."})
    assert called.plan.reason == "interrupted"
    oracle.judge(called, tuple(entries), scope="")
    assert {kind for kind in NEVER if tally.counts[kind]} & {"false"} == found


@pytest.mark.parametrize(
    ("change", "calls", "content"),
    [
        (without_repeated_calls, ["call-1", "call-3"], "I look."),
        (without_text, ["call-1", "call-2", "call-3"], None),
    ],
)
def test_what_a_harness_understood_of_a_reply(change, calls, content):
    said = [("call-1", "{}"), ("call-2", "{}"), ("call-3", '{"n": 1}')]
    listed = [{"id": name, "type": "function", "function": {"name": "bash", "arguments": given}} for name, given in said]
    found = change({"role": "assistant", "content": "I look.", "tool_calls": listed}, ["bash"])
    assert ([call["id"] for call in found["tool_calls"]], found["content"]) == (calls, content)


# --- its own tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", dialects.DIALECTS)
async def test_the_stack_serves_a_conversation_in_every_dialect(dialect):
    stack = Stack("Qwen3", seed=1)
    entries = [Entry({"role": "system", "content": "Be brief."}), Entry(ASK)]
    replies = [{"content": "I look.", "reasoning": "hm", "tool_calls": [CALL]}, {"content": "Done."}]
    for reply, expected in zip(replies, ["root", "continue"], strict=True):
        called = await stack.call("s", dialects.write(dialect, entries, [], {}), reply, dialect=dialect)
        assert (called.plan.match, called.plan.reason, called.turn.match) == (expected, "", expected)
        served, handle = dialects.served(dialect, called.answer)
        assert says(served, {"role": "assistant", **reply})
        assert bool(handle) == (dialect != "chat" and (dialect != "messages" or "reasoning" in reply))
        entries += [Entry(served, 0, handle=handle), Entry({"role": "tool", "tool_call_id": CALL["id"], "content": "a.txt"})]
    first, second = stack.engine.ground_truth
    assert called.prompt[: len(first.prompt) + len(first.completion)] == first.prompt + first.completion
    assert called.rendered != called.prompt
    assert stack.renderer.words.decode(second.prompt).count("a.txt") == 1
    assert not called.incidents


async def test_the_stack_reports_why_an_engine_refuses():
    called = await Stack().call(
        "s", json.dumps({"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}).encode(), {"content": "a"}
    )
    assert called.refused.startswith("UnicodeEncodeError")
    assert called.turn is None


@pytest.mark.parametrize("template", ALL_KINDS)
def test_a_text_is_tokenized_the_same_piecewise_and_whole(template):
    stack, rng = Stack(template), random.Random(5)
    pieces = [*stack.kind.tokens, "a b", " x\n", "\n\n", "naïve é☕", "</", "<|im_", '{"a": 5}', "  "]
    for _ in range(50):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 20)))
        assert stack.renderer.encode(text) == stack.renderer.words.encode(text)


@pytest.mark.parametrize("template", ALL_KINDS)
def test_the_head_of_replies_is_found(template):
    stack = Stack(template)
    found, prompt = reading_of(stack), stack.renderer.prompt([ASK], None, {})
    none = {"Mistral-7B v0.3", "Mistral Small 3.1", "Hunyuan-A13B"}  # they write nothing before a reply
    assert bool(found.head) == (template not in none)
    assert prompt.rindex(found.head) > prompt.index(ASK["content"])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1, "a": 2}', '{"a":2}', True),
        ("", " {} ", True),
        ('{"n": 9007199254740993}', '{"n": 9007199254740992}', True),
        ('{"n": 1e400}', '{"n": Infinity}', True),
        ('{"n": 1e400}', '{"n": -Infinity}', False),
        ('{"n": "5"}', '{"n": 5}', False),
        ('{"n": true}', '{"n": 1}', False),
        ('{"s": "\\ud800"}', '{"s": "\\ufffd"}', True),
        ('{"cmd": "ls', '{"cmd": "ls"}', False),
        ("not JSON", "not JSON", True),
    ],
)
def test_arguments_are_compared_by_value(one, other, same):
    assert (arguments_of(one) == arguments_of(other)) == same


@pytest.mark.parametrize("form", HARMLESS)
def test_a_harmless_form_has_the_same_meaning(form):
    rng = random.Random(7)
    reply = {"role": "assistant", "content": " naïve\n", "reasoning": "hm", "tool_calls": [CALL]}
    for _ in range(20):
        assert says(HARMLESS[form](reply, rng), reply)


def test_inline_reasoning_is_read_as_the_product_reads_it():
    for text in ("<think>a</think>b", " <think>\na\n</think>\n\n b ", "<think>a", "a<think>b</think>", "<think></think>x"):
        message = {"role": "assistant", "content": text}
        thought, said = split_think(text)
        assert says(message, {"role": "assistant", "content": said, "reasoning": thought})
        assert not thought or not says(message, {"role": "assistant", "content": said, "reasoning": "other"})
