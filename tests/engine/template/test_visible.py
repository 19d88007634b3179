"""Sessions that follow the template: each prompt is the plain rendering as text, and what it shows of replies has the sampled ids."""

import itertools
import json
import random
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from tests.batching.made import as_trajectory, rows_of
from tests.engine.template.matrix import SYSTEMS, TALKS, KindStack, says, user, with_system
from tests.engine.template.more_kinds import ALL_KINDS, MORE_KINDS
from tests.engine.template.shapes import TOOLS, result
from tests.engine.template.template_lab import KINDS, UNASKED, sources
from tests.support import invariants
from tests.system.adversary.engine import Engine, RefusedError, Speech
from tests.trajectories.rollouts import of_forest
from tokencache.batching.forest import build_forest
from tokencache.core import ids
from tokencache.engine.template import visible
from tokencache.engine.template.visible import ShownPart, VisibleReplies
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.planner import Planner
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.trajectories.verify import verify

THINKING = ("Qwen3", "Qwen3.5 think", "Qwen3.5 nothink", "GLM-4.5", "Nemotron-3", "Kimi-K2-Thinking", "Nemotron Super 1.5", "EXAONE 4.0")
"""Templates that show the thinking of replies, if at all, only after the last question, and their texts everywhere."""
HIDES = {"Llama-3", "SmolLM3", "Granite 3.3", "Llama-3.1", "gpt-oss", "Command R7B", "Mistral-7B v0.3", "Mistral Small 3.1", "DeepSeek-V3"}
HIDES |= {"Nemotron Nano v2", "Gemma 3", "OLMo 3", "MiniMax-M2"}
"""Templates that hide calls, or the text beside them, change what they wrote before, or write newlines that merge into one token with those
after the thinking: some of the replies are rendered as text. So it is with Nemotron-3's own template."""


MARK = "Zwölf"


class Faithful(Engine):
    """An engine whose model writes each reply as the template writes it in a history; thinking that the template omits precedes it."""

    _written = None
    tokenizes = False
    """Whether the model samples the ids that the tokenizer would choose, instead of others."""

    def generate(self, session, body, exact, reply):
        """See `Engine.generate`."""
        tools, kwargs = body.get("tools"), body.get("chat_template_kwargs") or {}
        prompt = self.renderer.prompt(body["messages"], tools, kwargs)
        if prompt[-20:].rstrip().endswith("</think>"):
            reply = {name: value for name, value in reply.items() if name != "reasoning"}
        said = {name: value for name, value in reply.items() if name != "finish_reason"}

        def shown(*messages):
            return self.renderer.prompt([*body["messages"], *messages], tools, kwargs, generation=False)

        try:
            self._written = self._as_last(prompt, shown(said), said) or self._in_history(prompt, shown, said)
        except RefusedError:
            self._written = None
        return super().generate(session, body, exact, reply)

    def _as_last(self, prompt, whole, said):
        """What a template writes of a reply after its generation prompt, with its thinking."""
        if not whole.startswith(prompt):
            return None
        return self._thinking(prompt, said, self._until_end(whole[len(prompt) :]))

    def _in_history(self, prompt, shown, said):
        """What a template shows of a reply before a question, after its thinking."""
        base, without = shown(), {name: value for name, value in said.items() if name != "reasoning"}
        opening = shown({"role": "assistant", "content": MARK}, user("?")).removeprefix(base).partition(MARK)[0]
        text = shown(without, user("?"))
        if not text.startswith(base + opening):
            return None
        return self._thinking(prompt, said, self._until_end(text[len(base + opening) :]))

    def _until_end(self, text):
        ends = (*self.kind.ends, *self.kind.stops)
        return text[: min((at for end in ends if (at := text.find(end)) >= 0), default=len(text))]

    def _thinking(self, prompt, said, text):
        """Add thinking that the template omits, and that the generation prompt or the test asks for."""
        thought, opened = said.get("reasoning"), prompt.endswith(("<think>\n", "<think>"))
        if (thought and thought in text) or not (thought or opened):
            return text
        return ("" if opened else "<think>\n") + f"{thought or UNASKED}\n</think>\n\n{text}"

    def _planned(self, prompt, reply):
        if self._written is None:
            return super()._planned(prompt, reply)
        return Speech(reply, self._written, "", readable=False)

    def _spell(self, text):
        return self.renderer.words.encode(text) if self.tokenizes and self._written is not None else super()._spell(text)


