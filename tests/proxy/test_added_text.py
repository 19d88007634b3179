"""A harness sends a reply back with more text than it was served: the stop string that ended it, or words of its own."""

import pytest

from tests.proxy.kit import proxied, user
from tokencache.testing import SimulatedEngine

SEARCH = "<think>\nq\n</think>\n\n<search>Skinny Invisible café</search> then I guess"
STOP = "</search>"


def engine(*replies, seed=7):
    return SimulatedEngine(episodes={"e": list(replies)}, seed=seed)


def said(message, added=""):
    """A reply as a harness without a member for reasoning sends it back, with text added to it."""
    return {"role": "assistant", "content": message["content"] + added}


def follows(rig, number):
    """Whether the prompt of a call begins with the prompt and the reply of the call before, token for token."""
    before, after = rig.ground_truth()[number - 1 : number + 1]
    return after.prompt_ids[: len(before.prompt_ids) + len(before.completion_ids)] == [*before.prompt_ids, *before.completion_ids]


async def search(rig, added, *, stream=False, calls=3, **more):
    """A search agent: each reply ends at a stop string, and is sent back with `added`."""
    messages = [user("EPISODE:e")]
    for n in range(calls):
        message = await rig.say("s", messages, stop=[STOP], stream=stream, **more)
        messages += [said(message, added), user(f"RESULT {n}")]
    await rig.check()
    return [turn["match"] for turn in await rig.turns()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_a_restored_stop_string_continues_the_reply(stream, seed):
    async with proxied(engine(SEARCH, seed=seed)) as rig:
        assert await search(rig, STOP, stream=stream) == ["root", "continue", "continue"]
        assert [turn["forgiven"] for turn in await rig.turns()][1:] == [["reasoning-dropped", "stop-restored"]] * 2
        assert follows(rig, 1)
        assert follows(rig, 2)


@pytest.mark.parametrize("added", ["</search", "</answer>", " </search>", "\n</search>", "x</search>"])
async def test_another_text_in_the_place_of_the_stop_string_is_refused(added):
    async with proxied(engine(SEARCH)) as rig:
        assert await search(rig, added, calls=2) == ["root", "plain"]


async def test_a_stop_string_that_was_served_is_not_restored_again():
    """With `include_stop_str_in_output` the text and the ids hold it once."""
    async with proxied(engine(SEARCH)) as rig:
        assert await search(rig, STOP, calls=2, include_stop_str_in_output=True) == ["root", "plain"]


async def test_what_the_last_token_has_beyond_the_stop_string_stays():
    """As it does if the harness sends the text as it was served."""
    ends = set()
    for seed in range(8):
        async with proxied(engine("<think>\nq\n</think>\n\n<search>café</search>\nthen I guess", seed=seed)) as rig:
            assert await search(rig, STOP, calls=2) == ["root", "continue"]
            assert follows(rig, 1)
            ends.add(rig.engine.tokenizer.decode(rig.ground_truth()[0].completion_ids).rpartition("</search>")[2])
    assert ends == {"", "\n"}


async def test_openhands_writes_back_more_than_its_stop_string():
    """It stops at `</function` and writes `</function>`. The bracket is its own."""
    async with proxied(engine("<think>\nq\n</think>\n\n<function=ls>\n</function>")) as rig:
        message = await rig.say("s", [user("EPISODE:e")], stop=["</function"])
        await rig.say("s", [user("EPISODE:e"), said(message, "</function>"), user("RESULT")], stop=["</function"])
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert follows(rig, 1)
        first, second = rig.ground_truth()
        added = rig.engine.tokenizer.decode(second.prompt_ids[len(first.prompt_ids) + len(first.completion_ids) :])
        assert added.startswith("><|im_end|>\n<|im_start|>user\nRESULT")
        await rig.check()


async def test_a_restored_stop_string_is_found_after_the_context_was_edited():
    async with proxied(engine(SEARCH)) as rig:
        first = await rig.say("s", [user("EPISODE:e")], stop=[STOP])
        edited = [{"role": "system", "content": "Be brief."}, user("EPISODE:e"), said(first, STOP), user("RESULT")]
        await rig.say("s", edited, stop=[STOP])
        turn = (await rig.turns())[1]
        assert (turn["match"], turn["reason"], len(turn["anchors"])) == ("resplice", "context-edited", 1)
        completion, prompt = rig.ground_truth()[0].completion_ids, rig.ground_truth()[1].prompt_ids
        assert any(prompt[at : at + len(completion)] == completion for at in range(len(prompt)))
        await rig.check()


REACT = [
    '<think>\nhm\n</think>\n\nThought: look first\nAction: search\nAction Input: {"q": "Skinny Invisible"}',
    '<think>\nhm\n</think>\n\nThought: again\nAction: search\nAction Input: {"q": "café"}',
    "<think>\nok\n</think>\n\nFinal Answer: 4",
]
OBSERVATION = "\nObservation:"


def occurs(part, whole):
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


async def react(rig, observation, *, calls=3, stop=OBSERVATION, stream=False):
    """CrewAI: its observation follows the reply in the same message, and no message follows."""
    messages = [{"role": "system", "content": "ReAct."}, user("Find it. EPISODE:e")]
    for n in range(calls):
        message = await rig.say("s", messages, stop=[stop] if stop else None, stream=stream)
        messages.append(said(message, observation(n)))
    await rig.check()
    return messages


@pytest.mark.parametrize("stream", [False, True])
async def test_words_that_the_harness_adds_follow_the_exact_ids_of_the_reply(stream):
    async with proxied(engine(*REACT)) as rig:
        messages = await react(rig, "\nObservation: result {}".format, stream=stream)
        turns = await rig.turns()
        assert [(turn["match"], turn["reason"]) for turn in turns] == [("root", ""), *[("resplice", "reply-extended")] * 2]
        log, stop_id = rig.ground_truth(), rig.engine.tokenizer.stop_id
        bodies = [entry.completion_ids[:-1] for entry in log]
        for n in (1, 2):
            assert all(occurs(body, log[n].prompt_ids) for body in bodies[:n])
            assert log[n].prompt_ids.count(stop_id) == 2 + n
        compared = (await rig.get(f"/tokencache/v1/sessions/s/turns/{turns[2]['turn']}"))["echoes"]
        assert [(one["verdict"], one["relied"]) for one in compared] == [("rewritten", True)] * 2
        shown = rig.engine.tokenizer.decode(log[2].prompt_ids)
        assert all(message["content"].strip() in shown for message in messages[:-1])
        assert shown.endswith("\nObservation: result 1<|im_end|>\n<|im_start|>assistant\n")


async def test_words_after_a_stop_string_continue_the_reply():
    """No stop id was sampled, so nothing of the reply is left out, and all is one sequence."""
    async with proxied(engine(*[f"{reply}{OBSERVATION} I guess" for reply in REACT], seed=3)) as rig:
        await react(rig, "\nObservation: result {}".format)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert [turn["forgiven"] for turn in await rig.turns()][1:] == [["reasoning-dropped", "stop-restored", "words-added"]] * 2
        (sequence,) = (await rig.exported())["sequences"]
        trained = [token for token, mask in zip(sequence["token_ids"], sequence["loss_mask"], strict=True) if mask]
        assert trained == [token for entry in rig.ground_truth() for token in entry.completion_ids]


async def test_another_text_instead_of_the_stop_string_before_the_words_is_refused():
    async with proxied(engine(f"{REACT[0]}{OBSERVATION} I guess")) as rig:
        await react(rig, "\nResult: {}".format, calls=2)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "rewritten-reply"]


