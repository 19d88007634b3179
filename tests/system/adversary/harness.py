"""Runs random agent sessions: what clients do to their histories, and what an adversary would do.

A session is a handful of conversations that continue, fork, roll back, are compacted and edited, one call at a time. Every entry
records whether the model sampled it (`observed.Entry`).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.system.adversary import dialects
from tests.system.adversary.observed import Entry, Tally
from tests.system.adversary.oracle import Oracle
from tests.system.adversary.words import (
    BY_THEMSELVES,
    HARMLESS,
    UNDERSTOOD,
    Message,
    bare,
    call_ids,
    meaning,
    safe,
    says,
    text_of,
    with_mended_names,
)
from tokencache.adapters.load import load_all
from tokencache.errors import HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.system.adversary.stack import Called, Stack

TEXTS = [
    "Yes.",
    "Yes.",
    "OK",
    "Done.",
    "Let me look.",
    "",
    "  I see.\n",
    "naïve café ☕ — 你好",
    "First line.\n\nSecond \u200b line.",
    "No\n",
]
THOUGHTS = ["hm", "I should look first.", "Is it? Yes.", "hm\n\nno"]
NAMES = ["bash", "look"]
MEANT = ["Bash", "LOOK", *NAMES]
"""The tools' names as a policy says them that was trained with another harness."""
ARGUMENTS = [
    '{"cmd": "ls"}',
    '{"cmd": "ls -la", "n": 5}',
    '{"n": 5.0, "cmd": "ls -la"}',
    '{"cmd": "cat ü.txt", "deep": {"a": [1, 2.50, null, true], "b": "x\\ny"}}',
    "{}",
    "",
]
ODD_ARGUMENTS = [
    '{"a": 1, "a": 2}',
    '{"n": 9007199254740993}',
    '{"n": 123456789012345678901234567890}',
    '{"n": 1e400}',
    '{"n": NaN}',
    '{"n": -Infinity}',
    '{"s": "\\ud800"}',
    '{"s": "\\u0000"}',
    '{"cmd": "ls',
    "[1, 2]",
    "null",
    '"text"',
    "not JSON",
    '{"z": -0.0}',
]
ASKS = ["Go on.", "Why?", "Look again.", "ok?", "Fix  it.\n", "Schreib ü 你好 🙂", "Thanks, /no_think", "a\u200bb"]
RESULTS = ["a.txt\n", "done", "", "error: no such file", "x" * 60, '{"ok": true}', "naïve\r\n\tresult"]
SYSTEMS = ["Be brief.", "You are an agent.\nBe brief.", "Answer. /no_think", ""]
TOOLS: list[list[Message]] = [
    [],
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Runs {name}.",
                "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
            },
        }
        for name in NAMES
    ],
]
LETTERS = "abcXYZ 0.é☕\n"
STOPS = ["</search>", "\nObservation:"]
CONTEXT: Message = {"role": "user", "content": [{"type": "text", "text": "<context>none</context>"}]}
MOST_ENTRIES, MOST_THREADS = 18, 5


@dataclass(eq=False)
class Thread:
    """One conversation: its history, its arguments, and how it writes the replies that it received."""

    entries: list[Entry]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tools: int = 0
    habits: tuple[str, ...] = ()
    stop: str = ""
    """A stop string, which the client writes back; `observes` says that it adds a result to it, and sends no other message."""
    observes: bool = False
    moves_context: bool = False
    """Whether its last message is always the same, and moves to the end with every call."""
    budget: int | None = None
    """How many tokens a thought may have."""

    def copy(self) -> Thread:
        return replace(self, entries=list(self.entries))

    @property
    def scope(self) -> str:
        """What a prompt depends on besides the messages."""
        return json.dumps([self.tools, self.kwargs], sort_keys=True)