def stack_for(name, *, history="follow", faithful=True, shared=False):
    stack = KindStack(ALL_KINDS[name], shared=shared)
    stack.history = history
    if faithful:
        stack.engine = Faithful(stack.kind, stack.renderer, stack.rng)
    return stack


async def play(stack, session, talk, counts):
    """Play a conversation; count the prompts that are exact and the kept replies, and return what is wrong."""
    messages, wrong = [], []
    for at in range(len(talk.messages) + 1):
        message = talk.messages[at] if at < len(talk.messages) else says("That is all.")
        if message["role"] != "assistant" or at in talk.own:
            messages.append(message)
            continue
        if messages[-1]["role"] == "assistant":
            break
        if talk.later[0] and sum(m["role"] == "assistant" for m in messages) >= talk.later[0] and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": talk.later[1]}
        body = {"model": "m", "messages": messages} | ({"tools": TOOLS} if talk.tools else {})
        called = await stack.call(session, json.dumps(body).encode(), message)
        if called.refused:
            break
        counts[called.plan.match, called.plan.reason] += 1
        counts["exact"] += called.plan.prompt is not None
        wrong += judged(stack, session, at, called)
        served = json.loads(called.answer)["choices"][0]["message"]
        messages.append({name: value for name, value in served.items() if value is not None})
    turns = await stack.store.turns(session)
    tokens = await stack.store.tokens(session, [turn.id for turn in turns])
    wrong += invariants.audit(turns, tokens, session=session)
    return wrong


def judged(stack, session, at, called):
    """Say where the text of a prompt is not that of the plain rendering."""
    text, plain = stack.renderer.words.decode(called.prompt).replace("\\u00e9", "é"), called.text()
    if text == plain:
        return []
    same = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), 0)
    both = " is not ".join(repr(one[max(same - 40, 0) : same + 60]) for one in (text, plain))
    return [f"{session}, message {at} ({called.plan.match} {called.plan.reason}): {both}"]


async def matrix(name, talks=TALKS, *, shared=False, every=False):
    """Play conversations with one kind of template, each with `every` system prompt or with one, another one for the next kind."""
    stack, counts, wrong = stack_for(name, shared=shared), Counter(), []
    mixed = list(talks.items())
    random.Random(1).shuffle(mixed)
    for n, (shape, talk) in enumerate(mixed, list(ALL_KINDS).index(name)):
        if any(isinstance(message.get("content"), list) for message in talk.messages):
            continue  # a template may write parts and their joined text in two ways
        for system in ("plain", "/no_think") if every else (("plain", "/no_think")[n % 2],):
            wrong += await play(stack, f"{shape} | {system}", with_system(talk, SYSTEMS[system]), counts)
    return counts, wrong


def whole(cases):
    return [pytest.param(*case.values, id=case.id, marks=pytest.mark.whole) for case in cases]


def kinds(names):
    """One reply of gpt-oss is several messages."""
    return sources(ALL_KINDS[name] for name in names if name != "gpt-oss")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["pairs", "every system prompt"])
@pytest.mark.parametrize(("kind", "shared"), [*kinds(KINDS), *whole(kinds(MORE_KINDS))])
async def test_each_prompt_is_the_plain_rendering_as_text(kind, shared, every):
    name = kind.name
    counts, wrong = await matrix(name, shared=shared, every=every)
    assert wrong == []
    unknown = sum(n for key, n in counts.items() if "visible-part-unknown" in key)
    assert unknown == 0 or name in HIDES or (name, shared) == ("Nemotron-3", True), counts
    if name in THINKING:
        assert counts["resplice", "thinking-dropped"] > (10 if every else 5)


# --- the judges can convict --------------------------------------------------------------------------------------------------

FEW = {name: TALKS[name] for name in ("thinking everywhere", "long work, then talk")}


async def test_a_prompt_that_keeps_thinking_is_found(monkeypatch):
    async def everything(_, request, frame, places, replies):
        return [visible._whole(reply) for reply in replies]

    monkeypatch.setattr(VisibleReplies, "parts", everything)
    _, wrong = await matrix("Qwen3", talks=FEW)
    assert any("thinking" in why or "<think>" in why for why in wrong)


