"""Edited prompts of every kind of chat template: each reply in its own ids, and elsewhere what the template writes for the edited messages.

`matrix.Judge` finds that out as text and by its own means. A turn that cannot be proven has a reason.
"""

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from tests.engine.template.matrix import SYSTEMS, TALKS, Judge, KindStack, Said, play, with_system
from tests.engine.template.matrix import Figures as Played
from tests.engine.template.more_kinds import ALL_KINDS, EACH_KIND
from tests.engine.template.shapes import result, says, user
from tokencache.adapters.load import load_all
from tokencache.core import ids
from tokencache.core.context import whole_contexts
from tokencache.core.context_edits import Edit, EditRefusal
from tokencache.proxy.edited_context import EditedContexts, EditRefusedError, RecordedTurn
from tokencache.proxy.harness_profile import HarnessProfiles

HINT = user("Hint: look at ü ☕.")
MOST = 500
"""Placements of replies to try: a short one may be found at several places of a prompt."""


class Collecting(KindStack):
    """Keeps the calls."""

    def __init__(self, kind):
        super().__init__(kind)
        self.called = []

    async def call(self, session, body, reply, **more):
        called = await super().call(session, body, reply, **more)
        if called.turn is not None:
            self.called.append((session, called))
        return called


class EditedJudge(Judge):
    """Judges an edited prompt, in which the replies stand at `spans`."""

    def __init__(self, spans, *rest):
        super().__init__(*rest)
        self.spans = spans

    def _spans(self):
        return self.spans

    def _heads(self, place, known):
        """Also what opens a reply that an answer of the client follows: gpt-oss then leaves out its text."""
        reply = self._messages[place]
        answers = [{**result(), "tool_call_id": call["id"]} for call in reply.get("tool_calls", ())]
        return super()._heads(place, known) | {*self._head([user()], [], reply, [*answers, says("I know."), user()])}


def edits_for(count, rng):
    return rng.choice([
        Edit(at=0, insert=[HINT]),
        Edit(at=1, insert=[HINT]),
        Edit(insert=[HINT]),
        Edit(insert=[says("I know."), HINT]),
        Edit(at=rng.randrange(count), replace=[HINT]),
        Edit(at=rng.randrange(count), insert=[HINT]),
    ])  # fmt: skip


def edited_messages(messages, edit):
    at = len(messages) if edit.at is None else edit.at
    return [*messages[:at], *edit.insert, *edit.replace, *messages[at + bool(edit.replace) :]]


def placements(prompt, replies):
    """All places where these ids are in a prompt, one after the other: lists of spans."""
    found = [[]]
    for place, reply in replies:
        size = len(reply)
        starts = [n for n in range(len(prompt) - size + 1) if prompt[n : n + size] == reply]
        found = [[*before, (place, start, start + size)] for before in found for start in starts if not before or start >= before[-1][2]]
    return found


class Figures:
    def __init__(self):
        self.scored, self.refused, self.wrong = 0, Counter(), []


async def edit_all(stack, rng, figures):
    """Edit each recorded turn, and judge what comes out."""
    model, profiles = await stack.model(), HarnessProfiles(load_all(()))
    contexts = EditedContexts(stack.store, stack.bodies, profiles, "supply")
    openers, inside = {}, {}
    for session, listed in itertools.groupby(stack.called, key=lambda one: one[0]):
        calls = [called for _, called in listed]
        by_turn = {called.turn.id: called for called in calls}
        turns = await stack.store.turns(session)
        requests = whole_contexts(turns, await stack.store.contexts(session, [turn.id for turn in turns]))
        info = await stack.store.session(session)
        for called in calls:
            turn, plan = called.turn, called.plan
            openers[turn.id] = EditedJudge([], stack, called, called.messages, {}, {}).said().opener
            if plan.parent is not None:
                parent = by_turn[plan.parent]
                inside[turn.id] = [*inside[parent.turn.id], (parent.turn.messages, parent.turn.id, parent.completion)]
            else:
                inside[turn.id] = [(a.place, a.turn, called.prompt[a.start : a.end]) for a in plan.anchors if plan.prompt is not None]
            edit = edits_for(turn.messages, rng)
            recorded = RecordedTurn(info, turn, requests[turn.id])
            where = f"{session}, {turn.messages} messages, {edit}"
            try:
                found = await contexts.prompt(recorded, [edit], model)
            except EditRefusedError as why:
                figures.refused[why.kind] += 1
                continue
            figures.scored += 1
            moved = {place: place + (bool(edit.insert) and edit.at is not None and place >= edit.at) for place, _, _ in inside[turn.id]}
            if edit.replace and edit.at in moved:
                figures.wrong.append(f"{where}: a sampled reply was replaced")
            replies = [(moved[place], kept) for place, _, kept in inside[turn.id]]
            said = {moved[place]: Said(by_turn[name], openers[name], []) for place, name, _ in inside[turn.id]}
            messages = edited_messages(called.messages, edit)
            now = dataclasses.replace(called, prompt=ids.unpack(found.ids))
            judged = [
                EditedJudge(spans, stack, now, messages, said, {}).wrong()
                for spans in itertools.islice(placements(now.prompt, replies), MOST)
            ]
            if all(judged):
                figures.wrong.append(f"{where}: {judged[0][0] if judged else 'a reply has other ids'}")


