"""Faults that the adversary found, each as a minimal test."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.system.adversary.stack import Called, Stack
from tokencache.core.rules import Leniency

if TYPE_CHECKING:
    from tests.system.adversary.words import Message

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": {"type": "object", "properties": {}}}}]


class Talk:
    """A client that sends its history and adds each reply to it."""

    def __init__(self, template: str, *history: Message, **members: Any) -> None:
        self.stack, self.members, self.history = Stack(template, seed=3), members, list(history)

    async def ask(self, reply: str, *ids: str, session: str = "s") -> Called:
        """Send the history; the model answers with `reply` and a call for each of `ids`."""
        said: Message = {"role": "assistant", "content": reply}
        if ids:
            call = {"type": "function", "function": {"name": "bash", "arguments": "{}"}}
            said["tool_calls"] = [{"id": name, **call} for name in ids]
        body = json.dumps({"model": "m", "messages": self.history, **self.members}).encode()
        called = await self.stack.call(session, body, said)
        self.history.append(said)
        return called

    def hear(self, *messages: Message) -> None:
        self.history += messages

    def written(self, called: Called) -> str:
        """The prompt as text."""
        return self.stack.renderer.words.decode(called.prompt)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(name: str, text: str = "a.txt") -> Message:
    return {"role": "tool", "tool_call_id": name, "content": text}


SYSTEM: Message = {"role": "system", "content": "Answer."}
OWN_CALL = {"id": "own000001", "type": "function", "function": {"name": "bash", "arguments": "{}"}}


async def test_a_system_prompt_that_moved_is_not_kept_at_its_old_place():
    """Mistral-7B writes it into the last message if that is a user's; after a tool's result it was missing."""
    talk = Talk("Mistral-7B v0.3", SYSTEM, user("Go on."), result("abdd65373"))
    for _ in range(3):
        called = await talk.ask("OK")
        talk.hear(user("ok?"))
    assert talk.written(called).count("Answer.") == called.text().count("Answer.") == 1
    assert len(called.turn.anchors) == 2


async def test_a_tail_after_a_result_proves_nothing_for_one_after_a_question():
    talk = Talk("Mistral-7B v0.3", SYSTEM, user("Go on."), result("abdd65373"))
    await talk.ask("Done.")
    talk.hear(user("Why?"))
    for name in ("aaaa11111", "bbbb22222", ""):
        await talk.ask("Done.", *filter(None, [name]))
        talk.hear(result(name) if name else user("ok?"))
    await talk.ask("Done.", "cccc33333")
    talk.hear(result("cccc33333"))
    called = await talk.ask("Done.")
    assert talk.written(called).count("Answer.") == called.text().count("Answer.") == 0


async def test_a_result_that_answered_nothing_answers_a_later_call():
    """Command R7B numbers results by the calls they answer, at any place."""
    talk = Talk("Command R7B", user("Look."))
    await talk.ask("OK")
    talk.hear(user("Again."), result("functions.bash:0"))
    await talk.ask("I see.")
    talk.hear(user("Once more."))
    await talk.ask("", "functions.bash:0")
    talk.hear(result("functions.bash:0", "b.txt"))
    called = await talk.ask("Done.")
    assert called.text().count('"tool_call_id": ""') == talk.written(called).count('"tool_call_id": ""') == 0
    assert [anchor.place for anchor in called.turn.anchors] == [1, 4, 6]


async def test_a_wrong_id_affects_its_own_reply_only():
    talk = Talk("Qwen2.5", user("Look."))
    first = await talk.ask("One.")
    for words in ("Two.", "Three."):
        talk.hear(user("And?"))
        await talk.ask(words)
    talk.hear(user("And?"))
    fork = list(talk.history)
    await talk.ask("Done.", "functions.bash:5")
    talk.history = [*fork[:1], *fork[1:-1], user("Or?")]
    await talk.ask("Other.", "functions.bash:2")
    talk.history = [*fork, {"role": "assistant", "content": "Done.", "tool_calls": [dict(talk.history[-1]["tool_calls"][0])]}]
    talk.hear(result("functions.bash:2"))
    called = await talk.ask("Yes.")
    assert (called.plan.match, called.plan.reason) == ("branch", "rewritten-reply")
    assert called.prompt[: len(first.prompt + first.completion)] == first.prompt + first.completion


@pytest.mark.parametrize("template", ["Mistral-7B v0.3", "Mistral Small 3.1"])
async def test_a_call_id_that_the_template_shows_belongs_to_its_reply(template):
    talk = Talk(template, user("Look."))
    for name in ("aaaa11111", "bbbb22222", "cccc33333"):
        called = await talk.ask("", name)
        talk.hear(result(name))
    called = await talk.ask("Done.")
    assert (called.plan.match, called.plan.reason) == ("continue", "")


async def test_a_template_may_show_the_first_call_only():
    talk = Talk("gpt-oss", user("Look."), tools=TOOLS)
    await talk.ask("", "chatcmpl-tool-11112222", "chatcmpl-tool-33334444")
    talk.hear(result("chatcmpl-tool-11112222"), result("chatcmpl-tool-33334444"))
    called = await talk.ask("Done.")
    assert (called.plan.match, called.plan.reason) == ("continue", "")


async def test_text_that_a_template_always_writes_at_the_end_is_a_generation_prompt():
    """Hunyuan closes an empty thinking block after the last message, with or without a generation prompt."""
    talk = Talk("Hunyuan-A13B", user("Look."), chat_template_kwargs={"enable_thinking": False})
    for words in ("One.", "Two."):
        await talk.ask(words)
        talk.hear(user("And?"))
    talk.history[0] = user("Look there.")
    called = await talk.ask("Three.")
    assert [anchor.place for anchor in called.turn.anchors] == [3]
    assert talk.written(called).count("</think>") == 2


async def test_a_template_without_a_generation_prompt_after_results_is_unambiguous():
    talk = Talk("DeepSeek-V3.1", user("Look."))
    await talk.ask("", "chatcmpl-tool-11112222")
    talk.hear(result("chatcmpl-tool-11112222", "much"))
    await talk.ask("", "chatcmpl-tool-33334444")
    talk.hear(result("chatcmpl-tool-33334444"))
    talk.history[2] = result("chatcmpl-tool-11112222", "[pruned]")
    called = await talk.ask("Done.")
    assert [anchor.place for anchor in called.turn.anchors] == [1, 3]


async def test_a_reply_after_a_question_has_a_longer_opening_than_one_after_results():
    """DeepSeek-V3.1 moves system messages, so that the same one is the last before a reply with an opener, and before one without."""
    talk = Talk("DeepSeek-V3.1", user("Look."))
    name = "chatcmpl-tool-11112222"
    later: Message = {"role": "system", "content": "Hurry."}
    await talk.ask("", name)
    for n, asked in enumerate([result(name), user("Why?")]):
        talk.hear(asked, later)
        await talk.ask("I look.", name := f"chatcmpl-tool-{n}1112222")
        talk.hear(result(name))
        called = await talk.ask("Done.")
        assert talk.written(called).count("Assistant") == called.text().count("Assistant") == n + 1
        assert called.turn.anchors or called.turn.parent, "it has exact replies"


async def test_an_empty_reply_keeps_its_place():
    """Seed-OSS leaves out an empty message; the sampled reply was its end of turn."""
    talk = Talk("Seed-OSS", user("Look."))
    for words in ("", "Two."):
        await talk.ask(words)
        talk.hear(user("And?"))
    called = await talk.ask("Three.")
    assert (called.plan.match, called.plan.reason) == ("continue", "")


@pytest.mark.parametrize("text", ["Look again.", "Look[/INST][/INST][/INST]", "Look[/INST][TOOL_CALLS][/INST][TOOL_CALLS]"])
async def test_a_message_whose_end_repeats_itself_is_not_cut_or_lengthened(text):
    """The system prompt moves, so messages are searched by their end, which a user's text may contain."""
    talk = Talk("Mistral-7B v0.3", SYSTEM, user(text))
    for name in ("aaaa11111", "bbbb22222"):
        await talk.ask("", name)
        talk.hear(result(name))
    talk.history[0] = {"role": "system", "content": "Be brief."}
    called = await talk.ask("Done.")
    if text == "Look again.":
        assert [anchor.place for anchor in called.turn.anchors] == [2, 4]
    for token in ("[/INST]", "[TOOL_CALLS]"):
        assert talk.written(called).count(token) == called.text().count(token)


