"""Links of answers that return as text: found where the recorded texts prove them, and nowhere else."""

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import SOME
from tests.trajectories.rollouts import TASK, TOOLS, Talk, result, system, user
from tokencache.trajectories.links import SHORTEST, Line, links
from tokencache.trajectories.rollout import rollout
from tokencache.trajectories.values import Link

ANSWER = "It has twelve lines.\n\nNone of them is blank."


def found(talk):
    made = rollout(talk.records())
    assert not [one for one in made.incidents if one.kind == "torn-record"]
    return links([Line(one.root, [span.turn for span in one.turns]) for one in made.sequences], made.contexts)


def delegated(returned, answer=ANSWER, *, role="tool"):
    """A main conversation and a sub-agent, whose answer returns in another form."""
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", '{"task":"count"}')], tools=TOOLS)
    helper = talk.call([system("You are a helper."), user("count")], answer, tools=TOOLS)
    message = result("c1", returned) if role == "tool" else user(returned)
    last = talk.call([*talk.history(main), message], "So twelve, then.", after=main, tools=TOOLS)
    return talk, helper, last


@pytest.mark.parametrize(
    ("returned", "evidence"),
    [
        (ANSWER, "equal"),
        (f"\n{ANSWER}  ", "equal"),
        (f"<task_result>\n{ANSWER}\n</task_result>", "contained"),
        ("Result:\n" + "\n".join(f"  {line}" for line in ANSWER.splitlines()), "contained"),
        (json.dumps({"status": {"completed": f"\n{ANSWER}"}}), "contained"),
    ],
    ids=["same", "blanks around", "wrapped", "indented", "json"],
)
def test_the_answer_of_a_sub_agent_is_linked_to_the_turn_that_received_it(returned, evidence):
    talk, helper, last = delegated(returned)
    assert found(talk) == [Link(kind="delegation", sources=[helper], turn=last, message=3, evidence=evidence)]


def test_an_answer_with_other_characters_than_ascii_is_found_in_json():
    answer = "Zwölf Zeilen, keine leer ☕"
    for ascii_only in (True, False):
        talk, helper, _ = delegated(json.dumps([answer], ensure_ascii=ascii_only), answer)
        assert [link.sources for link in found(talk)] == [[helper]]


def test_an_answer_that_returns_in_a_message_of_the_user_is_a_delegation():
    talk, helper, last = delegated(f"<notification>{ANSWER}</notification>", role="user")
    assert found(talk) == [Link(kind="delegation", sources=[helper], turn=last, message=3, evidence="contained")]


@pytest.mark.parametrize("returned", [ANSWER.replace("twelve", "eleven"), ANSWER[:-1], "12 a.py"])
def test_a_changed_answer_is_not_linked(returned):
    talk, _, _ = delegated(returned)
    assert found(talk) == []


def test_a_short_answer_is_not_linked():
    answer = "x" * (SHORTEST - 1)
    assert found(delegated(answer, answer)[0]) == []
    assert found(delegated(answer + "x", answer + "x")[0])


def test_an_answer_that_copies_its_own_request_is_not_linked():
    """The harness may have the text from where the model has it."""
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", "{}")], tools=TOOLS)
    talk.call([user(f"Repeat: {ANSWER}")], ANSWER)
    talk.call([*talk.history(main), result("c1", ANSWER)], "So twelve, then.", after=main, tools=TOOLS)
    assert found(talk) == []


def test_a_title_is_no_sub_agent():
    """It began before the first answer of the conversation, even if a tool prints the same words later."""
    talk = Talk()
    talk.call([user("Give this a title.")], "Counting the lines of a.py")
    main = talk.call(TASK, calls=[("c1", "bash", "{}")], tools=TOOLS)
    talk.call([*talk.history(main), result("c1", "Counting the lines of a.py")], "Twelve.", after=main, tools=TOOLS)
    assert found(talk) == []


def test_an_answer_that_was_continued_is_not_linked():
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "bash", "{}")], tools=TOOLS)
    helper = talk.call([user("count")], ANSWER)
    talk.call([*talk.history(helper), user("Sure?")], "Yes.", after=helper)
    talk.call([*talk.history(main), result("c1", ANSWER)], "So twelve.", after=main, tools=TOOLS)
    assert found(talk) == []


@pytest.mark.parametrize(
    "changes",
    [{"calls": [("c2", "bash", "{}")]}, {"marks": ("aborted",)}, {"marks": ("engine-aborted",)}],
    ids=["tool calls", "left", "aborted"],
)
def test_an_answer_that_is_not_the_end_of_a_conversation_is_not_linked(changes):
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", "{}")], tools=TOOLS)
    talk.call([user("count")], ANSWER, **changes)
    talk.call([*talk.history(main), result("c1", ANSWER)], "So twelve, then.", after=main, tools=TOOLS)
    assert found(talk) == []


def test_an_attempt_that_broke_off_is_no_second_source_of_the_answer():
    """Its text is the beginning of that of the attempt which the client received."""
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", "{}")], tools=TOOLS)
    talk.call([user("count")], ANSWER[:20], marks=("engine-aborted",), finish_reason="abort")
    helper = talk.call([user("count")], ANSWER)
    talk.call([*talk.history(main), result("c1", ANSWER)], "So twelve, then.", after=main, tools=TOOLS)
    assert [link.sources for link in found(talk)] == [[helper]]


def test_a_whole_answer_is_linked_although_its_ids_are_not_certain():
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", "{}")], tools=TOOLS)
    helper = talk.call([user("count")], ANSWER, marks=("uncertain",))
    talk.call([*talk.history(main), result("c1", ANSWER)], "So twelve, then.", after=main, tools=TOOLS)
    assert [link.sources for link in found(talk)] == [[helper]]


