"""Runs every kind of template, every shape of conversation and several system prompts through the planner, turn by turn.

Outside the model's own words each spliced prompt must equal the full rendering. `judge` finds that out as text and by its own means: it
renders the request with a mark in the place of each reply of the model, and looks at what stands between the marks. Nothing of
`tokencache.engine.template` has a part in it.

    python -m tests.engine.template.matrix [--all] [TEMPLATE ...]

prints the figures. `--all` plays every shape with every system prompt twice; otherwise with two of them, which are others for each kind.
"""

import argparse
import asyncio
import bisect
import json
import marshal
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.engine.template.more_kinds import ALL_KINDS
from tests.engine.template.shapes import SHAPES, TOOLS, result, says, system, user
from tests.engine.template.template_lab import Kind
from tests.system.adversary.engine import Engine, RefusedError, Renderer
from tests.system.adversary.stack import Called, Stack

Message = dict[str, Any]

SYSTEMS = {
    "none": None,
    "plain": "Be terse.",
    "/no_think": "Be terse. /no_think",
    "/think": "/think Be terse.",
    "detailed thinking off": "detailed thinking off",
}


class Talk(NamedTuple):
    """A conversation: its messages up to the last call, and which assistant's messages are the harness's own.

    `later`: so many replies later the system prompt, if there is one, has other words.
    """

    messages: list[Message]
    own: frozenset[int] = frozenset()
    tools: bool = True
    later: tuple[int, str] = (0, "")


def _own(message: Message) -> Message:
    return {**message, "own": True}


def _talk(*messages: Message, tools: bool = True, later: tuple[int, str] = (0, "")) -> Talk:
    own = frozenset(i for i, message in enumerate(messages) if message.get("own"))
    return Talk([{name: value for name, value in message.items() if name != "own"} for message in messages], own, tools, later)


def _talks() -> dict[str, Talk]:
    talks = {}
    for name, shape in SHAPES.items():
        spoken = range(len(shape.history), len(shape.messages))
        talks[name] = Talk(shape.messages, frozenset(i for i in spoken if shape.messages[i]["role"] == "assistant"), shape.tools)
    ask, call, done = user("Look."), says("", "bash"), says("It is done.")
    chat = [message for n in range(8) for message in (user(f"Question {n}?"), says(f"Answer {n}."))]
    work = [message for n in range(7) for message in (says("", "bash", think=f"Step {n}."), result(f"out {n}"))]
    thoughts = [says("One.", think="1?"), user("Two?"), says("", "bash", think="2?"), result(), says("Two.", think="2!"), user("Three?")]
    return talks | {
        "/no_think in the middle": _talk(ask, done, user("B? /no_think"), says("B."), user("C?"), says("C."), user("D?")),
        "/no_think in the middle, undone": _talk(
            *(ask, done, user("B? /no_think"), says("B."), user("C?"), says("C."), user("D? /think"), says("D."), user("E?"))
        ),
        "/no_think in front, undone": _talk(user("A? /no_think"), says("A."), user("B? /think"), says("B."), user("C?")),
        "/no_think with calls": _talk(ask, call, result(), done, user("/no_think Again."), call, result(), done, user("And /think?")),
        "/no_think in a result": _talk(ask, call, result("/no_think"), says("", "look"), result("/think"), done, user("More?")),
        "few-shot": _talk(
            *(user("2?"), _own(says("4")), user("3?"), _own(says("6")), user("4?"), says("8"), user("5?"), says("10"), user("6?"))
        ),
        "few-shot with calls": _talk(ask, _own(call), result(), _own(done), user("Again."), call, result(), done, user("More?")),
        "few-shot with the same words": _talk(ask, _own(done), ask, done, ask, done, user("More?")),
        "the same question": _talk(ask, done, ask, done, ask, tools=False),
        "long": _talk(*chat, user("And?")),
        "long, no tools": _talk(*chat, user("And?"), tools=False),
        "long work": _talk(ask, *work, says("Done.", think="Enough.")),
        "long work, then talk": _talk(ask, *work[:8], done, user("More?"), *work[:4], done, user("And?")),
        "a call without a result": _talk(ask, call, user("Not that."), says("", "look"), result(), done, user("More?")),
        "talk, then a call": _talk(ask, done, user("Again."), call, result(), done, user("More?")),
        "the system prompt turns to /no_think": _talk(*chat[:6], user("And?"), later=(2, "Be terse. /no_think")),
        "the system prompt turns to /think": _talk(ask, *work[:4], done, user("And?"), later=(1, "Be terse. /think")),
        "the system prompt has other words": _talk(ask, *work[:4], done, user("And?"), later=(2, "Be kind.")),
        "thinking everywhere": _talk(ask, *thoughts, says("Three.", think="3?"), user("Four?")),
    }


