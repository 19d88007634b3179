"""A small world to try the core in: a model, a template, an index, and harnesses that do all that harnesses do.

The world knows what the core must find out: every entry of a harness's history carries, beside its message, the turn
that it truly is (`truth`) and what it says however it is written (`meaning`). `World.call` matches a history, holds
the result against that knowledge, splices, samples and records. It shares no code with `canonical`, `chain` or
`match`, so it can be wrong only in its own way.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tests.support import invariants
from tokencache.core import evidence, ids, verdict
from tokencache.core import match as matching
from tokencache.core.chain import POSITION_KEY, Conversation, aborted_turn_keys, build_conversation, lookup_keys, turn_keys
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.match import Hit, Match
from tokencache.core.messages import Message, ToolCall, digest
from tokencache.core.rules import Leniency
from tokencache.core.splice import join, junction
from tokencache.core.turn import Anchor, Tokens, Turn, hash_ids

if TYPE_CHECKING:
    import random

ROLE = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END, THINK, THOUGHT, CALL, ARGS = 5, 6, 7, 8, 9
Came = tuple[dict[int, str], dict[int, ReturnedIdHashes]]
"""What came back with the replies of a history, by place: handles, and token ids."""
NAMES = {1: "<system>", 2: "<user>", 3: "<assistant>", 4: "<tool>", END: "<end>\n", THINK: "<think>", THOUGHT: "</think>"}
NAMES |= {CALL: "<call>", ARGS: "<args>"}
CHARS, PAIRS = 100, 100_000
LIE = "never thought so "
SPACE = " \n\ufeff\xa0"
MARKUP = "<tool_call>x</tool_call>"
HABITS = frozenset({"cd-prefix", "coerced-values", "markup-removed"})
"""Rules that a harness may have vouched for; what they do is written here once more (`rewritten`)."""


class WrongMatchError(AssertionError):
    """The matcher took something for what it is not."""


def spell(text: str, rng: random.Random | None = None) -> list[int]:
    """Tokenize: a token per character, or (`rng`) some other tokens that spell the same."""
    spelled, at = [], 0
    while at < len(text):
        pair = text[at : at + 2]
        if rng is not None and len(pair) == 2 and pair.isascii() and rng.random() < 0.5:
            spelled.append(PAIRS + ord(pair[0]) * 128 + ord(pair[1]))
            at += 2
        else:
            spelled.append(CHARS + ord(text[at]))
            at += 1
    return spelled


def decode(tokens: Any) -> str:
    def one(t: int) -> str:
        if t in NAMES:
            return NAMES[t]
        return chr((t - PAIRS) // 128) + chr((t - PAIRS) % 128) if PAIRS <= t < PAIRS + 128 * 128 else chr(t - CHARS)

    return "".join(map(one, tokens))


@dataclass(frozen=True)
class Entry:
    """One entry of a harness's history."""

    message: Message
    origin: str | None = None
    """The turn that an assistant's entry comes from, if the model said it."""
    meaning: Any = None
    """What it says, however it is written."""
    handle: str = ""
    """What came with it, to be echoed."""
    tokens: ReturnedIdHashes | None = None
    """The ids that came with it, as they are echoed; they may be anybody's."""

    @property
    def truth(self) -> str | None:
        """The turn that it is: none, while it holds reasoning that the model never had."""
        return None if LIE in (self.message.reasoning or "") + (self.message.content or "") else self.origin


def entry(role: str, content: str, answers: str | None = None) -> Entry:
    return Entry(Message(role, content, answers=answers), meaning=(role, content.strip()))


def template(said: Entry, *, reply_only: bool = False) -> list[int]:
    """Render one message as the template does: trimmed, without reasoning, arguments in one form."""
    message, meaning = said.message, said.meaning
    body = spell(meaning[1])
    for name, value in meaning[2] if message.role == "assistant" else ():
        body += [CALL, *spell(name), ARGS, *spell(value)]
    return [*([] if reply_only else [ROLE[message.role]]), *body, END]