def test_a_message_that_is_older_than_the_answer_is_not_linked():
    """A later call sends it again, in a context of its own."""
    talk = Talk()
    main = talk.call([*TASK, user(ANSWER)], "Yes.", tools=TOOLS)
    talk.call([user("count")], ANSWER)
    talk.call([system("Another prompt."), *talk.history(main)[1:], user("Go on.")], "No.", tools=TOOLS)
    assert found(talk) == []


def test_two_sub_agents_with_the_same_answer_are_both_named():
    talk = Talk()
    calls = [("c1", "agent", "{}"), ("c2", "agent", "{}")]
    main = talk.call(TASK, calls=calls, tools=TOOLS)
    helpers = [talk.call([user(f"count {n}")], ANSWER) for n in range(2)]
    last = talk.call([*talk.history(main), result("c1", ANSWER), result("c2", ANSWER)], "Twelve.", after=main, tools=TOOLS)
    assert found(talk) == [Link(kind="delegation", sources=helpers, turn=last, message=3, evidence="equal")]


def test_an_answer_that_is_quoted_again_is_linked_once():
    talk, helper, last = delegated(ANSWER)
    talk.call([*talk.history(last), user(f"You said: {ANSWER}")], "Yes.", after=last, tools=TOOLS)
    assert [(link.sources, link.turn) for link in found(talk)] == [([helper], last)]


def compacted(answer, summary):
    """A conversation that is summarized by a branch, and a new context that begins with the summary."""
    talk = Talk()
    first = talk.call(TASK, calls=[("c1", "bash", "{}")], tools=TOOLS)
    asked = [*talk.history(first), result("c1", "12 a.py")]
    talk.call(asked, "Twelve.", after=first, tools=TOOLS)
    branch = talk.call([*asked, user("Summarize.")], answer, after=first, match="branch", tools=TOOLS)
    new = talk.call([TASK[0], user(f"This session continues another one.\n{summary}")], "Going on.", tools=TOOLS)
    return talk, branch, new


@pytest.mark.parametrize("answer", [ANSWER, f"<analysis>short</analysis>\n<summary>\n{ANSWER}\n</summary>"])
def test_a_summary_is_linked_to_the_context_that_begins_with_it(answer):
    talk, branch, new = compacted(answer, ANSWER)
    assert found(talk) == [Link(kind="compaction", sources=[branch], turn=new, message=1, evidence="contained")]


def test_a_title_that_repeats_the_task_is_no_summary():
    talk = Talk()
    title = "How many lines has a.py?"
    talk.call([user(f"Give this a title: {title}")], title)
    talk.call([user(f"{title} Be exact.")], "Twelve.", tools=TOOLS)
    assert found(talk) == []


def test_a_turn_whose_request_is_not_kept_has_no_links():
    talk, _, last = delegated(ANSWER)
    talk.contexts[last] = b""
    assert found(talk) == []


def test_a_message_that_cannot_be_read_is_passed_over():
    talk = Talk()
    main = talk.call(TASK, calls=[("c1", "agent", "{}")], tools=TOOLS)
    talk.call([user("count")], ANSWER)
    talk.call([*talk.history(main), result(7, ANSWER)], "So twelve, then.", after=main, tools=TOOLS)
    assert found(talk) == []


PHRASES = ("The first answer of all.", "Another answer, longer.", "Short.", "A third one follows here.")


def random_talk(rng):
    """Conversations that call each other and quote each other at random."""
    talk = Talk()
    ends = []
    for _ in range(rng.randint(2, 9)):
        words = rng.choice(PHRASES)
        if not ends or rng.random() < 0.4:
            ends.append(talk.call([user(rng.choice(("Begin.", *PHRASES)))], words))
        else:
            at = rng.randrange(len(ends))
            ends[at] = talk.call([*talk.history(ends[at]), user(rng.choice(PHRASES))], words, after=ends[at])
    return talk


def unproven(talk, links_found):
    """The links that the records do not prove: a checker that shares no code with `links`."""
    turns = {turn.id: turn for turn in talk.turns}
    wrong = []
    for link in links_found:
        text = talk.asked[link.turn][link.message]["content"]
        for source in link.sources:
            answer = turns[source].served.content
            proven = (
                len(answer) >= SHORTEST
                and answer in text
                and (answer == text) == (link.evidence == "equal")
                and talk.asked[link.turn][link.message]["role"] != "assistant"
                and not any(answer in message["content"] for message in talk.asked[source])
                and all(turn.parent != source for turn in talk.turns)
                and turns[source].created + turns[source].seconds <= turns[link.turn].created
                and (link.kind == "compaction") == (turns[link.turn].parent is None)
            )
            if not proven:
                wrong.append(link)
    return wrong


@SOME
@given(st.integers(0, 2**32))
def test_every_link_of_a_random_session_is_proven(seed):
    talk = random_talk(random.Random(seed))
    assert unproven(talk, found(talk)) == []


def test_random_sessions_have_links():
    """So the property above is about something."""
    kinds = [link.kind for seed in range(100) for link in found(random_talk(random.Random(seed)))]
    assert {"compaction", "delegation"} == set(kinds)


@pytest.mark.parametrize(
    "change", [{"message": 0}, {"evidence": "contained"}, {"kind": "compaction"}, {"sources": ["t0"]}, {"turn": "t1", "message": 0}]
)
def test_the_checker_finds_a_wrong_link(change):
    talk = Talk()
    main = talk.call([user("Begin.")], "Somebody else shall look.")
    talk.call([user("Look.")], ANSWER)
    talk.call([*talk.history(main), user(ANSWER)], "Well.", after=main)
    (link,) = found(talk)
    assert unproven(talk, [link]) == []
    assert unproven(talk, [msgspec.structs.replace(link, **change)])