TALKS = _talks()


REFUSED: dict[str, dict[str, set[str]]] = {
    # What stands behind a tool's result depends on the results before it.
    "DeepSeek-V3": {"few-shot with calls": {"opener-unknown"}, "the system prompt has other words": {"opener-unknown"}},
    # The tools wander to the last user message.
    "Mistral-7B v0.3": {"": {"sentinel-lost", "opener-unknown"}},
    "Mistral Small 3.1": {"": {"sentinel-lost", "opener-unknown"}},
    # An empty reply has no end.
    "Seed-OSS": {"nothing said → user": {"tail-not-proven"}},
}
"""Why a prompt may be rendered plainly, by kind and shape; `""` is every kind, and every shape."""
LEAST_SPLICED = {"Mistral-7B v0.3": 0.7, "Mistral Small 3.1": 0.75}
"""The least share of prompts behind a reply that are spliced; for all others it is nine tenths."""


def allowed(kind: str, shape: str) -> set[str]:
    """The reasons for which a prompt of this kind and shape may be rendered plainly."""
    return set().union(*(REFUSED.get(k, {}).get(s, set()) for k in ("", kind) for s in ("", shape)))


# --- playing -------------------------------------------------------------------------------------------------------------


class KindStack(Stack):
    """A `Stack` for any kind of template, also those that `KINDS` does not list; `shared`: with the real template."""

    def __init__(self, kind: Kind, *, seed: int = 0, shared: bool = False) -> None:
        super().__init__(seed=seed)
        self.kind = kind
        self.renderer = Renderer.of(kind, shared=shared)
        self.engine = Engine(kind, self.renderer, self.rng)
        self.heads: dict[bytes, list[str]] = {}
        """What `Judge` found out about what opens a reply, whatever session it is in."""


Spans = list[tuple[int, int, int]]
"""Replies in a prompt: place in the request, first token, the token behind the last."""