def meaning_of(message: Message) -> Any:
    """What an assistant's message says, however it is written."""
    calls = tuple((c.name, json.dumps(json.loads(c.arguments or "{}"), sort_keys=True)) for c in message.calls)
    return ("assistant", (message.content or "").split("</think>")[-1].strip(SPACE), calls)


def rewritten(message: Message) -> Message:
    """Do to a reply what `HABITS` do: Claude Code to arguments, Hermes to texts."""

    def one(call: ToolCall) -> ToolCall:
        value = json.loads(call.arguments or "{}")
        if call.name == "Bash" and "command" in value:
            value = {**value, "command": value["command"].removeprefix("cd /w && ")}
        value = {name: 5 if member == "5" else member for name, member in value.items()}
        return msgspec.structs.replace(call, arguments=json.dumps(value))

    text = (message.content or "").split("</think>")[-1].strip(SPACE).replace(MARKUP, "").strip(SPACE)
    return msgspec.structs.replace(message, content=text, reasoning=None, calls=tuple(map(one, message.calls)))


@dataclass
class World:
    """One session: what was recorded, the engine's ground-truth log, and what is true."""

    rng: random.Random
    turns: list[Turn] = field(default_factory=list)
    tokens: dict[str, Tokens] = field(default_factory=dict)
    index: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))
    continued: set[str] = field(default_factory=set)
    prefixes: dict[str, bytes] = field(default_factory=dict)
    own: dict[str, list[Anchor]] = field(default_factory=dict)
    asked: dict[str, list[Entry]] = field(default_factory=dict)
    recorded: dict[Any, list[str]] = field(default_factory=lambda: defaultdict(list))
    ground_truth: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    sayings: dict[str, list[Any]] = field(default_factory=dict)
    leniency: Leniency = field(default_factory=Leniency)
    serial: int = 0

    def __post_init__(self) -> None:
        self.carries = self.rng.random() < 0.5
        """Whether its harness sends token ids back."""
        self.terse = self.rng.random() < 0.3
        """Whether the model says the same all the time, in ever other tokens."""
        self.leniency = Leniency(harness_rules=HABITS if self.rng.random() < 0.7 else frozenset())

    def fresh(self) -> int:
        self.serial += 1
        return self.serial

    def turn(self, name: str) -> Turn:
        return next(turn for turn in self.turns if turn.id == name)

    # the index: as a store would answer

    def hits(self, conversation: Conversation, handles: dict[int, str], *, short: bool = False) -> dict[bytes, list[Hit]]:
        found: dict[bytes, list[Hit]] = {}
        for key in lookup_keys(conversation, handles=handles):
            found[key] = self.look(key)
            if short and found[key] and key[:1] == b"c":
                break
        return found

    def look(self, key: bytes) -> list[Hit]:
        return [Hit(self.turn(t), t in self.continued) for t in self.index.get(key, ())]

    def match(self, conversation: Conversation, came: Came, hits: dict[bytes, list[Hit]]) -> Match:
        """Match as the planner does: look again where the match is unsure, and let go of a beginning that no token ends."""
        turns, (handles, echoed) = None, came
        matched = partial(matching.match, leniency=self.leniency, handles=handles, echoed=echoed)
        found = matched(conversation, hits)
        if found.turns_wanted:
            self.seen["judged anew"] += 1
            turns = {turn.id: turn for turn in self.turns}
            hits = {**self.hits(conversation, handles), **hits}
            found = matched(conversation, hits, turns=turns)
        if found.unsure:
            hits = {**hits, **{key: self.look(key) for key in found.unsure}}
            found = matched(conversation, hits, turns=turns)
        if found.delivered is None or self.kept(found) is not None:
            return found
        self.seen["inside-token"] += 1
        key = POSITION_KEY + conversation.chain[found.at - 1]
        without = {**hits, key: [hit for hit in hits[key] if hit.turn.id != found.delivered.turn.id]}
        return self.match(conversation, came, without)

    def kept(self, found: Match) -> int | None:
        """How many tokens of its parent a harness has heard: those that spell what it holds, if any do."""
        part = found.delivered
        assert part is not None
        completion = ids.unpack(self.tokens[part.turn.id].completion)
        spelled = [n for n in range(part.first, part.after + 1) if decode(completion[part.first : n]) == part.text]
        return spelled[0] if spelled else None

    # one call

    def call(self, history: list[Entry], scope: bytes = b"main", *, leave: bool = False) -> Entry:
        conversation = build_conversation(scope, [e.message for e in history])
        handles = {i: e.handle for i, e in enumerate(history) if e.handle}
        came = handles, {i: e.tokens for i, e in enumerate(history) if e.tokens}
        found = self.match(conversation, came, self.hits(conversation, handles))
        self.judge(found, history, scope, complete=True)
        short = self.match(conversation, came, self.hits(conversation, handles, short=True))
        self.judge(short, history, scope, complete=False)
        self.seen.update([found.kind, *([found.reason] if found.reason else []), *found.applied_rules])
        prompt, own = self.splice(found, history)
        rendered = decode(t for e in history for t in template(e)) + NAMES[ROLE["assistant"]]
        written = [self.written(history[span.place], span.end, prompt) for span in own]
        assert invariants.fidelity(prompt, [(span.start, span.end) for span in own], decode, rendered, written) == []
        return self.record(conversation, history, scope, (found, prompt, own), leave=leave)

    @staticmethod
    def written(said: Entry, end: int, prompt: list[int]) -> str:
        body = template(said, reply_only=True)
        return decode(body if prompt[end - 1] == END else body[:-1])

    def splice(self, found: Match, history: list[Entry]) -> tuple[list[int], list[Anchor]]:
        """The prompt, and where in it the model's replies stand."""
        own: list[Anchor] = []
        packed, start = b"", 0
        pending = b""  # a reply whose end of turn is still to come

        def put(tail: list[int]) -> None:
            nonlocal packed, pending
            where = junction(pending, ids.pack(tail), {END})
            assert where.drop == 0
            packed, pending = join(packed, ids.pack(tail), where), b""

        if found.parent is not None:
            parent = found.parent.id
            packed, start = self.prefixes[parent], found.at
            pending = self.tokens[parent].completion
            if found.delivered is not None:
                packed = ids.head(packed, found.parent.prompt_tokens + (self.kept(found) or 0))
                pending = ids.tail(packed, found.parent.prompt_tokens)
            own = [*self.own[parent], Anchor(parent, found.parent.prompt_tokens, ids.count(packed), found.at - 1)]
            put([END])
        standing = {i: hit.turn.id for i, hit in found.anchors}
        for i in range(start, len(history)):
            if i in standing:
                put([ROLE["assistant"]])
                begin, pending = ids.count(packed), self.tokens[standing[i]].completion
                packed += pending
                own.append(Anchor(standing[i], begin, ids.count(packed), i))
                put([END])
            else:
                put(template(history[i]))
        put([ROLE["assistant"]])
        return ids.unpack(packed), own

    def record(self, conversation: Conversation, history: list[Entry], scope: bytes, sent: Any, *, leave: bool) -> Entry:
        found, prompt, own = sent
        name = f"t{len(self.turns)}"
        completion, served = self.sample()
        whole, cuts = completion, []
        leave = leave and not served.calls and "<think>" not in (served.content or "")
        if leave:
            completion, served, cuts = self.left(completion, served)
        handle = f"{self.fresh():032x}"
        values = array("f", (-self.rng.random() * 3 for _ in completion)).tolist()
        if self.rng.random() < 0.1:
            values = [v / 3 for v in values]
        bare = self.rng.random() < 0.05
        packed = ids.pack(prompt)
        parent = found.parent.id if found.parent is not None else None
        shared = ids.common_head(self.prefixes[parent], packed) if parent is not None else 0
        shortened = found.delivered is not None and shared < ids.count(self.prefixes[parent])
        follows = found.kind in ("continue", "branch") and not shortened
        anchors = () if follows else tuple(own)
        turn = Turn(
            id=name,
            call=name,
            match="resplice" if shortened else found.kind,
            reason=found.reason,
            parent=parent if follows else None,
            origin=None if follows else parent,
            applied_rules=found.applied_rules,
            anchors=anchors,
            base=parent,
            shared=shared,
            prompt_tokens=len(prompt),
            completion_tokens=len(completion),
            prefix_hash=hash_ids(packed + ids.pack(completion)),
            completion_hash=hash_ids(ids.pack(completion)),
            served=served,
            position_key=conversation.chain[-1],
            judged=evidence.judged_hash(
                conversation, len(history), self.leniency, {i: e.handle for i, e in enumerate(history) if e.handle}
            ),
            foreign=evidence.foreign_hash(
                conversation,
                found.at if follows else 0,
                len(history),
                {anchor.place for anchor in anchors},
                self.turn(parent).foreign if follows and parent is not None else b"",
            ),
            before=evidence.preceding_hash(conversation, len(history)),
            messages=len(history),
            handle=handle,
            cuts=verdict.pack_cuts(cuts),
            stopped=completion[-1:] == [END],
            marks=(*(("no-logprobs",) if bare and completion else ()), *(("aborted",) if leave else ())),
        )
        self.ground_truth.append((prompt, whole, [*values, *[-1.0] * (len(whole) - len(completion))]))
        self.turns.append(turn)
        self.tokens[name] = Tokens(ids.tail(packed, shared), ids.pack(completion), b"" if bare else ids.pack_logprobs(values))
        self.prefixes[name] = packed + ids.pack(completion)
        self.own[name], self.asked[name] = own, list(history)
        if turn.parent is not None:
            self.continued.add(turn.parent)
        whole_keys = turn_keys(conversation, served, digest(served), handle=handle, leniency=self.leniency)
        for key in aborted_turn_keys(conversation) if leave else whole_keys:
            self.index[key].append(name)
        self.recorded[self.place(history, len(history), scope)].append(name)
        if leave:
            return self.overheard(name, served, cuts)
        said = Entry(
            served, name, meaning_of(served), handle, ReturnedIdHashes(turn.prefix_hash, turn.completion_hash) if self.carries else None
        )
        self.sayings[name] = [said.meaning, meaning_of(rewritten(served))] if self.leniency.harness_rules else [said.meaning]
        return said

    def left(self, completion: list[int], served: Message) -> tuple[list[int], Message, list[verdict.Cut]]:
        """Leave in mid-stream: events of a token or two, and sometimes a character is held back."""
        first = completion.index(THOUGHT) + 1 if THOUGHT in completion else 0
        end = len(completion) - (completion[-1:] == [END])
        cuts: list[verdict.Cut] = []
        at, heard = first, ""
        while at < end and (not cuts or self.rng.random() < 0.8):
            before, at = at, min(end, at + self.rng.choice([1, 1, 2]))
            text = decode(completion[first:at])
            text = text[: len(text) - (self.rng.random() < 0.3)]
            if len(text) > len(heard):
                heard = text
                cuts.append(verdict.Cut(before, at, len(text), len(served.reasoning or "")))
        return completion[:at], msgspec.structs.replace(served, content=heard or None), cuts

    def overheard(self, name: str, served: Message, cuts: list[verdict.Cut]) -> Entry:
        """What the harness keeps of a reply that it left: the text up to an event that it had got."""
        self.sayings[name] = []
        self.seen["left"] += 1
        text = (served.content or "")[: self.rng.choice(cuts[-2:]).content] if cuts else ""
        message = Message("assistant", text, self.rng.choice([None, served.reasoning]))
        return Entry(message, name, meaning_of(message))

    def said_there(self, history: list[Entry], at: int, scope: bytes) -> list[str]:
        """The whole replies that were given behind the first `at - 1` entries and that may have come back as the next one."""
        here = self.recorded.get(self.place(history, at - 1, scope), [])
        return [name for name in here if history[at - 1].meaning in self.sayings[name]]

    def sample(self) -> tuple[list[int], Message]:
        """Speak: few different texts, in ever other tokens."""
        rng = self.rng
        text = rng.choice(["OK", "OK", "yes", "go on", " padded\n", "", f"OK{MARKUP}"])
        reasoning = rng.choice([None, None, None, "because", "since"])
        inline = reasoning is not None and rng.random() < 0.3
        calls = []
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            name = rng.choice(["functions.bash:{}", "call-{:08d}"]).format(self.fresh())
            commands = ['{"command": "cd /w && ls"}', '{"command": "ls"}']
            arguments = [*commands, '{"a": 1, "b": [2.0]}', '{"b": "x"}', "", '{"b": "5"}', '{"b": 5}']
            calls.append(ToolCall(name, rng.choice(["Bash", "edit"]), rng.choice(arguments)))
        if self.terse:
            text, reasoning, inline, calls = "OK", None, False, []
        other = rng.choice([None, None, rng])
        completion = [THINK, *spell(reasoning, other), THOUGHT] if reasoning else []
        completion += spell(text, other)
        for call in calls:
            completion += [
                CALL,
                *spell(call.name, other),
                ARGS,
                *spell(json.dumps(json.loads(call.arguments or "{}"), sort_keys=True), other),
            ]
        if rng.random() < 0.9:
            completion.append(END)
        if inline:
            return completion, Message("assistant", f"<think>{reasoning}</think>{text}", None, tuple(calls))
        return completion, Message("assistant", text or rng.choice([None, ""]), reasoning, tuple(calls))

    # what is true

    @staticmethod
    def place(history: list[Entry], n: int, scope: bytes) -> Any:
        """What the first `n` entries say, however they are written; a tool's result answers the n-th call before it."""
        said, calls = [], ()
        for e in history[:n]:
            said.append(e.meaning)
            if e.message.role == "assistant":
                calls = tuple(call.id for call in e.message.calls)
            if e.message.role == "tool":
                said.append(e.message.answers)
                said.append(calls.index(e.message.answers) if e.message.answers in calls else e.message.answers)
        return scope, tuple(said)

    def judge(self, found: Match, history: list[Entry], scope: bytes, *, complete: bool) -> None:
        """Hold a match against the truth: it may be missing, never wrong.

        Raises:
            WrongMatchError: it is wrong; or it is missing though nothing stood against it.
        """
        replies = [i for i, e in enumerate(history) if e.message.role == "assistant"]
        expected = "resplice" if found.anchors else "plain" if found.parent is None else None
        expected = "root" if not replies else expected or ("branch" if found.parent.id in self.continued else "continue")
        _so(found.kind == expected, f"{found.kind} is not {expected}")
        _so(found.kind in ("root", "continue", "branch") or found.reason, "no reason")
        if found.parent is not None:
            self._judge_parent(found, history, scope)
        _so([i for i, _ in found.anchors] == sorted({i for i, _ in found.anchors if i >= found.at}), "anchors in disorder")
        _so(len({hit.turn.id for _, hit in found.anchors}) == len(found.anchors), "a turn stands in two places")
        for i, hit in found.anchors:
            turn, truth = hit.turn, history[i].truth
            _so(truth is not None, f"the harness wrote entry {i} itself, not {turn.id}")
            _so(self.turn(truth).completion_hash == turn.completion_hash, f"entry {i} is {truth}, not {turn.id}")
        if complete and replies:
            last = replies[-1]
            truth = history[last].truth
            here = self.said_there(history, last + 1, scope)
            left = any("aborted" in self.turn(t).marks for t in self.recorded.get(self.place(history, last, scope), []))
            alone = len({self.prefixes[t] for t in here}) == 1 and not left
            named = truth is not None and history[last].tokens is not None and history[last].tokens.names(self.turn(truth))
            if truth in here and (alone or named) and self.recognisable(history[last], truth) and self.unchanged(history, truth):
                known = found.at == last + 1 or last in dict(found.anchors)
                _so(known, f"{history[last].truth} was not found, though nothing is ambiguous")

    def unchanged(self, history: list[Entry], turn: str) -> bool:
        """Whether the replies in a turn's prompt came back as the model's, and what else was said there as it was then."""
        standing = {span.place for span in self.own[turn]}
        asked = self.asked[turn]
        return all(e.truth is not None if i in standing else e.message == asked[i].message for i, e in enumerate(history[: len(asked)]))

    def recognisable(self, said: Entry, truth: str) -> bool:
        """Whether an entry says what the turn said, or has kept the ids beside what the harness made of it."""
        issued = tuple(call.id for call in self.turn(truth).served.calls)
        return said.meaning == self.sayings[truth][0] or tuple(call.id for call in said.message.calls) == issued

    def _judge_parent(self, found: Match, history: list[Entry], scope: bytes) -> None:
        parent, at = found.parent, found.at
        assert parent is not None
        truth = history[at - 1].truth
        _so(truth is not None, f"the harness wrote entry {at - 1} itself, not {parent.id}")
        standing = {span.place: span.turn for span in self.own[parent.id]}
        for i, e in enumerate(history[: at - 1]):
            if i in standing:
                _so(e.truth is not None, f"the harness wrote entry {i} itself, not {standing[i]}, which {parent.id} goes on from")
            elif e.message.role == "assistant":
                _so(e.message == self.asked[parent.id][i].message, f"entry {i}, the harness's own, was changed")
        if found.delivered is not None or "aborted" in parent.marks:
            _so(truth == parent.id, f"entry {at - 1} is {truth}, not the beginning of {parent.id}")
            _so(parent.id in self.recorded.get(self.place(history, at - 1, scope), []), f"{parent.id} stood in another context")
            _so(
                found.delivered is not None and found.delivered.text.strip() == history[at - 1].meaning[1],
                f"{parent.id} was not heard that far",
            )
            return
        here = self.said_there(history, at, scope)
        _so(parent.id in here, f"{parent.id} stood in another context")
        if truth in here:
            _so(self.turn(truth).prefix_hash == parent.prefix_hash, f"entry {at - 1} is {truth}, not {parent.id}")
        else:  # brought here from another context, in which the model said the same in this one
            self.seen["moved"] += 1