async def test_a_part_that_begins_a_token_late_is_found(monkeypatch):
    found = VisibleReplies._part

    async def late(self, request, reply, shown):
        part = await found(self, request, reply, shown)
        return part and ShownPart(part.offset + 1, max(part.tokens - 1, 0), whole=False)

    monkeypatch.setattr(VisibleReplies, "_part", late)
    _, wrong = await matrix("Qwen3", talks=FEW)
    assert wrong


# --- single cases ------------------------------------------------------------------------------------------------------------


class Talk:
    """A conversation in one session that follows the template; replies are sent back as they were served."""

    def __init__(self, stack, *messages):
        self.stack, self.messages = stack, list(messages)

    async def ask(self, reply, *, keeps_reasoning=True):
        body = {"model": "m", "messages": self.messages, "tools": TOOLS}
        called = await self.stack.call("s", json.dumps(body).encode(), reply)
        served = json.loads(called.answer)["choices"][0]["message"]
        dropped = set() if keeps_reasoning else {"reasoning"}
        self.messages.append({name: value for name, value in served.items() if value is not None and name not in dropped})
        return called

    def text(self, called):
        return self.stack.renderer.words.decode(called.prompt)


def sampled_in(called, by_id):
    """The ids of each anchor in a prompt, and those that its turn sampled from the anchor's offset on."""
    for anchor in called.plan.anchors:
        completion = by_id[anchor.turn].completion
        yield called.prompt[anchor.start : anchor.end], completion[anchor.offset : anchor.offset + anchor.end - anchor.start]


@pytest.mark.parametrize("keeps_reasoning", [True, False])
@pytest.mark.parametrize("name", THINKING)
async def test_thinking_stays_within_a_tool_loop_and_goes_with_the_next_question(name, keeps_reasoning):
    talk = Talk(stack_for(name, faithful=False), user("Look."))
    work = says("", "bash", think="A look first.")
    turns = {}
    for reply in (work, says("Two files.", think="So it is.")):
        called = await talk.ask(reply, keeps_reasoning=keeps_reasoning)
        turns[called.turn.id] = called
        if reply is work:
            talk.messages.append({**result(), "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"]})
    talk.messages.append(user("Why?"))
    called = await talk.ask(says("Because."), keeps_reasoning=keeps_reasoning)
    assert called.plan.match == "resplice"
    assert "A look first." not in talk.text(called)
    pairs = list(sampled_in(called, turns))
    assert len(pairs) == 2
    assert all(here == sampled and here for here, sampled in pairs)
    assert all(anchor.offset > 0 for anchor in called.plan.anchors) or name in {"Qwen3.5 nothink", "EXAONE 4.0"}
    assert "Two files." in talk.text(called)


async def test_within_a_tool_loop_the_prompt_is_that_of_supply():
    prompts = {}
    for history in ("supply", "follow"):
        talk = Talk(stack_for("Qwen3", history=history), user("Look."))
        for _ in range(4):
            called = await talk.ask(says("", "bash", think="Once more."))
            talk.messages.append({**result(), "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"]})
        called = await talk.ask(says("Done."))
        assert (called.plan.match, called.plan.reason) == ("continue", "")
        prompts[history] = called.prompt
    assert prompts["follow"] == prompts["supply"]


async def test_calls_in_the_models_own_form_keep_their_ids():
    """The model writes `\\u00e9`, the template `é`: the part after the thinking is kept as it was sampled."""
    talk = Talk(stack_for("Qwen3", faithful=False), user("Look."))
    first = await talk.ask(says("I look.", "bash", think="Hm."))
    talk.messages += [{**result(), "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"]}, user("And?")]
    called = await talk.ask(says("Done."))
    ((here, sampled),) = sampled_in(called, {first.turn.id: first})
    assert here == sampled
    assert "\\u00e9" in talk.text(called)
    assert "Hm." not in talk.text(called)