async def edited(kind, talks, *, seed=1):
    figures, stack, rng = Figures(), Collecting(kind), random.Random(seed)
    for n, name in enumerate(talks):
        await play(stack, name, name, with_system(TALKS[name], [*SYSTEMS.values()][n % len(SYSTEMS)]), Played())
    await edit_all(stack, rng, figures)
    return figures


ODD = {
    # It ends a reply with the opener of the message that the model expects next.
    "GLM-4.5": {EditRefusal.REPLY_CHANGES},
    # It writes no generation prompt after results, and does not reset that.
    "DeepSeek-V3": {EditRefusal.PROMPT_CHANGES, EditRefusal.UNPROVEN},
    "DeepSeek-V3.1": {EditRefusal.PROMPT_CHANGES, EditRefusal.UNPROVEN},
    # A switch in a message decides about thinking.
    "Nemotron Super 1.5": {EditRefusal.PROMPT_CHANGES},
    "Nemotron Nano v2": {EditRefusal.PROMPT_CHANGES},
    "SmolLM3": {EditRefusal.PROMPT_CHANGES},
    # They refuse a system message that is not the first, or two messages of one role.
    "Qwen3.5 think": {EditRefusal.TEMPLATE_REFUSES},
    "Qwen3.5 nothink": {EditRefusal.TEMPLATE_REFUSES},
    "Mistral-7B v0.3": {EditRefusal.TEMPLATE_REFUSES},
    "Mistral Small 3.1": {EditRefusal.TEMPLATE_REFUSES},
    "Gemma 3": {EditRefusal.TEMPLATE_REFUSES},
}
"""Why else than for a reply that was replaced an edit may be refused."""
SOME = (
    "text → user",
    "text and call → result",
    "second round: two calls → two results",
    "long work, then talk",
    "/no_think in the middle, undone",
)


@pytest.mark.parametrize("talks", [pytest.param(SOME, id="some"), pytest.param(TALKS, id="all", marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", EACH_KIND)
async def test_each_edited_prompt_equals_the_rendering_outside_of_the_replies(name, talks):
    figures = await edited(ALL_KINDS[name], [*talks])
    assert figures.wrong == []
    assert {*figures.refused} <= {EditRefusal.SAMPLED_REPLY, *ODD.get(name, ())}, figures.refused
    assert figures.scored >= (0.15 if name in ODD else 0.9) * (figures.scored + figures.refused.total())
    if talks is TALKS:
        assert {*figures.refused} == {EditRefusal.SAMPLED_REPLY, *ODD.get(name, ())}, "a row of the table is out of date"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
async def test_one_wrong_id_anywhere_is_found(share, monkeypatch):
    prompt = EditedContexts.prompt

    async def other(self, *asked):
        found = await prompt(self, *asked)
        tokens = ids.unpack(found.ids)
        tokens[int(share * len(tokens))] += 1
        return found._replace(ids=ids.pack(tokens))

    monkeypatch.setattr(EditedContexts, "prompt", other)
    figures = await edited(ALL_KINDS["Qwen3"], SOME[:2])
    assert len(figures.wrong) == figures.scored > 0