async def test_a_token_that_closes_a_conversation_only_at_its_end_is_not_kept_before_a_reply():
    """DeepSeek-V3 closes tool results at the end of a conversation, and not before a reply with calls."""
    talk = Talk("DeepSeek-V3", user("Look."))
    await talk.ask("First this.", "chatcmpl-tool-11112222")
    talk.history.insert(1, result("chatcmpl-tool-11112222", "early"))
    talk.hear(result("chatcmpl-tool-11112222"), user("And now?"))
    called = await talk.ask("Done.")
    assert [anchor.place for anchor in called.turn.anchors] == [2]
    assert talk.written(called).count("outputs▁end") == 0


@pytest.mark.parametrize("own", [{"content": "I see."}, {"content": "", "tool_calls": [OWN_CALL]}])
async def test_an_end_of_turn_is_no_part_of_a_generation_prompt(own):
    """gpt-oss's template ends the last reply of a conversation otherwise than one in a history, so a request may end with one."""
    talk = Talk("gpt-oss", user("Look."))
    await talk.ask("One.")
    talk.hear(user("And?"), {"role": "assistant", **own})
    await talk.ask("Two.")
    talk.hear(user("And?"))
    talk.history[0] = user("Look there.")
    for _ in range(2):
        called = await talk.ask("Three.")
        assert called.turn.anchors or called.turn.parent, "it has exact replies"
        assert not re.search(r"(<\|end\|>){2}|[^>]<\|start\|>", talk.written(called))
        talk.hear(user("And?"))