async def test_a_part_that_begins_inside_a_token_is_rendered_as_text():
    """The newline before MiniMax's calls is one token with those after the thinking."""
    talk = Talk(stack_for("MiniMax-M2"), user("Look."))
    talk.stack.engine.tokenizes = True
    await talk.ask(says("", "bash", think="Hm."))
    talk.messages += [{**result(), "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"]}]
    await talk.ask(says("Done.", think="So."))
    talk.messages.append(user("And?"))
    called = await talk.ask(says("More."))
    assert (called.plan.match, called.plan.reason) == ("resplice", "visible-part-unknown")
    assert [anchor.place for anchor in called.plan.anchors] == [3]
    assert talk.text(called) == called.text()


async def test_reasoning_that_was_changed_is_not_the_models():
    talk = Talk(stack_for("Qwen3"), user("Look."))
    await talk.ask(says("Done.", think="Hm."))
    talk.messages[-1] = {**talk.messages[-1], "reasoning": "Other thoughts."}
    talk.messages.append(user("And?"))
    called = await talk.ask(says("More."))
    assert (called.plan.match, called.plan.reason) == ("plain", "rewritten-reply")


def replica_of(stack):
    """Another process with the same store, which has learned nothing yet."""
    other = stack_for(stack.kind.name)
    other.store = stack.store
    other.ledger = Ledger(other.store, PrefixCache(other.store, max_bytes=2**20))
    other._planner = Planner(SimpleNamespace(), other.store, other.ledger.prefixes)
    return other


@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5"])
async def test_another_process_writes_the_same_prompt(name):
    talk = Talk(stack_for(name), user("Look."))
    for n in range(3):
        await talk.ask(says(f"Answer {n}.", think="Hm."))
        talk.messages.append(user("And?"))
    body = json.dumps({"model": "m", "messages": talk.messages, "tools": TOOLS}).encode()
    here, there = [await stack.call("s", body, says("More.")) for stack in (talk.stack, replica_of(talk.stack))]
    assert (here.prompt, here.plan.anchors) == (there.prompt, there.plan.anchors)
    assert len(here.plan.anchors) == 3


# --- what a trainer gets -------------------------------------------------------------------------------------------------------


async def trajectory_of(history):
    """The trajectory of a session with three questions, each with two calls of a tool."""
    talk = Talk(stack_for("Qwen3", history=history), user("Look."))
    for question in range(3):
        for _ in range(2):
            await talk.ask(says("I look once more.", "bash", think="Where may it be? I think that I should look there, too."))
            talk.messages.append({**result(), "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"]})
        await talk.ask(says(f"Answer {question}.", think="That is all of it."))
        talk.messages.append(user("And the next one?"))
    turns = await talk.stack.store.turns("s")
    tokens = await talk.stack.store.tokens("s", [turn.id for turn in turns])
    return as_trajectory(of_forest(SimpleNamespace(turns=turns, tokens=tokens)))


async def test_sequences_begin_at_each_question_and_share_what_they_have_in_common():
    """Rows repeat what is visible of earlier questions; in the prefix forest that costs a half of it, and each token is trained once."""
    follows, supplies = await trajectory_of("follow"), await trajectory_of("supply")
    assert verify(follows) == verify(supplies) == []
    assert [sequence.start for sequence in follows.sequences] == ["root", "resplice", "resplice"]
    assert [sequence.start for sequence in supplies.sequences] == ["root"]
    trained = [sum(sum(sequence.loss_mask) for sequence in one.sequences) for one in (follows, supplies)]
    assert trained[0] == trained[1]
    forest, rows = build_forest(rows_of(follows)), [sequence.token_ids for sequence in follows.sequences]
    shared = [ids.common_head(ids.pack(before), ids.pack(after)) for before, after in itertools.pairwise(rows)]
    assert len(forest.token_ids) == sum(map(len, rows)) - sum(shared)
    first_replies = [sequence.turns[0].anchors[3 * n].start for n, sequence in enumerate(follows.sequences[1:])]
    assert shared == first_replies, "up to the first thinking that a question omits"


async def test_an_offset_that_was_changed_is_found():
    follows = await trajectory_of("follow")
    turn = follows.sequences[1].turns[0]
    turn.anchors[0] = msgspec.structs.replace(turn.anchors[0], offset=turn.anchors[0].offset + 1)
    assert [(failure.check, failure.turn) for failure in verify(follows)] == [("anchors", turn.turn)]