def _so(holds: Any, what: str) -> None:
    if not holds:
        raise WrongMatchError(what)


# what harnesses do


class Harness:
    """Does to its histories, at random, what the harnesses in `facts/harnesses.md` do, and calls the model."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.threads: list[list[Entry]] = [[entry("system", "be brief"), entry("user", "hello")]]
        self.sent: list[tuple[list[Entry], bytes]] = []

    def step(self) -> None:
        history = self.rng.choice(self.threads)
        deeds = [self.fork, self.roll_back, self.retry, self.replay, *4 * [self.forgivable], *2 * [self.edit], *6 * [self.go_on]]
        self.rng.choice(deeds)(history)

    def ask(self, history: list[Entry]) -> Entry:
        scope = self.rng.choice([b"main"] * 9 + [b"other tools"])
        self.sent.append((list(history), scope))
        said = self.world.call(history, scope, leave=self.rng.random() < 0.15)
        return said if self.rng.random() < 0.5 else replace(said, handle="")

    def go_on(self, history: list[Entry]) -> None:
        last = history[-1].message
        if last.role == "assistant":
            results = [entry("tool", self.rng.choice(["done", "failed"]), call.id) for call in last.calls]
            history += results or [entry("user", self.rng.choice(["next", "why?"]))]
        history.append(self.ask(history))

    def retry(self, history: list[Entry]) -> None:
        if history[-1].message.role != "assistant":
            self.ask(history)
        history.append(self.ask(history))

    def replay(self, history: list[Entry]) -> None:
        if self.sent:
            old, scope = self.rng.choice(self.sent)
            said = self.world.call(old, scope)
            if self.rng.random() < 0.3 and len(self.threads) < 5:
                self.threads.append([*old, said])

    def fork(self, history: list[Entry]) -> None:
        if len(self.threads) < 5:
            self.threads.append(list(history))
            self.go_on(self.threads[-1])

    def roll_back(self, history: list[Entry]) -> None:
        del history[self.rng.randint(2, len(history)) :]
        history.append(entry("user", self.rng.choice(["next", "again"])))
        self.go_on(history)

    def forgivable(self, history: list[Entry]) -> None:
        deeds = [self.spaced, self.trimmed, self.blank, self.parts, self.rejson, self.silent, self.inline]
        rewrite = self.rng.choice([self.rewritten, *deeds])
        chance = self.rng.choice([0.4, 1.0])
        for i, e in enumerate(history):
            if e.message.role == "assistant" and self.rng.random() < chance:
                history[i] = self.rewritten(e) if rewrite == self.rewritten else replace(e, message=rewrite(e.message))
        if self.rng.random() < 0.3:
            self.renamed(history, pattern=self.rng.choice([r"[.:]", r"[.:]", r"[^A-Za-z0-9]", ""]))
        self.go_on(history)

    def rewritten(self, said: Entry) -> Entry:
        """Do what an adapter vouches for; where it does not, the words are the harness's own (of a text nobody could tell: it is left)."""
        message = rewritten(said.message)
        if LIE in (said.message.reasoning or "") + (said.message.content or ""):
            return said
        if not self.world.leniency.harness_rules:
            message = msgspec.structs.replace(said.message, calls=message.calls)
        meaning = meaning_of(message)
        kept = self.world.leniency.harness_rules or meaning == meaning_of(said.message)
        return replace(said, message=message, meaning=meaning, origin=said.origin if kept else None)

    def spaced(self, m: Message) -> Message:
        return msgspec.structs.replace(m, content=f"\n {m.content or ''}\ufeff\xa0", reasoning=m.reasoning and f" {m.reasoning}\n")

    def trimmed(self, m: Message) -> Message:
        return msgspec.structs.replace(m, content=m.content and m.content.strip())

    def blank(self, m: Message) -> Message:
        return m if (m.content or "").strip() else msgspec.structs.replace(m, content=self.rng.choice([None, "", " \n"]))

    def parts(self, m: Message) -> Message:
        return msgspec.structs.replace(m, parts=not m.parts)

    def rejson(self, m: Message) -> Message:
        def one(call: ToolCall) -> ToolCall:
            value = json.loads(call.arguments or "{}")
            return msgspec.structs.replace(call, arguments=json.dumps(dict(reversed(value.items())), indent=1).replace("2.0", "2e0"))

        return msgspec.structs.replace(m, calls=tuple(map(one, m.calls)))

    def silent(self, m: Message) -> Message:
        return msgspec.structs.replace(m, reasoning=None, content=(m.content or "").split("</think>")[-1])

    def inline(self, m: Message) -> Message:
        if m.reasoning is None:
            return m
        return msgspec.structs.replace(m, reasoning=None, content=f"<think>\n{m.reasoning}\n</think>\n\n{m.content or ''}")

    def renamed(self, history: list[Entry], *, pattern: str) -> None:
        """Rename all calls of a history and what answers them: what a pattern matches, or altogether."""
        by = "_" if pattern == r"[.:]" else ""
        names = {}
        for i, e in enumerate(history):
            for call in e.message.calls:
                names[call.id] = re.sub(pattern, by, call.id) if pattern else f"new{self.world.fresh()}"
            calls = tuple(msgspec.structs.replace(call, id=names[call.id]) for call in e.message.calls)
            answers = names.get(e.message.answers or "", e.message.answers)
            history[i] = replace(e, message=msgspec.structs.replace(e.message, calls=calls, answers=answers))

    def edit(self, history: list[Entry]) -> None:
        deeds = [self.other_context, self.drop_reply, self.rewrite, self.rethink, self.rename_tool, self.qwen, self.forge, self.say_twice]
        deeds += [self.other_ids] * self.world.carries + [self.other_agent]
        self.rng.choice(deeds)(history)
        self.go_on(history)

    def replies(self, history: list[Entry]) -> list[int]:
        return [i for i, e in enumerate(history) if e.message.role == "assistant"] or [0]

    def other_context(self, history: list[Entry]) -> None:
        i = self.rng.choice([i for i, e in enumerate(history) if e.message.role != "assistant"])
        m = history[i].message
        history[i] = entry(m.role, f"edited {self.world.fresh()}", m.answers)

    def drop_reply(self, history: list[Entry]) -> None:
        if i := self.rng.choice(self.replies(history)):
            del history[i]

    def forged(self, history: list[Entry], i: int, message: Message) -> None:
        handle = self.rng.choice(["", history[i].handle])  # a handle, too, may stand beside words that are not ours
        tokens = self.rng.choice([None, history[i].tokens])  # and so may token ids
        history[i] = Entry(message, None, meaning_of(message), handle, tokens)

    def rewrite(self, history: list[Entry]) -> None:
        if i := self.rng.choice(self.replies(history)):
            note = f"[rewritten {self.world.fresh()}]"
            self.forged(history, i, msgspec.structs.replace(history[i].message, content=note, reasoning=None))

    def rethink(self, history: list[Entry]) -> None:
        """Send other reasoning beside what somebody said: beside the last reply, an older one, or words of the harness's own."""
        i = self.rng.choice(self.replies(history))
        if i:
            text = (history[i].message.content or "").split("</think>")[-1]
            message = msgspec.structs.replace(history[i].message, reasoning=f"{LIE}{self.world.fresh()}", content=text)
            history[i] = replace(history[i], message=message)

    def rename_tool(self, history: list[Entry]) -> None:
        i = self.rng.choice(self.replies(history))
        m = history[i].message
        if i and m.calls:
            arguments = json.dumps({"error": f"no such tool {self.world.fresh()}"})
            calls = (ToolCall(m.calls[0].id, "invalid", arguments), *m.calls[1:])
            self.forged(history, i, msgspec.structs.replace(m, calls=calls, content=history[i].meaning[1], reasoning=None))

    def qwen(self, history: list[Entry]) -> None:
        i = self.rng.choice(self.replies(history))
        if i and history[i].message.calls:
            text = f"Got it. Thanks for the additional context! ({self.world.fresh()})"
            self.forged(history, i, msgspec.structs.replace(history[i].message, content=text, reasoning=None))

    def forge(self, history: list[Entry]) -> None:
        """Put a call of its own into the history, the twin of one of the model's but for the id."""
        i = self.rng.choice(self.replies(history))
        if i and history[i].message.calls:
            calls = tuple(msgspec.structs.replace(c, id=f"forged{self.world.fresh()}") for c in history[i].message.calls)
            twin = Entry(msgspec.structs.replace(history[i].message, calls=calls), None, history[i].meaning)
            asked = entry("user", f"unheard of {self.world.fresh()}")
            # Beside the genuine call, or in a context of its own, where nothing but the id tells it from the model's.
            history[:] = [*history, asked, twin] if self.rng.random() < 0.5 else [asked, twin]

    def other_ids(self, history: list[Entry]) -> None:
        if i := self.rng.choice(self.replies(history)):
            history[i] = replace(history[i], tokens=ReturnedIdHashes(self.rng.randbytes(16), self.rng.randbytes(16)))

    def other_agent(self, history: list[Entry]) -> None:
        """Let another agent say the same after nearly the same: its message differs in white space, parts, or the call that it answers."""
        i = self.rng.choice(self.replies(history))
        before = history[i - 1].message
        if not i or before.role == "assistant":
            return
        other = [{"content": f" {before.content}\n"}, {"parts": not before.parts}, {"answers": f"call-{self.world.fresh():08d}"}]
        asked = msgspec.structs.replace(before, **self.rng.choice(other[: 2 + (before.role == "tool")]))
        if any(told[-1].message == asked for told in self.world.asked.values()):
            return  # after this message the model may have said it
        calls = tuple(msgspec.structs.replace(c, id=f"other{self.world.fresh()}") for c in history[i].message.calls)
        twin = Entry(msgspec.structs.replace(history[i].message, calls=calls), None, history[i].meaning)
        history[:] = [entry("system", f"agent {self.world.fresh()}"), replace(history[i - 1], message=asked), twin]

    def say_twice(self, history: list[Entry]) -> None:
        if i := self.rng.choice(self.replies(history)):
            history += [entry("user", f"and again {self.world.fresh()}"), history[i]]


def play(rng: random.Random, steps: int = 20) -> World:
    """Let a harness loose on a fresh world."""
    world = World(rng)
    harness = Harness(world)
    for _ in range(steps):
        harness.step()
    return world