Heads = dict[tuple[Any, ...], set[str]]
"""What may open a reply in a history, by the reply and what stands before it."""
_CALL = [{"id": "c00000000", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]


class Said(NamedTuple):
    """A reply of the model: its call, the generation prompt that it was sampled behind, and the replies in its prompt."""

    called: Called
    opener: str
    spans: Spans


@dataclass
class Figures:
    """What came of the calls of one kind; `wrong` names session, call and difference."""

    roots: int = 0
    spliced: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_template: int = 0

    def reasons(self) -> str:
        """Count refusals by their reasons."""
        counted: Counter[str] = Counter()
        for (_, reason), n in self.refused.items():
            counted[reason] += n
        return ", ".join(f"{reason}: {n}" for reason, n in sorted(counted.items()))


def with_system(talk: Talk, words: str | None) -> Talk:
    """Put another system prompt in front; call ids become unique, and long enough for Mistral."""
    first = talk.messages[0]
    there = first["role"] in {"system", "developer"}
    front = [] if words is None else [{**first, "content": words} if there else system(words)]
    moved = len(front) - there
    messages = [*front, *talk.messages[there:]]
    named: dict[str, str] = {}
    out = []
    for at, message in enumerate(messages):
        if message.get("tool_calls"):
            named |= {call["id"]: f"c{at:04d}{n:04d}" for n, call in enumerate(message["tool_calls"])}
            out.append({**message, "tool_calls": [{**call, "id": named[call["id"]]} for call in message["tool_calls"]]})
        elif "tool_call_id" in message:
            out.append({**message, "tool_call_id": named.get(message["tool_call_id"], "c00000000")})
        else:
            out.append(message)
    return talk._replace(messages=out, own=frozenset(i + moved for i in talk.own))


async def play(stack: KindStack, session: str, name: str, talk: Talk, figures: Figures) -> None:
    """Play a conversation turn by turn: each reply is sampled, served, and sent back as it was served."""
    messages: list[Message] = []
    said: dict[int, Said] = {}
    heads: Heads = {}
    for at in range(len(talk.messages) + 1):
        last = at == len(talk.messages)
        message = says("That is all.") if last else talk.messages[at]
        if message["role"] != "assistant" or at in talk.own:
            messages.append(message)
            continue
        if messages[-1]["role"] == "assistant":
            return  # the conversation ends with a reply
        if talk.later[0] and len(said) >= talk.later[0] and messages[0]["role"] == "system":
            messages[0] = {**messages[0], "content": talk.later[1]}
        body = {"model": "m", "messages": messages} | ({"tools": TOOLS} if talk.tools else {})
        called = await stack.call(session, json.dumps(body).encode(), _in_one(message))
        if called.refused:
            figures.by_template += 1
            return
        plan = called.plan
        judge = Judge(stack, called, messages, said, heads)
        if plan.prompt is not None:
            figures.spliced += 1
            if wrong := judge.wrong():
                how = f"{plan.match} {plan.reason}".strip()
                figures.wrong.append(f"{session}, call with {at} messages ({how}): {wrong[0]}")
        elif said:
            figures.refused[name, plan.reason or plan.match] += 1
        else:
            figures.roots += 1
        said[at] = judge.said()
        served = json.loads(called.answer)["choices"][0]["message"]
        in_parts = {"content": message["content"]} if isinstance(message["content"], list) else {}
        messages.append({name: value for name, value in served.items() if value is not None} | in_parts)


def _in_one(message: Message) -> Message:
    """A reply as the engine parses it: its text is one string, in whatever parts the harness will send it back."""
    content = message["content"]
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


async def matrix(kind: Kind, *, every: bool = False, once: bool = False, talks: dict[str, Talk] | None = None) -> Figures:
    """Play all conversations with one kind of template, mixed, one after the other on the same model.

    What one session proves is used by the next, so the order counts: a second model meets them the other way round. Each model has two
    system prompts or three, each of them with many conversations, for what is proven is trusted under the same system prompt first of all.
    Over all kinds, every conversation is played with every system prompt. With `once`, one kind has the first model and the next kind the
    second one.
    """
    figures, mixed, moved = Figures(), list((talks or TALKS).items()), list(ALL_KINDS).index(kind.name)
    random.Random(0).shuffle(mixed)
    models = (("/no_think", "plain"), mixed), (("/think", "none", "detailed thinking off"), mixed[::-1])
    for prompts, ordered in models[moved % 2 :][:1] if once else models:
        stack = KindStack(kind)
        for n, (name, talk) in enumerate(ordered, moved):
            for chosen in SYSTEMS if every else prompts[n % len(prompts) :][:1]:
                await play(stack, f"{name} | {chosen}", name, with_system(talk, SYSTEMS[chosen]), figures)
    return figures


# --- judging -------------------------------------------------------------------------------------------------------------

OPENS_ITSELF = {"DeepSeek-V3": "<｜tool▁outputs▁end｜>"}  # noqa: RUF001
"""What a kind puts at the end of a prompt though no generation prompt is asked for, and leaves out where calls follow."""


class Judge:
    """Judges the prompt of one call against the plain rendering of its request.

    `said` are the replies before it, by place. `heads` remembers what was found out for other calls of the same session.
    """

    def __init__(self, stack: KindStack, called: Called, messages: Sequence[Message], said: dict[int, Said], heads: Heads) -> None:
        self._kind, self._called, self._messages, self._said, self._cache = stack.kind, called, list(messages), said, heads
        self._heads_of_stack = stack.heads
        self._decode = called.renderer.words.decode
        tools = called.call.fields.get("tools")
        self._tools = None if tools is None else json.loads(bytes(tools))

    def said(self) -> Said:
        """What is kept of this call for those behind it."""
        shown, closed = self._render(self._messages), self._render(self._messages, generation=False)
        opener = shown[_alike(shown, closed) :]
        return Said(self._called, opener, self._spans() if self._called.plan.prompt is not None else [])

    def wrong(self) -> list[str]:
        """Say where the prompt differs from the rendering."""
        spans = self._spans()
        now = self._marked(self._messages, [place for place, _, _ in spans])
        pieces = self._pieces(spans)
        out = [why for n in range(len(spans)) for why in self._wrong_reply(spans[: n + 1], pieces[n], now[n])]
        return out if pieces[-1] == now[-1] else [*out, f"behind the last reply: {_difference(pieces[-1], now[-1])}"]

    def _spans(self) -> Spans:
        """Where the plan says that replies stand in the prompt."""
        plan = self._called.plan
        places = {said.called.turn.id: at for at, said in self._said.items() if said.called.turn is not None}
        if plan.parent is None:
            return [(places[anchor.turn], anchor.start, anchor.end) for anchor in plan.anchors]
        parent = self._said[places[plan.parent]]
        start = len(parent.called.prompt)
        return [*parent.spans, (places[plan.parent], start, start + len(parent.called.completion))]

    def _pieces(self, spans: Spans) -> list[str]:
        """What the prompt has in front of each reply and behind the last.

        A stop token that is part of a reply, and that the template puts behind it too, counts as the template's.
        """
        prompt, out, end, stop = self._called.prompt, [], 0, ""
        for place, start, until in spans:
            out.append(stop + self._decode(prompt[end:start]))
            completion, end = self._said[place].called.completion, until
            stop = self._decode(completion[-1:]) if until - start == len(completion) else ""
        return [*out, stop + self._decode(prompt[end:])]

    def _wrong_reply(self, spans: Spans, found: str, shown: str) -> list[str]:
        """Judge the last of some replies and what stands in front of it; `shown` is what the template has there now.

        The reply must stand in its own ids, behind the generation prompt that it was sampled behind; where that stands, the template has
        what opens a reply in a history. In front of both must be the same.
        """
        *known, (place, start, until) = spans
        said = self._said[place]
        completion, kept = said.called.completion, until - start
        if self._called.prompt[start:until] != completion[:kept] or kept < len(completion) - 1:
            return [f"message {place} does not stand in its own ids"]
        if not found.endswith(said.opener):
            return [f"message {place} stands behind {found[-40:]!r}, but was sampled behind {said.opener!r}"]
        itself, heads = OPENS_ITSELF.get(self._kind.name, ""), self._heads(place, [other for other, _, _ in known])
        context = found.removesuffix(said.opener)
        if any(shown == one + head for one in (context, context.removesuffix(itself)) for head in heads):
            return []
        return [f"in front of message {place}: {_difference(found, shown)}"]

    def _heads(self, place: int, known: list[int]) -> set[str]:
        """What the template puts between a message and the words of the reply at `place`, whatever stands before and behind both."""
        named = (place, *known, json.dumps(self._messages[0]))
        if named not in self._cache:
            reply, asked = self._messages[place], user()
            rounds = [asked, {**says("", "bash"), "tool_calls": _CALL}, {**result(), "tool_call_id": _CALL[0]["id"]}]
            results = [{**result(), "tool_call_id": call["id"]} for call in reply.get("tool_calls", ())]
            self._cache[named] = {
                head
                for front, places in ((self._messages[:place], known), ([asked], []), (rounds, []))
                for behind in ([], [asked], results)
                for head in self._head(front, places, reply, behind)
            }
        return self._cache[named]

    def _head(self, front: list[Message], places: list[int], reply: Message, behind: list[Message]) -> list[str]:
        asked = marshal.dumps([front, places, reply, behind, self._tools], 2)
        if (found := self._heads_of_stack.get(asked)) is None:
            found = self._heads_of_stack[asked] = self._rendered_head(front, places, reply, behind)
        return found

    def _rendered_head(self, front: list[Message], places: list[int], reply: Message, behind: list[Message]) -> list[str]:
        try:
            (*_, shown), (*_, closed) = (self._marked(front, places, generation=on) for on in (True, False))
            *_, opened, _ = self._marked([*front, reply, *behind], [*places, len(front)])
        except RefusedError:
            return []
        before = shown[: _alike(shown, closed)].removesuffix(OPENS_ITSELF.get(self._kind.name, ""))
        return [opened.removeprefix(before)] if opened.startswith(before) else []

    def _marked(self, messages: list[Message], places: list[int], *, generation: bool = True) -> list[str]:
        """What a rendering has in front of, between and behind the replies at `places`, see `_behind`."""
        return _behind(self._kind, lambda marked: self._render(marked, generation=generation), messages, places)

    def _render(self, messages: list[Message], *, generation: bool = True) -> str:
        return self._called.renderer.prompt(messages, self._tools, {}, generation=generation)


def _behind(kind: Kind, render: Callable[[list[Message]], str], messages: list[Message], places: list[int]) -> list[str]:
    """What a rendering has in front of the first of some replies, between them, and behind the last.

    Each reply is marked: in the arguments of its calls, or in its text, where it has none or the template does not show them.
    """
    marks = {place: f"Zwölf{n}Boxkämpfer" for n, place in enumerate(places)}
    shown = render(_marked(messages, marks, frozenset()))
    hidden = frozenset(place for place, mark in marks.items() if mark not in shown)
    if hidden:
        shown = render(_marked(messages, marks, hidden))
    out, end = [], 0
    for place in places:
        called = bool(messages[place].get("tool_calls"))
        out.append(shown[end : shown.index(marks[place], end)])
        end = _ends(kind, shown, shown.rindex(marks[place]) + len(marks[place]), called=called, hidden=place in hidden)
    return [*out, shown[end:]]


def _marked(messages: list[Message], marks: dict[int, str], hidden: frozenset[int]) -> list[Message]:
    out = list(messages)
    for place, mark in marks.items():
        # whether old thinking is shown is the reply's own affair
        reply = {name: value for name, value in out[place].items() if name != "reasoning"}
        if reply.get("tool_calls") and place not in hidden:
            said = {"arguments": json.dumps({"z": mark}, ensure_ascii=False)}
            reply["tool_calls"] = [{**call, "function": call["function"] | said} for call in reply["tool_calls"]]
        else:
            reply["content"] = mark
        out[place] = reply
    return out


def _ends(kind: Kind, shown: str, at: int, *, called: bool, hidden: bool) -> int:
    """Find where the reply ends whose mark ends at `at`: there its stop token begins."""
    if kind.style == "harmony" and called and hidden:
        return shown.index("<|call|>", at)
    if kind.ends:
        return min((i for end in kind.ends if (i := shown.find(end, at)) >= 0), default=len(shown))
    return shown.index("</tool_call>", at) + len("</tool_call>") if called else at


def _alike(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return bisect.bisect_left(range(min(len(one), len(other))), True, key=lambda last: one[: last + 1] != other[: last + 1])


def _difference(found: str, expected: str) -> str:
    at = max(0, _alike(found, expected) - 20)
    return f"{found[at : at + 120]!r} instead of {expected[at : at + 120]!r}"


# --- figures -------------------------------------------------------------------------------------------------------------


def row(name: str, figures: Figures) -> str:
    """One line of the table."""
    counted = f"{figures.roots:6} {figures.spliced:8} {len(figures.wrong):6} {figures.by_template:9}"
    return f"{name:20} {counted}  {figures.reasons()}"


def main() -> None:
    """Print the figures of the templates that are asked for, or of all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("templates", nargs="*", metavar="TEMPLATE", help="kinds to play; all if none is named")
    parser.add_argument("--all", action="store_true", help="play every shape with every system prompt")
    parser.add_argument("--wrong", type=int, default=3, help="how many wrong prompts of a kind to print")
    parser.add_argument("--shapes", action="store_true", help="print which shapes were refused")
    asked = parser.parse_args()
    print(f"{'template':20} {'roots':>6} {'spliced':>8} {'wrong':>6} {'no prompt':>9}  refused")
    for name in asked.templates or ALL_KINDS:
        figures = asyncio.run(matrix(ALL_KINDS[name], every=asked.all))
        print(row(name, figures))
        for why in figures.wrong[: asked.wrong]:
            print("   ", why)
        if asked.shapes:
            for (shape, reason), n in sorted(figures.refused.items()):
                print(f"    {reason}: {shape} ({n})")


if __name__ == "__main__":
    main()