async def test_a_reply_that_the_harness_changed_before_its_words_is_refused():
    async with proxied(engine(*REACT)) as rig:
        messages = [user("EPISODE:e")]
        message = await rig.say("s", messages, stop=[OBSERVATION])
        changed = {"role": "assistant", "content": message["content"].replace("look", "Look") + "\nObservation: 1"}
        await rig.say("s", [*messages, changed], stop=[OBSERVATION])
        assert [turn["match"] for turn in await rig.turns()] == ["root", "plain"]


async def test_words_after_one_of_two_replies_in_the_same_position_are_refused():
    """Both replies begin the message; nothing shows which of them the harness continued."""
    async with proxied(engine(*REACT)) as rig:
        messages = [user("EPISODE:e")]
        message = await rig.say("s", messages, stop=[OBSERVATION])
        await rig.say("s", messages, stop=[OBSERVATION])
        await rig.say("s", [*messages, said(message, "\nObservation: 1")], stop=[OBSERVATION])
        assert [turn["reason"] for turn in await rig.turns()][2] == "ambiguous-reply"


async def test_words_after_a_reply_are_refused_where_another_one_lost_its_stop_string():
    """Both have the same text, and one ended at a stop string: a harness that leaves that out may have added its words to either."""
    whole = [SEARCH.partition(STOP)[0], f"{SEARCH.partition(STOP)[0]}{STOP} then I guess"]
    async with proxied(engine(*whole)) as rig:
        messages = [user("EPISODE:e")]
        for reply in whole:
            rig.engine.replies.script = lambda _, reply=reply: [reply]
            message = await rig.say("s", messages, stop=[STOP])
        await rig.say("s", [*messages, said(message, "\nResult: a.txt")], stop=[STOP])
        assert [turn["reason"] for turn in await rig.turns()][2] == "ambiguous-reply"


