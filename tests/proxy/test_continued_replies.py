"""A client continues a reply that it has the beginning of, and sends both parts back as one message."""

import msgspec
import pytest

from tests.proxy.kit import proxied, user
from tests.proxy.test_added_text import engine, follows, said
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import verify

LONG = "<think>\n\n</think>\n\nOne two three four five six Skinny Invisible Climb seven eight nine ten eleven twelve thirteen."
FINE = "<think>\nx\n</think>\n\nFine."
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def text_of(message):
    return message["content"] or message["reasoning"]


def matches(turns):
    return [(turn["match"], turn["reason"]) for turn in turns]


async def begun(rig, **more):
    """The first part of a reply that `max_tokens` cut, as the client keeps it."""
    return said(await rig.say("s", [user("write EPISODE:e")], **{"max_tokens": 24, **more}))


async def continued(rig, first, **more):
    """The rest of a reply."""
    return await rig.say("s", [user("write EPISODE:e"), first], **CONTINUE, **more)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_both_calls_are_exact_and_the_joined_message_is_the_reply(stream, seed):
    async with proxied(engine(LONG, LONG, FINE, seed=seed)) as rig:
        first = await begun(rig, stream=stream)
        rest = await continued(rig, first, stream=stream)
        joined = {"role": "assistant", "content": first["content"] + text_of(rest)}
        await rig.say("s", [user("write EPISODE:e"), joined, user("next")], stream=stream)
        assert matches(await rig.turns()) == [("root", ""), ("continue", ""), ("continue", "")]
        first_call, second, _ = rig.ground_truth()
        assert second.prompt_ids == [*first_call.prompt_ids, *first_call.completion_ids]
        assert follows(rig, 2)
        exported = await rig.check()
        assert [len(sequence["turns"]) for sequence in exported["sequences"]] == [3]
        assert verify(msgspec.convert(exported, Trajectory)) == []


async def test_a_reply_is_continued_again():
    async with proxied(engine(LONG, LONG, FINE)) as rig:
        first = await begun(rig)
        second = {**first, "content": first["content"] + text_of(await continued(rig, first, max_tokens=5))}
        third = {**second, "content": second["content"] + text_of(await continued(rig, second))}
        await rig.say("s", [user("write EPISODE:e"), third, user("next")])
        assert matches(await rig.turns()) == [("root", ""), *[("continue", "")] * 3]
        (sequence,) = (await rig.check())["sequences"]
        turn = sequence["turns"][2]
        assert (turn["served"]["content"], turn["begun"]) == (third["content"], len(second["content"]))


@pytest.mark.parametrize("kept", [True, False])
async def test_own_reasoning_that_a_client_drops_is_not_in_the_prompt_though_it_continued_the_reply_again(kept):
    async with proxied(engine(LONG, LONG, FINE)) as rig:
        first = {"role": "assistant", "content": "I see: ", "reasoning": "mine"}
        second = {**first, "content": first["content"] + text_of(await continued(rig, first, max_tokens=5))}
        third = {**second, "content": second["content"] + text_of(await continued(rig, second))}
        if not kept:
            del third["reasoning"]
        await rig.say("s", [user("write EPISODE:e"), third, user("next")])
        assert ("mine" in rig.engine.tokenizer.decode(rig.ground_truth()[-1].prompt_ids)) is kept
        plain = ("plain", "continue-final-message")
        assert matches(await rig.turns()) == [plain, plain, ("continue", "") if kept else ("plain", "rewritten-reply")]
        await rig.check()


async def test_a_reply_that_the_model_had_ended_goes_on_without_its_end_of_turn():
    async with proxied(engine(FINE, FINE)) as rig:
        first = await begun(rig)
        rig.engine.replies.script = lambda _: [" More."]
        rest = await continued(rig, first)
        await rig.say("s", [user("write EPISODE:e"), {**first, "content": first["content"] + text_of(rest)}, user("next")])
        assert matches(await rig.turns()) == [("root", ""), ("resplice", "reply-extended"), ("continue", "")]
        first_call, second, _ = rig.ground_truth()
        assert second.prompt_ids == [*first_call.prompt_ids, *first_call.completion_ids[:-1]]
        await rig.check()


@pytest.mark.parametrize("change", [str.upper, lambda text: f"{text} ", lambda text: text[:-2], lambda text: f"{text}!"])
async def test_another_beginning_is_rendered_and_its_joined_message_is_still_the_reply(change):
    """The ids of the recorded reply are not used, not even if only blanks at its end differ: the rest follows them."""
    async with proxied(engine(LONG, LONG, FINE)) as rig:
        first = await begun(rig)
        other = {**first, "content": change(first["content"])}
        rest = await continued(rig, other)
        await rig.say("s", [user("write EPISODE:e"), {**other, "content": other["content"] + text_of(rest)}, user("next")])
        assert matches(await rig.turns()) == [("root", ""), ("plain", "continue-final-message"), ("continue", "")]
        await rig.check()


async def test_another_joined_message_is_refused():
    async with proxied(engine(LONG, LONG, FINE)) as rig:
        first = await begun(rig)
        rest = await continued(rig, first)
        await rig.say("s", [user("write EPISODE:e"), {**first, "content": f"{first['content']}x{text_of(rest)}"}, user("next")])
        assert matches(await rig.turns())[2] == ("plain", "rewritten-reply")


async def test_nothing_of_a_continued_reply_is_lost_when_its_context_is_edited():
    async with proxied(engine(LONG, LONG, FINE, FINE)) as rig:
        first = await begun(rig)
        rest = await continued(rig, first)
        joined = {**first, "content": first["content"] + text_of(rest)}
        await rig.say("s", [{"role": "system", "content": "Be brief."}, user("write EPISODE:e"), joined, user("next")])
        assert matches(await rig.turns())[2] == ("plain", "opener-unknown")
        assert joined["content"].strip() in rig.engine.tokenizer.decode(rig.ground_truth()[2].prompt_ids)


@pytest.mark.parametrize("with_thinking", [False, True])
async def test_a_last_entry_of_the_assistants_is_continued_in_messages(with_thinking):
    """As Anthropic's API defines it. The client keeps the thinking and its signature with the text, or the text alone."""

    async def ask(messages, **more):
        status, answer = await rig.post("s", "/v1/messages", model="sim", messages=messages, **{"max_tokens": 400, **more})
        assert status == 200, answer
        return answer["content"]

    long = LONG.replace("<think>\n\n</think>", "<think>\nhm\n</think>")
    async with proxied(engine(long, long, FINE)) as rig:
        messages = [user("write EPISODE:e")]
        *thoughts, text = await ask(messages, max_tokens=24)
        kept = thoughts if with_thinking else []
        (rest,) = await ask([*messages, {"role": "assistant", "content": [*kept, text]}])
        joined = {"type": "text", "text": text["text"] + (rest.get("text") or rest.get("thinking"))}
        await ask([*messages, {"role": "assistant", "content": [*kept, joined]}, user("next")])
        assert matches(await rig.turns()) == [("root", ""), ("continue", ""), ("continue", "")]
        (sequence,) = (await rig.check())["sequences"]
        assert len(sequence["turns"]) == 3