class Session:
    """One session of a random client, in one dialect."""

    def __init__(self, stack: Stack, number: int, rng: random.Random, tally: Tally, dialect: str = "chat") -> None:
        self.stack, self.number, self.rng, self.dialect = stack, number, rng, dialect
        self.names = [f"session-{number}"]
        """Its names, the current one last: a lost store is simulated with a new name."""
        self.oracle = Oracle(stack, number, tally)
        self.tally = tally
        adapters = load_all()
        self.does = rng.choice(["", "", *UNDERSTOOD])
        """The harness that it is, whose adapter names what it does to replies."""
        self.is_named = self.does in adapters and rng.random() < 0.8
        """Whether the proxy is told so."""
        off = frozenset({rng.choice(["whitespace", "reasoning-dropped", "tool-ids"])} if rng.random() < 0.05 else ())
        self.leniency = HarnessProfiles(adapters, off).leniency(self.does if self.is_named else "")
        self.breaks = random.Random(f"breaks {number}")
        self.pool = rng.sample(TEXTS, 4)  # few words in a session, so that many replies are equal
        self.makes = "nine" if stack.kind.style == "mistral" else rng.choice(["random", "random", "toolu", "colliding", "counted"])
        self.odd = rng.random() < 0.3
        self.thinks = stack.kind.style in {"hermes", "xml", "glm", "harmony"} and rng.random() < 0.7
        self.carries = dialect == "chat" and number % 4 == 0
        """Whether it sends token ids back on the replies, as NeMo Gym's agents do."""
        self.forms = [name for name in HARMLESS if dialect == "chat" or name in dialects.FORMS]
        self.fresh = 0
        self.threads = [self.new_thread()]
        self.trace: list[str] = []
        """What was done and sent, call by call, to explain a finding."""

    async def run(self, calls: int) -> None:
        """Make this many calls."""
        deeds = self._deeds()
        names, weights = list(deeds), [weight for _, weight in deeds.values()]
        asked = 0
        while asked < calls:
            thread = self.rng.choice(self.threads)
            if len(thread.entries) > MOST_ENTRIES:
                thread = self.restart(thread)
            if self.carries and asked == calls // 2:
                self.names.append(f"{self.name}-again")
                self.oracle.lose_store()
            done = []
            for _ in range(1 if self.rng.random() < 0.8 else 2):
                name = self.rng.choices(names, weights)[0]
                done.append(name)
                thread = deeds[name][0](thread) or thread
            asked += 1
            self.trace.append(f"call {asked}: {' + '.join(done)}")
            await self.ask(thread)
        await self.oracle.close(self.names)

    @property
    def name(self) -> str:
        """The session's name at the proxy."""
        return self.names[-1]

    def _deeds(self) -> dict[str, tuple[Callable[[Thread], Thread | None], float]]:
        edits = 1.0
        return {
            "go on": (lambda _: None, 14),
            "retry": (self.retry, 2),
            "fork": (self.fork, 1.5),
            "sub-agent": (self.sub_agent, 1.5),
            "roll back": (self.roll_back, 1.5),
            "compact": (self.compact, 1),
            "prune": (self.prune, 1),
            "one character": (self.one_character, 2 * edits),
            "few-shot": (self.few_shot, 0.7),
            "own words": (self.own_words, 0.8),
            "own reasoning changes": (self.own_reasoning, 0.5),
            "white space": (self.white_space, 1),
            "context in parts": (self.context_parts, 0.7),
            "other writing": (self.other_writing, 2),
            "other reasoning": (self.other_reasoning, 1),
            "other ids": (self.other_ids, 1),
            "switch": (self.switch, 0.8),
            "system": (self.other_system, 0.8),
            "tools": (self.other_tools, 0.4),
            "later system": (self.later_system, 0.3),
            "no handle": (self.no_handle, 0.0 if self.dialect == "chat" else 1.0),
            "drop": (self.drop, 0.7),
            "say twice": (self.say_twice, 0.5),
            "special tokens": (self.special_tokens, 0.7),
            "odd call": (self.odd_call, 0.4),
            "sibling": (self.sibling, 0.8),
        }

    # calls

    async def ask(self, thread: Thread) -> None:
        """Call the model with a thread's history, and add the reply to it."""
        continued = thread.entries[-1] if self.may_continue(thread.entries[-1]) else None
        if continued is None:
            self.ready(thread)
        entries = thread.entries[:] = dialects.presentable(self.dialect, thread.entries)
        sent = [*entries, Entry(CONTEXT)] if thread.moves_context and continued is None else entries
        said = self.invent(thread, continues=continued is not None)
        limits = self.limits(thread, continues=continued is not None)
        body = dialects.write(self.dialect, self.carrying(sent), TOOLS[thread.tools], thread.kwargs, limits)
        try:
            breaks = self.breaks if self.dialect == "chat" and continued is None and self.breaks.random() < 0.1 else None
            called = await self.stack.call(self.name, body, said, dialect=self.dialect, leniency=self.leniency, breaks=breaks)
        except HarnessError:
            self.tally.counts["not read"] += 1
            self.restart(thread)
            return
        self._show(called, said)
        broken = called.generation is not None and called.generation.label == "abort"
        served, handle = dialects.served(self.dialect, called.answer) if called.answer else ({}, "")
        if broken:
            served = called.generation.message
            self.tally.counts["broken off"] += 1
            self.tally.counts["broken off in a text"] += not served.get("tool_calls")
        owing = not self.leniency.off
        kept = self.understood(thread, served) if served and self.is_vouched and continued is None else served
        kept = None if not served or says(kept, served) else kept
        shown = self.without_hidden_calls(called, served)
        kept = kept or shown
        number = self.oracle.judge(called, tuple(sent), scope=thread.scope, owing=owing, handle=handle, kept=kept)
        if number is None:
            self.restart(thread)
            return
        assert called.generation is not None
        heard = called.generation.message
        self.tally.counts["served otherwise"] += not says(served, heard)  # the dialect cannot write it
        entry = Entry(served, number, handle=handle, kept=shown, owed=shown is None)
        if called.generation.cut and not thread.stop and self.may_continue(replace(entry, continues=True)):
            entry = replace(entry, continues=self.rng.random() < 0.6)
        if continued is not None:
            thread.entries[-1] = self.join(continued, entry)
            return
        if broken and not any(served.get(name) for name in ("content", "reasoning", "tool_calls")):
            return
        entry = self.understand(thread, entry)
        for habit in thread.habits:
            entry = replace(entry, message=HARMLESS[habit](entry.message, self.rng))
        if thread.stop and called.generation.completion and text_of(heard) and not call_ids(heard):
            entry = self.write_back(thread, replace(entry, stop=called.generation.stop))
        thread.entries.append(entry)

    def without_hidden_calls(self, called: Called, served: Message) -> Message | None:
        """The served message, if the dialect cannot show some calls of the reply and nothing else differs."""
        reply = called.generation.message if called.generation is not None else {}
        shown = dialects.shown(self.dialect, reply)
        return served if served and shown is not reply and says(served, shown) else None

    def may_continue(self, entry: Entry) -> bool:
        """Whether the next reply continues this one: in chat by a member of the request, in Messages wherever it is the last entry."""
        text = text_of(entry.message)
        known = {"chat": text, "messages": text.strip()}.get(self.dialect)
        return entry.continues and bool(known) and not call_ids(entry.message)

    def limits(self, thread: Thread, *, continues: bool) -> dict[str, Any]:
        """The members of a request that end a reply."""
        found: dict[str, Any] = {"stop": [thread.stop]} if thread.stop else {}
        if self.rng.random() < 0.1:
            found["max_tokens"] = self.rng.randrange(1, 30)
        if thread.budget is not None:
            found["thinking_token_budget"] = thread.budget
        if self.stack.engine.base:
            found["stop_token_ids"] = self.stack.engine.ends()
        return found | ({"continue_final_message": True, "add_generation_prompt": False} if continues else {})

    def understand(self, thread: Thread, entry: Entry) -> Entry:
        """Keep a reply as this harness understands it."""
        message = self.understood(thread, entry.message)
        if says(message, entry.message):
            return entry
        self.tally.counts["understood otherwise"] += 1
        return replace(entry, message=message, kept=message if self.is_vouched else None, owed=False)

    def understood(self, thread: Thread, message: Message) -> Message:
        """What this harness makes of a reply."""
        for change in UNDERSTOOD.get(self.does, ()):
            message = change(message, [tool["function"]["name"] for tool in TOOLS[thread.tools]])
        return message

    @property
    def is_vouched(self) -> bool:
        """Whether a rule of the proxy covers what this harness does to replies."""
        return self.is_named or self.does in BY_THEMSELVES

    def write_back(self, thread: Thread, entry: Entry) -> Entry:
        """Write the stop string at the end of a reply, or a result behind it."""
        added = thread.stop + (f" {self.rng.choice(RESULTS)}" if thread.observes else "")
        message = {**entry.message, "content": text_of(entry.message) + added}
        self.tally.counts["added to"] += 1
        return replace(entry, message=message, kept=message, added=added, owed=False)

    def join(self, begun: Entry, more: Entry) -> Entry:
        """The two parts of a reply as one."""
        message = {**begun.message, "content": text_of(begun.message) + text_of(more.message)}
        parts = (*(begun.parts or (begun.turn,)), more.turn)
        own = self.oracle.truth(begun) is not None
        self.tally.counts["joined"] += 1
        parts = parts if own else ()
        return replace(more, message=message, parts=parts, kept=message, begun=begun.begun or not own, handle=begun.handle, owed=False)

    def carrying(self, entries: list[Entry]) -> list[Entry]:
        """The entries as they are sent: with the token ids of each reply, even if its words were changed."""
        if not self.carries:
            return entries
        return [entry if entry.turn is None else replace(entry, message={**entry.message, **self.ids_of(entry.turn)}) for entry in entries]

    def ids_of(self, turn: int) -> dict[str, list[int]]:
        """The members with token ids of a turn's message; every sixteenth turn has those of another turn."""
        said = self.oracle.turns[turn]
        prompt = [said.prompt[0] + 1, *said.prompt[1:]] if turn % 16 == 15 else said.prompt
        return {"prompt_token_ids": prompt, "generation_token_ids": said.completion}

    def _show(self, called: Called, said: Message) -> None:
        """Write a call into the trace."""
        for i, raw in enumerate(called.call.raw_messages):
            handle = called.call.handles.get(i, "")
            self.trace.append(f"    {i:3} {raw.decode()} {handle}")
        anchors = [(getattr(a, "place", "?"), self.oracle.numbers.get(a.turn), a.start, a.end) for a in called.plan.anchors]
        parent = self.oracle.numbers.get(called.plan.parent or "")
        args = called.call.args.kwargs, called.call.tool_count
        self.trace.append(f"    {args} {called.plan.match} {called.plan.reason}, parent {parent}, anchors {anchors}")
        self.trace.append(f"    → turn {len(self.oracle.turns)}: {said} {called.refused}")

    def restart(self, thread: Thread) -> Thread:
        """Start a new history: the old one is long, or the engine or the proxy refuses it."""
        new = self.new_thread()
        self.threads = [new if one is thread else one for one in self.threads]
        return new

    def ready(self, thread: Thread) -> None:
        """Add a message that the model can answer."""
        last = thread.entries[-1]
        if not last.is_reply or (thread.observes and last.added):
            return
        names = call_ids(last.message)
        for name in names:
            text = self.rng.choice(RESULTS)
            thread.entries.append(Entry({"role": "tool", "tool_call_id": name, "content": text}))
        if not names or self.rng.random() < 0.1:
            thread.entries.append(self.user())

    def invent(self, thread: Thread, *, continues: bool = False) -> Message:
        """The model's next reply: few words, so that many replies are equal."""
        rng = self.rng
        said: Message = {"role": "assistant", "content": rng.choice(self.pool)}
        if continues:
            return said
        if self.thinks and rng.random() < 0.7:
            said["reasoning"] = rng.choice(THOUGHTS)
        if (number := rng.choice([0, 0, 1, 1, 1, 2])) and self.stack.kind.style != "llama":
            arguments = ARGUMENTS + (ODD_ARGUMENTS if self.odd else [])
            names = MEANT if self.does else NAMES
            said["tool_calls"] = [
                {"id": self.name_call(i), "type": "function", "function": {"name": rng.choice(names), "arguments": rng.choice(arguments)}}
                for i in range(number)
            ]
            if number > 1 and self.does and rng.random() < 0.5:
                said["tool_calls"][1]["function"] = said["tool_calls"][0]["function"]
            if rng.random() < 0.4:
                said["content"] = None
        if rng.random() < 0.04 and (said.get("content") or said.get("tool_calls")):  # an engine samples at least one id
            said["finish_reason"] = "length"
        if self.dialect in {"messages", "gemini"} and not said.get("tool_calls") and not said["content"]:
            said["content"] = "OK"  # these dialects cannot send an empty reply back
        if thread.stop and rng.random() < 0.7:
            said["content"] = f"{said['content'] or 'I search'}{thread.stop}{rng.choice(['', ' more', chr(10)])}"
        return said

    def name_call(self, i: int) -> str:
        self.fresh += 1
        if self.makes == "nine":
            return f"{self.rng.getrandbits(36):09x}"
        if self.makes == "colliding":
            return f"functions.bash:{i}"
        if self.makes == "counted":
            return f"functions.bash:{self.fresh}"
        return f"{'toolu_' if self.makes == 'toolu' else 'chatcmpl-tool-'}{self.rng.getrandbits(96):024x}"

    def user(self) -> Entry:
        return Entry({"role": "user", "content": self.rng.choice(ASKS)})

    def new_thread(self) -> Thread:
        rng = self.rng
        entries = [Entry({"role": "system", "content": rng.choice(SYSTEMS)})] if rng.random() < 0.8 else []
        kwargs = rng.choice([{}, {}, {}, {"enable_thinking": False}, {"enable_thinking": True}]) if self.dialect == "chat" else {}
        habits = rng.sample(self.forms, rng.choice([0, 0, 1, 1, 2]))
        thread = Thread([*entries, self.user()], kwargs, rng.randrange(len(TOOLS)), tuple(habits))
        match rng.random():
            case chance if chance < 0.1:
                thread.stop, thread.habits = rng.choice(STOPS), ()
                thread.observes = rng.random() < 0.5 and self.dialect != "messages"  # there the model continues a message at the end
            case chance if chance < 0.15:
                thread.moves_context = True
            case chance if chance < 0.35 and self.thinks and self.stack.engine.thinking:
                thread.budget = rng.choice([0, 1, 2, 3, 5, 8, 100])
        return thread

    # what clients do

    def add(self, thread: Thread) -> Thread:
        if len(self.threads) >= MOST_THREADS:
            self.threads.pop(0)
        self.threads.append(thread)
        return thread

    def replies(self, thread: Thread, *, own: bool = False) -> list[int]:
        """The places of the model's replies; with `own`, of the client's own assistant messages as well."""
        return [i for i, entry in enumerate(thread.entries) if entry.is_reply and (own or entry.turn is not None)]

    def others(self, thread: Thread) -> list[int]:
        return [i for i, entry in enumerate(thread.entries) if not entry.is_reply]

    def retry(self, thread: Thread) -> Thread | None:
        """Send the same request again, to replace the last reply or in a second thread."""
        if not thread.entries[-1].is_reply:
            return None
        again = thread.copy()
        again.entries.pop()
        if self.rng.random() < 0.5:
            return self.add(again)
        thread.entries.pop()
        return thread

    def fork(self, thread: Thread) -> Thread:
        return self.add(thread.copy())

    def sub_agent(self, _: Thread) -> Thread:
        return self.add(self.new_thread())

    def roll_back(self, thread: Thread) -> None:
        places = self.replies(thread, own=True)
        if places:
            del thread.entries[self.rng.choice(places) :]
            if not thread.entries or self.rng.random() < 0.7:
                thread.entries.append(self.user())

    def compact(self, thread: Thread) -> None:
        """Keep a summary and the last exchange."""
        places = self.replies(thread)
        if len(places) < 2:
            return
        keep = self.rng.choice(places[-2:])
        keep -= self.rng.random() < 0.5 and thread.entries[keep - 1].message["role"] != "tool"
        summary = Entry({"role": "user", "content": f"Summary: {self.rng.choice(ASKS)}"})
        head = thread.entries[:1] if thread.entries[0].message["role"] == "system" else []
        thread.entries[:] = [*head, summary, *thread.entries[max(keep, len(head)) :]]

    def prune(self, thread: Thread) -> None:
        places = [i for i, entry in enumerate(thread.entries) if entry.message["role"] == "tool"]
        for place in self.rng.sample(places, min(len(places), self.rng.choice([1, 1, 2]))):
            self.say(thread, place, "[pruned]")

    def say(self, thread: Thread, place: int, content: Any) -> None:
        entry = thread.entries[place]
        thread.entries[place] = replace(entry, message={**entry.message, "content": content})

    def edit(self, thread: Thread, place: int, message: Message) -> None:
        """Replace the words of an entry; with other ids it need not be recognised.

        All adapters that are played have the rule `name-lowered`: such a change is a reply as its harness may keep it, with any tools.
        """
        entry = thread.entries[place]
        same_ids = call_ids(message) == call_ids(entry.message)
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        mended = self.does and self.is_named and says(message, with_mended_names(entry.message, names))
        kept = message if mended and not says(message, entry.message) else entry.kept
        thread.entries[place] = replace(entry, message=message, kept=kept, owed=entry.owed and same_ids and kept is entry.kept)

    def one_character(self, thread: Thread) -> None:
        """Change one character anywhere."""
        rng = self.rng
        place = rng.randrange(len(thread.entries))
        message = thread.entries[place].message
        members = [name for name in ("content", "reasoning", "reasoning_content") if isinstance(message.get(name), str)]
        calls = [("call", i, member) for i in range(len(message.get("tool_calls") or ())) for member in ("id", "name", "arguments")]
        if not members and not calls:
            return
        chosen = rng.choice([*members, *calls])
        if isinstance(chosen, str):
            self.edit(thread, place, {**message, chosen: self.nudged(message[chosen])})
            return
        _, n, member = chosen
        calls = [dict(call, function=dict(call["function"])) for call in message["tool_calls"]]
        inner = calls[n] if member == "id" else calls[n]["function"]
        was = inner[member]
        inner[member] = self.nudged(was, "abc") or "x"
        self.edit(thread, place, {**message, "tool_calls": calls})
        if member == "id" and rng.random() < 0.7:
            self.answer(thread, place, {was: inner[member]})

    def nudged(self, text: str, letters: str = LETTERS) -> str:
        at = self.rng.randint(0, len(text))
        letter = self.rng.choice(letters)
        return self.rng.choice([text[:at] + letter + text[at:], text[:at] + letter + text[at + 1 :], text[:at] + text[at + 1 :]])

    def answer(self, thread: Thread, place: int, names: dict[str, str]) -> None:
        """Change the call ids in the results after a reply."""
        for i in range(place + 1, len(thread.entries)):
            message = thread.entries[i].message
            if message["role"] == "assistant":
                return
            if message.get("tool_call_id") in names:
                thread.entries[i] = replace(thread.entries[i], message={**message, "tool_call_id": names[message["tool_call_id"]]})

    def own_reply(self) -> Message:
        message: Message = {"role": "assistant", "content": self.rng.choice([*self.pool, "Of my own."]) or "Of my own."}
        if self.thinks and self.rng.random() < 0.4:
            message["reasoning"] = self.rng.choice([*THOUGHTS, "of my own"])
        return message

    def few_shot(self, thread: Thread) -> Thread | None:
        """Insert an invented exchange at the beginning, in a new conversation or in this one."""
        if self.rng.random() < 0.7:
            thread = self.add(self.new_thread())
        at = thread.entries[0].message["role"] == "system"
        thread.entries[at:at] = [self.user(), Entry(self.own_reply())]
        return thread

    def own_words(self, thread: Thread) -> None:
        """Add an assistant message that the model did not sample."""
        self.ready(thread)
        thread.entries += [Entry(self.own_reply()), self.user()]

    def own_reasoning(self, thread: Thread) -> None:
        """Change the reasoning of an assistant message that the model did not sample."""
        places = [i for i in self.replies(thread, own=True) if thread.entries[i].turn is None]
        if places:
            place = self.rng.choice(places)
            message = thread.entries[place].message
            other = self.rng.choice([{"reasoning": self.rng.choice(THOUGHTS)}, {"reasoning": None}])
            thread.entries[place] = replace(thread.entries[place], message={**message, **other})

    def white_space(self, thread: Thread) -> None:
        """Change the white space around an entry that is not the model's."""
        places = [i for i in self.others(thread) if isinstance(thread.entries[i].message["content"], str)]
        if places:
            place = self.rng.choice(places)
            text = text_of(thread.entries[place].message)
            self.say(thread, place, self.rng.choice([f"{text}\n", f" {text}", text.strip(), f"{text}\u00a0"]))

    def context_parts(self, thread: Thread) -> None:
        """Write an entry that is not the model's in parts, or as a string again."""
        place = self.rng.choice(self.others(thread))
        text = text_of(thread.entries[place].message)
        parted = isinstance(thread.entries[place].message["content"], list)
        pieces = text.split("\n") if self.dialect == "chat" and self.rng.random() < 0.5 else [text]
        self.say(thread, place, text if parted else [{"type": "text", "text": piece} for piece in pieces])

    def other_writing(self, thread: Thread) -> None:
        """Write replies in another form that the rules normalise."""
        form = HARMLESS[self.rng.choice(self.forms)]
        chance = self.rng.choice([0.4, 1.0])
        for place in self.replies(thread, own=True):
            if self.rng.random() < chance:
                entry = thread.entries[place]
                thread.entries[place] = replace(entry, message=form(entry.message, self.rng))

    def other_reasoning(self, thread: Thread) -> None:
        """Send other reasoning than the model's, of the last reply or of an older one."""
        places = self.replies(thread)
        if places:
            place = self.rng.choice(places)
            message = thread.entries[place].message
            was = message.get("reasoning") or "hm"
            self.edit(thread, place, {**message, "reasoning": self.rng.choice([self.nudged(was), *THOUGHTS])})

    def other_ids(self, thread: Thread) -> None:
        """Rename all calls and the results that answer them: unsafe characters only, all but letters and digits, or the whole id."""
        form = self.rng.choice([safe, safe, bare, None])
        for place in self.replies(thread, own=True):
            message = thread.entries[place].message
            names = {}
            for name in call_ids(message):
                self.fresh += 1
                names[name] = form(name) if form else f"n{self.fresh:08}"
            if names:
                calls = [{**call, "id": names[call["id"]]} for call in message["tool_calls"]]
                thread.entries[place] = replace(thread.entries[place], message={**message, "tool_calls": calls})
                self.answer(thread, place, names)

    def switch(self, thread: Thread) -> None:
        """Change the template arguments, or switch thinking by words in a message."""
        if self.dialect == "chat" and self.rng.random() < 0.5:
            thread.kwargs = self.rng.choice([{}, {"enable_thinking": False}, {"enable_thinking": True}])
        else:
            place = self.rng.choice(self.others(thread))
            text = text_of(thread.entries[place].message)
            if thread.entries[place].message["role"] != "tool":
                self.say(thread, place, text.replace(" /no_think", "") if "/no_think" in text else f"{text} /no_think")

    def other_system(self, thread: Thread) -> None:
        if thread.entries[0].message["role"] == "system":
            self.say(thread, 0, f"{self.rng.choice(SYSTEMS)} {self.rng.randrange(9)}")

    def later_system(self, thread: Thread) -> None:
        """Add a system message in the middle."""
        self.ready(thread)
        thread.entries.append(Entry({"role": "system", "content": self.rng.choice(["Hurry.", "You have 3 turns left."])}))

    def no_handle(self, thread: Thread) -> None:
        """Drop the handles that replies should carry."""
        thread.entries[:] = [replace(entry, handle="") for entry in thread.entries]

    def other_tools(self, thread: Thread) -> None:
        thread.tools = self.rng.randrange(len(TOOLS))

    def drop(self, thread: Thread) -> None:
        """Leave an exchange out: a reply and what answers its calls, or an entry alone."""
        places = self.replies(thread, own=True)
        if not places or len(thread.entries) < 4:
            return
        place = self.rng.choice(places)
        end = place + 1
        while end < len(thread.entries) and thread.entries[end].message["role"] == "tool":
            end += 1
        del thread.entries[place : self.rng.choice([end, end, place + 1])]

    def say_twice(self, thread: Thread) -> None:
        places = self.replies(thread)
        if places:
            self.ready(thread)
            copied = replace(thread.entries[self.rng.choice(places)], owed=False)
            thread.entries += [copied, self.user()] if not call_ids(copied.message) else [copied]

    def special_tokens(self, thread: Thread) -> None:
        """Write the template's own tokens into a result or a user message."""
        places = [i for i in self.others(thread) if thread.entries[i].message["role"] != "system"]
        if places:
            tokens = self.rng.choices([*self.stack.kind.tokens, "assistant\n", "\n", "x"], k=4)
            self.say(thread, self.rng.choice(places), "".join(tokens))

    def odd_call(self, thread: Thread) -> None:
        """Add an assistant message with a call whose arguments are unusual."""
        self.ready(thread)
        name = self.rng.choice(
            [f"own{self.fresh:06}", *(name for i in self.replies(thread) for name in call_ids(thread.entries[i].message))]
        )
        function = {"name": "bash", "arguments": self.rng.choice(ODD_ARGUMENTS + ARGUMENTS)}
        call = {"id": name, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": name, "content": self.rng.choice(RESULTS)}
        thread.entries += [Entry({"role": "assistant", "content": "", "tool_calls": [call]}), Entry(result)]

    def sibling(self, thread: Thread) -> None:
        """Replace a reply with another one, with the same words if there is one."""
        places = self.replies(thread)
        if places:
            place = self.rng.choice(places)
            words = meaning(thread.entries[place].message)
            same = [said for said in self.oracle.turns.values() if said.words == words]
            said = self.rng.choice(same or list(self.oracle.turns.values()))
            before = thread.entries[place].message
            owed = dialects.sayable(self.dialect, said.reply)
            thread.entries[place] = Entry(dict(said.reply), said.number, handle=said.handle, owed=owed)
            names = dict(zip(call_ids(before), call_ids(said.reply), strict=False))
            self.answer(thread, place, names)