async def test_words_that_do_not_follow_a_named_reply_are_not_those_after_another_one():
    """The client names the first reply by its ids, and these have a newline where its words begin otherwise. The second has none."""
    texts = [f"{SEARCH.partition(STOP)[0]}{STOP}{rest}" for rest in ("\nthen I guess", " then I guess")]
    async with proxied(engine(*texts, seed=1)) as rig:
        for text in texts:
            rig.engine.replies.script = lambda _, text=text: [text]
            message = await rig.say("s", [user("EPISODE:e")], stop=[STOP])
        named, other = rig.ground_truth()
        ends = [rig.engine.tokenizer.decode(one.completion_ids).rpartition(STOP)[2] for one in (named, other)]
        assert ends == ["\n", ""]
        returned = {"prompt_token_ids": named.prompt_ids, "generation_token_ids": named.completion_ids}
        await rig.say("s", [user("EPISODE:e"), said(message, f"{STOP} a.txt") | returned], stop=[STOP])
        turn = (await rig.turns())[2]
        assert (turn["match"], turn["reason"]) == ("plain", "added-text-unproven")


async def test_a_text_that_another_reply_has_is_not_words_after_this_one():
    """The harness has put the second reply, which begins with the same text, in the place of the first."""
    async with proxied(engine("")) as rig:
        for name, text in [("one", "I se"), ("two", "I search.")]:
            rig.engine.replies.script = lambda _, text=text: [f"<think>\nq\n</think>\n\n{text}"]
            message = await rig.say("s", [user(f"EPISODE:e {name}")], stop=[OBSERVATION])
        await rig.say("s", [user("EPISODE:e one"), said(message), user("Go on.")], stop=[OBSERVATION])
        turn = (await rig.turns())[2]
        assert (turn["match"], turn["reason"]) == ("plain", "ambiguous-reply")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_stop_string_after_a_reply_that_may_have_ended_by_itself_is_refused(first):
    """One reply in this position ended at the stop string, another said the same and no more: a harness may add it to either."""
    whole = [SEARCH.partition(STOP)[0], f"{SEARCH.partition(STOP)[0]}{STOP} then I guess"]
    async with proxied(engine(*whole)) as rig:
        messages = [user("EPISODE:e")]
        both = []
        for reply in (whole[first], whole[1 - first]):
            rig.engine.replies.script = lambda _, reply=reply: [reply]
            both.append(await rig.say("s", messages, stop=[STOP]))
        await rig.say("s", [*messages, said(both[0], STOP), user("RESULT")], stop=[STOP])
        assert [turn["reason"] for turn in await rig.turns()][2] == "ambiguous-reply"


@pytest.mark.parametrize("first", [0, 1])
async def test_the_same_holds_after_the_context_was_edited(first):
    whole = [SEARCH.partition(STOP)[0], f"{SEARCH.partition(STOP)[0]}{STOP} then I guess"]
    async with proxied(engine(*whole)) as rig:
        both = []
        for n, reply in enumerate((whole[first], whole[1 - first])):
            rig.engine.replies.script = lambda _, reply=reply: [reply]
            both.append(await rig.say("s", [{"role": "system", "content": f"Try {n}."}, user("EPISODE:e")], stop=[STOP]))
        await rig.say("s", [user("EPISODE:e"), said(both[0], STOP), user("RESULT")], stop=[STOP])
        turn = (await rig.turns())[2]
        assert (turn["match"], turn["reason"]) == ("plain", "ambiguous-reply")


async def test_a_session_that_follows_the_template_keeps_the_restored_stop_string():
    async with proxied(engine(SEARCH), history="follow") as rig:
        assert await search(rig, STOP) == ["root", "resplice", "resplice"]
        shown = rig.engine.tokenizer.decode(rig.ground_truth()[2].prompt_ids)
        assert shown.count("<search>Skinny Invisible café</search><|im_end|>") == 2
        assert "<think>" not in shown.partition("EPISODE")[2]


async def test_a_session_that_follows_the_template_renders_added_words_as_text():
    async with proxied(engine(*REACT), history="follow") as rig:
        await react(rig, "\nObservation: result {}".format, calls=2)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "added-text-unproven"]


async def test_words_are_not_lost_when_a_later_edit_renders_the_history_again():
    async with proxied(engine(REACT[0], REACT[2], "<think>\nb\n</think>\n\nBye.")) as rig:
        messages = [user("EPISODE:e")]
        message = await rig.say("s", messages, stop=[OBSERVATION])
        messages.append(said(message, "\nObservation: rain"))
        answer = await rig.say("s", messages, stop=[OBSERVATION])
        messages += [said(answer), user("note 1"), user("go")]
        last = await rig.say("s", messages)
        edited = [*messages[:3], user("note 2"), user("go"), said(last), user("more")]
        await rig.say("s", edited)
        turn = (await rig.turns())[3]
        assert (turn["match"], turn["reason"], len(turn["anchors"])) == ("resplice", "added-text-unproven", 2)
        assert '"Skinny Invisible"}\nObservation: rain<|im_end|>' in rig.engine.tokenizer.decode(rig.ground_truth()[3].prompt_ids)
        await rig.check()