@pytest.mark.parametrize("template", ["Qwen3", "Nemotron Nano v2"])
async def test_a_message_of_the_client_s_own_that_was_the_last_is_written_as_one_in_a_history(template):
    """Both templates open the last message of a conversation with an empty thinking block, and drop that when others follow."""
    talk = Talk(template, user("Look."), {"role": "assistant", "content": "I begin."})
    await talk.ask("", "abcd12345678")
    talk.hear(result("abcd12345678"))
    called = await talk.ask("Done.")
    before = called.text().partition("I begin.")[0]
    assert talk.written(called).startswith(before + "I begin.")


async def test_a_word_in_place_of_an_empty_reply_is_no_part_of_a_generation_prompt():
    """A reply that was cut in its first call is empty; DeepSeek-V3 writes the same after a result, with a generation prompt and without."""
    own: Message = {"role": "assistant", "content": "", "tool_calls": [OWN_CALL]}
    talk = Talk("DeepSeek-V3", user("Look."), own, result("own000001"), user("ok?"), max_tokens=25)
    call = {"id": "lost00001", "type": "function", "function": {"name": "bash", "arguments": '{"n": 5.0}'}}
    body = json.dumps({"model": "m", "messages": talk.history, **talk.members}).encode()
    cut = await talk.stack.call("s", body, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert talk.stack.renderer.words.decode(cut.completion).endswith(".")
    talk.members = {}
    talk.hear({"role": "assistant", "content": ""}, user("Go on."), {**own, "tool_calls": [{**OWN_CALL, "id": "own000002"}]})
    talk.hear(result("own000002"))
    await talk.ask("Done.")
    talk.hear(user("Why?"))
    talk.history[0] = user("Look there.")
    called = await talk.ask("Yes.")
    assert [anchor.place for anchor in called.turn.anchors] == [8]
    assert talk.written(called).count("Go on.") == 1


@pytest.mark.parametrize(("other", "sent"), [("functions.bash:0", "functions.bash:0"), ("functions.bash:1", "n00000001")])
async def test_a_call_may_be_that_of_another_reply_in_its_position_without_its_text(other, sent):
    """A harness drops the text, and renames calls; nothing but the position finds the other reply."""
    talk = Talk("Qwen2.5", user("Look."))
    await talk.ask("", "functions.bash:0")
    said = talk.history.pop()
    await talk.ask("No.", other)
    talk.history[-1] = {**said, "tool_calls": [{**said["tool_calls"][0], "id": sent}]}
    talk.hear(result(sent))
    called = await talk.ask("Done.")
    assert (called.plan.match, called.plan.reason) == ("plain", "ambiguous-reply")


async def test_calls_alone_are_no_reply_if_another_message_has_them_in_another_form():
    """A harness dropped the text and wrote the arguments anew; later it repeated the call, as it was issued."""
    talk = Talk("Qwen2.5", user("Look."))
    await talk.ask("Yes.", "chatcmpl-tool-11112222")
    (call,) = talk.history.pop()["tool_calls"]
    for one in ({**call, "function": {**call["function"], "arguments": "{ }"}}, call):
        talk.hear({"role": "assistant", "content": "", "tool_calls": [one]}, result(call["id"]), user("And?"))
    talk.history[0] = user("Look there.")
    body, leniency = json.dumps({"model": "m", "messages": talk.history}).encode(), Leniency(harness_rules=frozenset({"text-dropped"}))
    called = await talk.stack.call("s", body, {"role": "assistant", "content": "Done."}, leniency=leniency)
    assert (called.plan.match, called.turn.anchors) == ("plain", ())


async def test_the_mode_of_another_conversation_does_not_open_a_last_message():
    """Nemotron Nano 2 writes it behind the generation prompt, whose mode a message before decides."""
    stack = Stack("Nemotron Nano v2", seed=3)
    for n, (asked, opening) in enumerate([("Why?", "<think>\n\n"), ("Why? /no_think", "<think></think>")]):
        talk = Talk("Nemotron Nano v2", SYSTEM, user(asked))
        talk.stack = stack
        await talk.ask("Done.", session=f"s{n}")
        talk.hear(user("Go on."), {"role": "assistant", "content": "So"})
        called = await talk.ask("Yes.", session=f"s{n}")
        assert called.plan.match == "continue"
        assert talk.written(called).endswith(f"{opening}So")


async def test_a_reply_with_its_stop_string_may_change_messages_of_the_client_s_own_as_the_last_message():
    """Kimi-K2-Thinking shows thinking after the last answer only. The reply is an answer, also if no message follows it."""
    own: Message = {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [OWN_CALL]}
    talk = Talk("Kimi-K2-Thinking", user("Look."), own, result("own000001"), stop=["</search>"])
    before = await talk.ask("I search</search>")
    assert talk.written(before).count("hm") == 1
    called = await talk.ask("Done.")
    assert talk.written(called).count("hm") == called.text().count("hm") == 0
    assert len(called.turn.anchors) == 1


@pytest.mark.parametrize("text", ["I look.", ""])
async def test_of_a_reply_without_its_thinking_no_call_is_left_out(text):
    """In a session that follows the template. Hermes drops a call that stands twice: one of the two was missing, the first or the last."""
    stack, names = Stack("Qwen3", seed=3), ["chatcmpl-tool-11112222", "chatcmpl-tool-33334444"]
    stack.history = "follow"
    calls = [{**OWN_CALL, "id": name} for name in names]
    said: Message = {"role": "assistant", "content": text, "reasoning": "hm", "tool_calls": calls}
    asked = await stack.call("s", json.dumps({"model": "m", "messages": [user("Look.")]}).encode(), said)
    history = [user("Look."), {**said, "tool_calls": calls[:1]}, result(names[0]), user("And now?")]
    body, leniency = json.dumps({"model": "m", "messages": history}).encode(), Leniency(harness_rules=frozenset({"repeated-dropped"}))
    called = await stack.call("s", body, {"role": "assistant", "content": "Done."}, leniency=leniency)
    (anchor,) = called.turn.anchors
    kept = called.prompt[anchor.start : anchor.end]
    assert kept == asked.completion[anchor.offset :]
    assert stack.renderer.words.decode(kept).count("<tool_call>") == 2
    assert called.plan.reason == "thinking-dropped"


@pytest.mark.parametrize("inline", [False, True])
async def test_a_thought_that_was_cut_does_not_keep_its_ids_where_the_template_omits_thinking(inline):
    """In a session that follows the template. A harness may write it at the beginning of the text, and close it."""
    stack = Stack("Qwen3", seed=3)
    stack.history = "follow"
    first: Message = {"role": "assistant", "content": "I look.", "reasoning": "hm"}
    said: Message = {**first, "reasoning": "Now I look at all of it, and then I ask."}
    history = [user("Look.")]
    await stack.call("s", json.dumps({"model": "m", "messages": history}).encode(), first)
    history += [first, user("Go on.")]
    cut = await stack.call("s", json.dumps({"model": "m", "messages": history}).encode(), said, breaks=random.Random(1))
    assert cut.generation is not None
    thought = cut.generation.message["reasoning"]
    assert said["reasoning"].startswith(thought)
    own = {"content": f"<think>\n{thought}\n</think>\n\n"} if inline else {"content": "", "reasoning": thought}
    history += [{"role": "assistant", **own}, user("And now?")]
    called = await stack.call("s", json.dumps({"model": "m", "messages": history}).encode(), {"role": "assistant", "content": "Done."})
    assert called.turn is not None
    assert ([anchor.place for anchor in called.turn.anchors], called.plan.reason) == ([1], "thinking-dropped")


@pytest.mark.parametrize("broken", [False, True])
async def test_an_empty_message_may_be_all_that_came_of_a_reply_that_was_broken_off(broken):
    """Within thinking that its harness does not receive. A retry of the same request was answered with nothing."""
    talk = Talk("Nemotron-3", SYSTEM, user("Go on."))
    first = SimpleNamespace(randrange=lambda *bounds: bounds[0] if bounds[1:] else 0, choice=min)
    if broken:
        body = json.dumps({"model": "m", "messages": talk.history}).encode()
        assert (await talk.stack.call("s", body, {"content": "Done."}, breaks=first)).turn.served_text == ""
    await talk.ask("")
    talk.hear(user("Go on."))
    called = await talk.ask("Done.")
    assert (called.plan.match, called.plan.reason) == (("plain", "ambiguous-reply") if broken else ("continue", ""))
